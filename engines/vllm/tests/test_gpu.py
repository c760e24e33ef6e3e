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
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.generating import Outcome, end, generate
from tests.running import Running, running_expertd, running_vllm

pytestmark = pytest.mark.gpu

_BLOCK, _LARGEST = 128, 448.0
_SIZES = {
    "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16},
    "deepseek_v3": {
        "n_routed_experts": 16, "num_key_value_heads": 8, "q_lora_rank": 256, "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
}  # fmt: skip
_PIECEWISE = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "PIECEWISE"}}
_FULL = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
# Without the second one vLLM measures what is free, which fails while another process on the GPU ends.
_LIMITS = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 2 << 30}


def write_fp8(directory: Path, exact: Path) -> None:
    """Round the projections in `directory` to FP8 in blocks; `exact` gets the same numbers in bfloat16."""
    exact.mkdir()
    for path in directory.iterdir():
        if path.suffix != ".safetensors":
            (exact / path.name).write_bytes(path.read_bytes())
    (file,) = directory.glob("*.safetensors")
    tensors, rounded = load_file(file), {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            rounded[name] = tensor
            continue
        rounded[name], scales = _round(tensor.float())
        rounded[f"{name}_scale_inv"] = scales
        rows, columns = tensor.shape
        wide = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        tensors[name] = (rounded[name].float() * wide).bfloat16()
    save_file(tensors, exact / file.name, {"format": "pt"})
    save_file(rounded, file, {"format": "pt"})
    config = directory / "config.json"
    quantization = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
    }  # fmt: skip
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))


def _round(weights: Tensor) -> tuple[Tensor, Tensor]:
    """To FP8, with a power of two for each block, so that products are bfloat16."""
    rows, columns = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.unfold(0, _BLOCK, _BLOCK).unfold(1, _BLOCK, _BLOCK)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((2, 3)).clamp(min=1e-10) / _LARGEST)))
    wide = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return (weights / wide).to(torch.float8_e4m3fn), scales


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
    for family, sizes in FAMILIES.items():
        found[family] = parent / family, parent / f"{family}-exact"
        make_checkpoint(found[family][0], family, **(_SIZES | sizes))
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("transport", "options", "variables"),
    [
        ("channel", {}, {}),
        ("channel", _PIECEWISE, {}),
        ("channel", _PIECEWISE, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
        ("device", {}, {}),
        ("device", _FULL, {}),
    ],
    ids=["eager", "piecewise", "breakable", "device", "full"],
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
