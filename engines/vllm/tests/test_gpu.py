"""vLLM on a GPU and experts on another one, or on the same: FP8 checkpoints, eager and in CUDA graphs."""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import GPU_SIZES, make_checkpoint, write_fp8
from tests.generating import Outcome, end, generate
from tests.running import Running, running_expertd, running_vllm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

_PIECEWISE = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
# Makes vLLM check that each graph's inputs have the addresses that they had at capture.
_CHECKED = {"VLLM_LOGGING_LEVEL": "DEBUG"}
_FULL = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
# Without the second one vLLM measures what is free, which fails while another process on the GPU ends.
_LIMITS = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2 << 30}


def _on_last_gpu() -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or str(torch.cuda.device_count() - 1)
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[-1]}


@pytest.fixture(scope="module", autouse=True)
def _no_warm_up() -> Iterator[None]:
    """No process of vLLM compiles DeepGEMM's kernels for all shapes when it starts, which takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_DEEP_GEMM_WARMUP", "skip")
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """For each family, a checkpoint in FP8, and one with the same numbers in bfloat16."""
    found, parent = {}, tmp_path_factory.mktemp("checkpoints")
    for family, sizes in GPU_SIZES.items():
        found[family] = parent / family, parent / f"{family}-exact"
        make_checkpoint(found[family][0], family, **sizes)
        write_fp8(*found[family])
    return found


@pytest.fixture(scope="module")
def expertd(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, tuple[Path, Path]]
) -> Iterator[Running]:
    """On the last GPU, with all experts."""
    directory, served = tmp_path_factory.mktemp("expertd"), [fp8 for fp8, _ in models.values()]
    with running_expertd(directory, *served, **_on_last_gpu()) as running:
        yield running


@pytest.fixture(scope="module")
def known(models: dict[str, tuple[Path, Path]]) -> Callable[[str], tuple[Outcome, float]]:
    """What vLLM says of a family with its own experts in FP8, and its distance from float32."""

    @cache
    def find(family: str) -> tuple[Outcome, float]:
        fp8, exact = models[family]
        plain = generate(fp8, **_LIMITS)
        end()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_MLA_DISABLE", "1")  # no kernel for latent attention has float32
            bound = plain.distance(generate(exact, dtype="float32", **_LIMITS))
            end()
        return plain, bound

    return find


@pytest.mark.parametrize("family", GPU_SIZES)
@pytest.mark.parametrize(
    ("transport", "options", "variables"),
    [
        ("channel", {}, {}),
        ("channel", _PIECEWISE, _CHECKED),
        ("http", _PIECEWISE, _CHECKED),
        ("channel", _PIECEWISE, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
        ("device", {}, {}),
        ("device", _FULL, {}),
    ],
    ids=["eager", "piecewise", "http", "breakable", "device", "full"],
)
def test_texts_and_log_probabilities_agree(
    family: str,
    transport: str,
    options: dict[str, Any],
    variables: dict[str, str],
    models: dict[str, tuple[Path, Path]],
    expertd: Running,
    known: Callable[[str], tuple[Outcome, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With plain vLLM as well as that does with float32."""
    expected, bound = known(family)
    for name, value in variables.items():
        end()
        monkeypatch.setenv(name, value)
    settings = {"expertd": {"url": expertd.url, "transport": transport}}
    got = generate(models[family][0], load_format="expertd", additional_config=settings, **_LIMITS, **options)
    assert got.expert_parameters == 0 < expected.expert_parameters
    assert got.distance(expected) <= bound, (got.distance(expected), bound)
    assert all(margin < 6 * bound for margin in expected.ties(got.texts))
    if variables:
        end()


@pytest.mark.parametrize("transport", ["channel", "device"])
def test_a_killed_server_loses_no_request(
    transport: str, models: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """It is killed and started again while vLLM answers, in CUDA graphs."""
    model = models["qwen3_moe"][0]

    def complete(vllm: Running, number: int) -> str:
        body = {"prompt": [number] * (3 + number), "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        text: str = json.loads(vllm.ask("/v1/completions", body))["choices"][0]["text"]
        return text

    options = [f"--{name.replace('_', '-')}={value}" for name, value in _LIMITS.items()]
    options.append(f"--additional-config.expertd.transport={transport}")
    with (
        running_expertd(tmp_path, model, **_on_last_gpu()) as expertd,
        running_vllm(tmp_path, model, expertd.url, *options) as vllm,
        ThreadPoolExecutor(8) as pool,
    ):
        alone = [complete(vllm, number) for number in range(8)]
        for _ in range(2):
            during = [pool.submit(complete, vllm, number) for number in range(8) for _ in range(4)]
            during[0].result()
            expertd.kill()
            expertd.start()
            texts = [each.result() for each in during]
        assert all(len(text.split()) == 48 for text in texts)
        assert alone == [complete(vllm, number) for number in range(8)]
