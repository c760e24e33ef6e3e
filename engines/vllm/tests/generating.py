"""What a model says: `python -m tests.generating` prints an Outcome for each line [MODEL, OPTIONS]."""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.checkpoints import VOCABULARY

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip
_IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
_numbers = random.Random(1)
PROMPTS = [[_numbers.randrange(VOCABULARY) for _ in range(length)] for length in (1, 17, 40, 100)]
NEW_TOKENS = 16


@dataclass(frozen=True)
class Outcome:
    """Of PROMPTS, in one batch.

    expert_parameters  numbers in routed experts, of all workers
    log_probabilities  [tokens of prompts, vocabulary] of each token's successor
    texts              tokens that follow each prompt, chosen greedily
    margins            by how much the log-probability of each of these is above the next one's
    """

    expert_parameters: int
    log_probabilities: list[list[float]]
    texts: list[list[int]]
    margins: list[list[float]]

    def distance(self, other: "Outcome") -> float:
        """The root mean square of the difference of log-probabilities."""
        difference = self._array() - other._array()
        return float(np.sqrt((difference**2).mean()))

    def ties(self, texts: list[list[int]]) -> list[float]:
        """The margins where other texts begin to differ from these."""
        pairs = zip(self.texts, texts, self.margins, strict=True)
        found = [
            [margin for a, b, margin in zip(mine, other, margins, strict=True) if a != b]
            for mine, other, margins in pairs
        ]
        return [margins[0] for margins in found if margins]

    def _array(self) -> npt.NDArray[np.float64]:
        return np.array(self.log_probabilities)


class _Process:
    """Generates for one line of JSON after another, [model, options of LLM]."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, open as long as the process runs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.generating"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=ENVIRONMENT | _IN_PROCESS | os.environ, start_new_session=True,
        )  # fmt: skip

    def outcome(self, model: Path, options: dict[str, Any]) -> Outcome:
        """Raises RuntimeError, with what vLLM said, when the process has ended of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(model), options]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"expert_parameters"'):
                return Outcome(**json.loads(line))
        self._errors.seek(0)
        raise RuntimeError(self._errors.read()[-5000:])

    def end(self) -> None:
        """By SIGKILL, as workers of tensor parallel ranks take their time."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_process: _Process | None = None  # of all calls with one rank: to import vLLM takes longer than to generate


def generate(model: Path, **options: Any) -> Outcome:
    """Have vLLM load `model` with these options of `LLM`, and generate."""
    global _process
    is_alone = "tensor_parallel_size" in options
    if is_alone:
        end()
    _process = _process or _Process()
    try:
        outcome = _process.outcome(model, options)
    except BaseException:
        end()
        raise
    if is_alone:
        end()
    return outcome


def end() -> None:
    """End the process that generates, if there is one."""
    global _process
    if _process is not None:
        _process.end()
    _process = None


def _count_expert_parameters(model: Any) -> int:
    parameters = model.named_parameters()
    return sum(value.numel() for name, value in parameters if ".routed_experts." in name)


def _generate(model: str, options: dict[str, Any]) -> Outcome:
    from vllm import LLM, SamplingParams

    from tests import generating

    given = {"max_model_len": 256, "max_num_seqs": 8, "max_logprobs": -1, "enforce_eager": True} | options
    engine = LLM(model=model, disable_log_stats=True, **given)
    count = sum(engine.apply_model(generating._count_expert_parameters))
    wanted = SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=0,
        logprobs=2,
        prompt_logprobs=-1,
        ignore_eos=True,
        detokenize=False,
    )
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], wanted, use_tqdm=False)
    rows = [row for answer in answers for row in answer.prompt_logprobs[1:]]
    texts = [list(answer.outputs[0].token_ids) for answer in answers]
    steps = [
        [sorted(at.logprob for at in step.values()) for step in answer.outputs[0].logprobs]
        for answer in answers
    ]
    return Outcome(
        count,
        [[row[token].logprob for token in range(VOCABULARY)] for row in rows],
        texts,
        [[step[-1] - step[-2] for step in each] for each in steps],
    )


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asdict(_generate(*json.loads(line)))), flush=True)
        gc.collect()
