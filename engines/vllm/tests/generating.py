"""What a model says: `python -m tests.generating MODEL OPTIONS` prints an Outcome as JSON."""

import json
import os
import random
import subprocess
import sys
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


@dataclass(frozen=True)
class Outcome:
    """Of prompts of different lengths, in one batch.

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

    def _array(self) -> npt.NDArray[np.float64]:
        return np.array(self.log_probabilities)


def generate(model: Path, **options: Any) -> Outcome:
    """Have vLLM load `model` with these options of `LLM`, and generate."""
    command = [sys.executable, "-m", "tests.generating", str(model), json.dumps(options)]
    environment = ENVIRONMENT | _IN_PROCESS | os.environ
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-5000:])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"expert_parameters"')]
    return Outcome(**json.loads(line))


def _count_expert_parameters(model: Any) -> int:
    parameters = model.named_parameters()
    return sum(value.numel() for name, value in parameters if ".routed_experts." in name)


def _main(model: str, options: str) -> None:
    from vllm import LLM, SamplingParams

    from tests import generating

    given = {"max_model_len": 256, "max_num_seqs": 8, "max_logprobs": -1, "enforce_eager": True} | json.loads(
        options
    )
    engine = LLM(model=model, disable_log_stats=True, **given)
    count = sum(engine.apply_model(generating._count_expert_parameters))
    numbers = random.Random(1)
    prompts = [[numbers.randrange(VOCABULARY) for _ in range(length)] for length in (1, 17, 40, 100)]
    wanted = SamplingParams(
        max_tokens=16, temperature=0, logprobs=2, prompt_logprobs=-1, ignore_eos=True, detokenize=False
    )
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    rows = [row for answer in answers for row in answer.prompt_logprobs[1:]]
    texts = [list(answer.outputs[0].token_ids) for answer in answers]
    steps = [
        [sorted(at.logprob for at in step.values()) for step in answer.outputs[0].logprobs]
        for answer in answers
    ]
    outcome = Outcome(
        count,
        [[row[token].logprob for token in range(VOCABULARY)] for row in rows],
        texts,
        [[step[-1] - step[-2] for step in each] for each in steps],
    )
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
