"""Layers read from checkpoints of every family, against transformers' own blocks in float32."""

import os
import re
import shutil
from collections.abc import Callable, Set
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from expertd.kernels import resolve_backend
from expertd.service.checkpoints import CheckpointError, models_of
from expertd.service.checkpoints.weights import read_layer
from expertd.service.engine.layers import LoadCancelledError, layer_of
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.settings.served import CheckpointSettings
from expertd.weight_format import FP8_BLOCKS, WeightFormat, WeightLayout
from tests.families import EXPERTS, FAMILIES, HIDDEN, INTERMEDIATE, Sizes
from tests.kernels.helpers import diff, fresh_generator
from tests.more_families import ALL_FAMILIES
from tests.service.checkpoints.builders import Checkpoint, edit_tensors, shard_of
from tests.short import few_of

Made = Callable[[str, str | None], Path]
TOKENS = 64
SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16, "e8m0": torch.float8_e8m0fnu}


def load(
    directory: Path,
    layers: str,
    experts: str | None = None,
    requantize: str = "refuse",
    shared_experts: bool = True,
    takes: Set[WeightFormat] = frozenset({WeightFormat.FP8}),
) -> list[MoELayer]:
    """The checkpoint's layers, built as in the service for a backend that takes these formats."""
    values = {"path": directory, "layers": layers, "experts": experts, "requantize": requantize}
    settings = CheckpointSettings.model_validate(values | {"shared_experts": shared_experts})
    backend, device = resolve_backend("reference"), torch.device("cpu")
    return [layer_of(model, backend, device, lambda: False) for model in models_of(settings, lambda: takes)]


def hidden_states(size: int = HIDDEN) -> Tensor:
    return torch.randn(TOKENS, size, generator=fresh_generator()).to(torch.bfloat16)


def check_layer(checkpoint: Checkpoint, index: int, layer: MoELayer, most: float) -> None:
    """Fail unless tokens have the same experts and weights, and outputs differ by at most `most`."""
    tokens = hidden_states(layer.shape.hidden_size)
    expected, their_ids, their_weights = checkpoint.run(index, tokens)
    topk_ids, topk_weights = layer.route(tokens)
    ours, theirs = torch.zeros(2, TOKENS, layer.shape.num_experts)
    ours.scatter_(1, topk_ids.long(), topk_weights)
    theirs.scatter_(1, their_ids, their_weights)
    tied = ((ours != 0) != (theirs != 0)).any(1)  # not the same, as sets
    for token in tied.nonzero().flatten().tolist():
        swapped = (ours[token] != 0) != (theirs[token] != 0)
        scores = _scores(layer, tokens[token])[swapped]
        # Sums in another order: in all families' tests together, that happens in one of fifty runs.
        assert scores.max() - scores.min() < 1e-6
    assert tied.sum() <= 1
    torch.testing.assert_close(ours[~tied], theirs[~tied], rtol=1e-5, atol=0)
    assert diff(layer(tokens)[~tied], expected[~tied]) < most


def _scores(layer: MoELayer, token: Tensor) -> Tensor:
    """float64 [E]: what experts are chosen by."""
    logits = layer.weights.router.double() @ token.double()
    scoring, bias = layer.routing.scoring_func, layer.weights.router_bias
    if bias is not None and layer.routing.bias_on == "logits":
        logits, bias = logits + bias.double(), None
    if scoring == "sparsemixer":
        scores = logits
    elif scoring == "softmax":
        scores = logits.softmax(0)
    else:
        scores = logits.sigmoid() if scoring == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    return scores if bias is None else scores + bias.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bf16_checkpoint_matches_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / family)
    for index, layer in zip((1, 2), load(checkpoint.directory, "1-2"), strict=True):
        check_layer(checkpoint, index, layer, 2e-3)  # rounding weights to FP8 costs 1.1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_other_sizes_match_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / family, sizes=Sizes(384, 256, 12, 4))
    for index, layer in zip((1, 2), load(checkpoint.directory, "1-2"), strict=True):
        assert (layer.shape.hidden_size, layer.shape.intermediate_size) == (384, 256)
        assert (layer.shape.num_experts, layer.shape.top_k) == (12, ALL_FAMILIES[family].top_k or 4)
        check_layer(checkpoint, index, layer, 2e-3)


@pytest.mark.parametrize(
    ("family", "scales"),
    [
        *product(FAMILIES, ("fp32",)),
        *product(("deepseek-v3", "mixtral"), ("bf16", "e8m0")),
        *(
            pytest.param(family, "fp32", marks=pytest.mark.thorough)
            for family in ALL_FAMILIES
            if family not in {*FAMILIES, "gpt-oss"}
        ),
    ],
)
def test_an_fp8_checkpoint_matches_its_dequantized_weights(family: str, scales: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(family, tmp_path / family, SCALES[scales])
    for index, layer in zip((1, 2), load(checkpoint.directory, "1-2"), strict=True):
        check_layer(checkpoint, index, layer, 2e-4)


ODD = [Sizes(192, 160, 8, 3), Sizes(320, 64, 5, 2), Sizes(416, 288, 12, 4)]
"""As gpt-oss's 2880, no multiples of 128."""


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_sizes_without_whole_blocks_match_transformers(sizes: Sizes, tmp_path: Path) -> None:
    checkpoint = Checkpoint("gpt-oss", tmp_path / "gpt-oss", sizes=sizes)
    (layer,) = load(checkpoint.directory, "2")
    assert layer.shape.hidden_size == sizes.hidden
    assert layer.shape.intermediate_size == -(-sizes.intermediate // 128) * 128
    check_layer(checkpoint, 2, layer, 2e-3)


@pytest.mark.parametrize("sizes", few_of([Sizes(), *ODD], ODD[:1]), ids=str)
def test_stacked_mxfp4_matches_its_decoded_weights(sizes: Sizes, tmp_path: Path) -> None:
    checkpoint = Checkpoint("gpt-oss", tmp_path / "gpt-oss", mxfp4=True, sizes=sizes)
    (layer,) = load(checkpoint.directory, "1", requantize="allow")
    check_layer(checkpoint, 1, layer, 2e-4)
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj_blocks: expected .*, got MXFP4.*; with requantize:"
    ):
        load(checkpoint.directory, "1")


@pytest.mark.parametrize("sizes", few_of([Sizes(), *ODD], ODD[:1]), ids=str)
def test_mxfp4_of_gpt_oss_is_served_as_it_is(sizes: Sizes, tmp_path: Path) -> None:
    checkpoint = Checkpoint("gpt-oss", tmp_path / "gpt-oss", mxfp4=True, sizes=sizes)
    (layer,) = load(checkpoint.directory, "1", takes=frozenset(WeightFormat))
    assert layer.shape.weight_layout == WeightLayout(WeightFormat.MXFP4, 32, "U8")
    check_layer(checkpoint, 1, layer, 2e-4)
    tokens = hidden_states(sizes.hidden)
    parts = [
        load(checkpoint.directory, "1", experts, takes=frozenset(WeightFormat))[0](tokens)
        for experts in ("0-1", f"2-{sizes.experts - 1}")
    ]
    assert diff(parts[0] + parts[1], checkpoint.run(1, tokens)[0]) < 2e-4


@pytest.mark.parametrize(
    ("family", "encoding", "shared"),
    [
        ("kimi-k2.5", "int4", None),
        ("deepseek-v4", "mxfp4", torch.float8_e8m0fnu),
        ("glm-4.5", "nvfp4", None),
        ("qwen3", "nvfp4, packed", None),
    ],
)
def test_four_bits_of_routed_experts_are_served_as_they_are(
    family: str, encoding: str, shared: torch.dtype | None, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(family, tmp_path / family, shared, routed=encoding)
    (layer,) = load(checkpoint.directory, "1", takes=frozenset(WeightFormat))
    assert layer.shape.weight_layout.format.lower() in encoding
    assert layer.shape.splits_shared is (layer.shape.num_shared_experts > 0)
    # Shared experts in bf16 are rounded to FP8.
    check_layer(checkpoint, 1, layer, 2e-4 if shared or not layer.shape.num_shared_experts else 2e-3)
    (alone,) = load(checkpoint.directory, "1", shared_experts=False, takes=frozenset(WeightFormat))
    assert not alone.shape.splits_shared
    with pytest.raises(CheckpointError, match="with requantize: allow, it is rounded to that FP8; backend "):
        load(checkpoint.directory, "1")
    (rounded,) = load(checkpoint.directory, "1", requantize="allow")
    assert rounded.shape.weight_layout == rounded.shape.shared_layout == FP8_BLOCKS
    check_layer(checkpoint, 1, rounded, 2e-3)


def test_parts_of_a_layer_with_biases_add_up_to_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint("gpt-oss", tmp_path / "gpt-oss", mxfp4=True, sizes=ODD[2])
    tokens = hidden_states(ODD[2].hidden)
    parts = [
        load(checkpoint.directory, "1", experts, requantize="allow")[0](tokens)
        for experts in ("0-2", "3-3", "4-11")
    ]
    expected, _, _ = checkpoint.run(1, tokens)
    assert diff(torch.stack(parts).sum(0), expected) < 2e-4


def test_fp8_by_blocks_of_interleaved_gates_and_ups_is_rounded(tmp_path: Path) -> None:
    checkpoint = Checkpoint("gpt-oss", tmp_path / "fp8", torch.float32)
    got = "FP8, a scale per 128x128 of interleaved gates and ups"
    with pytest.raises(
        CheckpointError,
        match=rf"gate_up_proj: expected floats, .*, got {got}; with requantize: allow, .* to that FP8$",
    ):
        load(checkpoint.directory, "1")
    (layer,) = load(checkpoint.directory, "1", requantize="allow")
    check_layer(checkpoint, 1, layer, 2e-3)


def test_lost_biases_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint("gpt-oss", tmp_path / "lost")
    name = "model.layers.1.mlp.experts.down_proj_bias"
    edit_tensors(shard_of(checkpoint.directory, name), **{name: None})
    with pytest.raises(CheckpointError, match=r"expected tensor .*down_proj_bias, got none"):
        load(checkpoint.directory, "1")


def test_fp8_weights_are_used_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = Checkpoint("kimi-k2", tmp_path / "kimi", torch.float32)
    stored: dict[str, Tensor] = {}
    for file in checkpoint.directory.glob("*.safetensors"):
        stored |= load_file(file)
    (layer,) = load(checkpoint.directory, "2", "3-5")
    weights, prefix = layer.weights, "model.layers.2.mlp.experts"
    for group, expert in enumerate((3, 4, 5)):
        rows = slice(0, INTERMEDIATE)
        for part in ("gate_proj", "up_proj"):
            name = f"{prefix}.{expert}.{part}.weight"
            assert torch.equal(_bits(weights.gate_up.data[group, rows]), _bits(stored[name]))
            blocks = slice(rows.start // 128, rows.stop // 128)
            assert torch.equal(weights.gate_up.scales[group, blocks], stored[f"{name}_scale_inv"])
            rows = slice(INTERMEDIATE, 2 * INTERMEDIATE)
        name = f"{prefix}.{expert}.down_proj.weight"
        assert torch.equal(_bits(weights.down.data[group]), _bits(stored[name]))
        assert torch.equal(weights.down.scales[group], stored[f"{name}_scale_inv"])
    bias = stored["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert weights.router_bias is not None
    assert torch.equal(weights.router_bias, bias.float())


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Copies a family's checkpoint, which is made once, to be damaged; with scales of this kind."""

    @cache
    def made(family: str, scales: str | None) -> Path:
        directory = tmp_path_factory.mktemp(family) / "model"
        return Checkpoint(family, directory, SCALES.get(scales or "")).directory

    return lambda *kind: Path(shutil.copytree(made(*kind), tmp_path_factory.mktemp("copy") / "model"))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("bounds", [(0, 3, 8), (0, 1, 2, 8)])
def test_parts_of_a_layer_add_up_to_it(bounds: tuple[int, ...], tmp_path: Path) -> None:
    checkpoint, tokens = Checkpoint("kimi-k2", tmp_path / "kimi"), hidden_states()
    parts = [
        load(checkpoint.directory, "1", f"{first}-{end - 1}")[0](tokens) for first, end in pairwise(bounds)
    ]
    expected, _, _ = checkpoint.run(1, tokens)
    assert diff(torch.stack(parts).sum(0), expected) < 2e-3


SHARING = ["deepseek-v3", "kimi-k2", "qwen2", "hunyuan-4", "llama-4", "step-3.7", "hunyuan-3", "kimi-linear"]


@pytest.mark.parametrize("experts", [None, "0-3"])
@pytest.mark.parametrize("family", few_of(SHARING, ("deepseek-v3", "qwen2", "step-3.7")))
def test_shared_experts_that_are_left_out_are_not_read(
    family: str, experts: str | None, tmp_path: Path
) -> None:
    """Their weights are not finite; what is computed is transformers' block with an output of theirs of 0."""
    checkpoint, tokens = Checkpoint(family, tmp_path / family), hidden_states()
    for name, parameter in checkpoint.oracle.named_parameters():
        if "shared" in name or "share_expert" in name:
            parameter.data.zero_()
    if experts is not None:  # the others'
        (kept,) = load(checkpoint.directory, "2", "4-7", shared_experts=False)
    for file in checkpoint.directory.glob("*.safetensors"):
        names = [name for name in load_file(file) if re.search(r"layers\.2\..*share(d_|_expert)", name)]
        edit_tensors(file, **{name: load_file(file)[name] * torch.nan for name in names})
    (layer,) = load(checkpoint.directory, "2", experts, shared_experts=False)
    assert layer.weights.gate_up.data.shape[0] == (EXPERTS if experts is None else 4)
    output = layer(tokens) if experts is None else layer(tokens) + kept(tokens)
    assert diff(output, checkpoint.run(2, tokens)[0]) < 2e-3
    with pytest.raises(CheckpointError, match="expected finite numbers"):
        load(checkpoint.directory, "2", experts)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("model.layers.1.mlp.experts.7.up_proj.weight_scale_inv", torch.nan),
        ("model.layers.1.mlp.experts.0.down_proj.weight_scale_inv", torch.inf),
        ("model.layers.1.mlp.experts.5.gate_proj.weight", torch.nan),
        ("model.layers.1.mlp.experts.5.gate_proj.weight", -torch.nan),
        ("model.layers.1.mlp.gate.weight", torch.nan),
        ("model.layers.1.mlp.gate.e_score_correction_bias", -torch.inf),
    ],
)
def test_numbers_that_are_not_finite_are_refused(name: str, bad: float, copied: Made) -> None:
    directory = copied("deepseek-v3", "fp32")
    file = shard_of(directory, name)
    values = load_file(file)[name]
    values.view(-1)[0:1] = torch.tensor([bad]).to(values.dtype)
    edit_tensors(file, **{name: values})
    with pytest.raises(CheckpointError, match=rf"safetensors: {name}: expected finite numbers, got others$"):
        load(directory, "1")


@pytest.mark.parametrize(
    ("family", "scales", "name", "factor", "expected"),
    [
        # finite, but the rows that they give are not
        ("deepseek-v3", "fp32", "mlp.experts.7.up_proj.weight_scale_inv", 1e38, r"scales up to 1e\+06"),
        (
            "deepseek-v3",
            "fp32",
            "mlp.shared_experts.down_proj.weight_scale_inv",
            1e38,
            r"scales up to 1e\+06",
        ),
        ("qwen2", None, "mlp.gate.weight", 1e35, r"numbers up to 1e\+30"),
        ("qwen2", None, "mlp.shared_expert_gate.weight", 1e35, r"numbers up to 1e\+30"),
        ("mixtral", None, "block_sparse_moe.experts.2.w3.weight", 1e30, r"scales up to 1e\+06"),
        ("mixtral", "fp32", "block_sparse_moe.experts.2.w3.weight_scale_inv", -1, "scales of at least 0"),
    ],
)
def test_numbers_that_give_others_than_numbers_are_refused(
    family: str,
    scales: str | None,
    name: str,
    factor: float,
    expected: str,
    copied: Made,
) -> None:
    directory = copied(family, scales)
    name = f"model.layers.1.{name}"
    file = shard_of(directory, name)
    edit_tensors(file, **{name: load_file(file)[name] * factor})
    with pytest.raises(CheckpointError, match=rf"{name}: expected {expected}, got "):
        load(directory, "1")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_types_are_accepted(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = Checkpoint("glm-4.5", tmp_path / "model", dtype=dtype)
    (layer,) = load(checkpoint.directory, "1")
    check_layer(checkpoint, 1, layer, 2e-3)


def test_loading_can_be_cancelled(copied: Made) -> None:
    directory = copied("mixtral", None)
    (model,) = models_of(CheckpointSettings(path=directory, layers="0"))
    with pytest.raises(LoadCancelledError):
        layer_of(model, resolve_backend("reference"), torch.device("cpu"), lambda: True)


def test_a_file_truncated_during_reading_is_one_sentence(
    copied: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copied("mixtral", None)
    (model,) = models_of(CheckpointSettings(path=directory, layers="0"))
    files = {matrix.encoded.weight.file for group in model.source.groups for matrix in group}
    sizes = {file: file.stat().st_size for file in files}

    read = TensorReader.read

    def read_and_truncate(*arguments: Any, **options: Any) -> None:
        read(*arguments, **options)
        for file in files:
            os.truncate(file, 1000)

    monkeypatch.setattr(TensorReader, "read", read_and_truncate)
    with pytest.raises(CheckpointError) as refused:
        read_layer(model.source, "cpu", lambda _: None)
    messages = {
        f"{file}: expected {size} bytes, as when it was opened, got 1000" for file, size in sizes.items()
    }
    # A file that was not open yet is none any more.
    assert str(refused.value) in messages or "expected a safetensors file, got: " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("change", [None, torch.zeros(3, 5), torch.zeros(EXPERTS, HIDDEN, dtype=torch.int32)])
def test_a_tensor_that_is_another_than_the_one_found_is_refused(change: Tensor | None, copied: Made) -> None:
    directory = copied("mixtral", None)
    (model,) = models_of(CheckpointSettings(path=directory, layers="0"))
    router = model.source.router
    edit_tensors(router.file, **{router.name: change})
    with pytest.raises(CheckpointError, match=r"gate\.weight: expected BF16 .*, as when it was found, got "):
        read_layer(model.source, "cpu", lambda _: None)
