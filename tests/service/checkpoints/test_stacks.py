"""Every encoding in every layout: found by headers, and decoded exactly or served bit for bit."""

from collections.abc import Callable, Set
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd.backends import taking
from expertd.kernels import FourBits, Quantized, Weights, decode, dequantize_blocks, quantize_blocks
from expertd.kernels.ops.four_bits import tensors_of
from expertd.service.checkpoints import CheckpointError, models_of
from expertd.service.checkpoints.weights import quantize_by_powers, read_layer
from expertd.service.moe.weights import ExpertWeights, check_weights
from expertd.service.settings.served import CheckpointSettings
from expertd.weight_format import WeightFormat
from tests.kernels.helpers import fresh_generator
from tests.service.checkpoints.builders import edit_tensors
from tests.service.checkpoints.encoders import ENCODERS, Encoder, mxfp4, mxfp8
from tests.service.checkpoints.layouts import EXPERTS, LAYOUTS, write
from tests.short import few_of

SIZES = [(256, 128), (384, 256)]
"""In the first, gate and up together are square: other tensors decide whether they are transposed."""


def load(
    directory: Path,
    requantize: str = "refuse",
    experts: str | None = None,
    takes: Set[WeightFormat] = frozenset({WeightFormat.FP8}),
) -> ExpertWeights:
    settings = CheckpointSettings.model_validate(
        {"path": directory, "layers": "0", "requantize": requantize, "experts": experts}
    )
    (model,) = models_of(settings, lambda: takes)
    weights = read_layer(model.source, "cpu", lambda _: None)
    check_weights(model.shape, weights)
    return weights


def check(got: Weights, meant: list[Tensor], encoding: str, *, is_native: bool) -> None:
    """Fail unless the experts' weights are what was meant, exactly, or that rounded to FP8 by blocks."""
    assert isinstance(got, Quantized)
    for index, values in enumerate(meant):
        data, scales = got.data[index], got.scales[index]
        if is_native:
            assert torch.equal(dequantize_blocks(data, scales), values)
            continue
        quantize = quantize_by_powers if encoding.startswith("mx") else quantize_blocks
        expected = quantize(values.contiguous())
        assert torch.equal(data.view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales, expected[1])


def is_native(encoding: str, layout: str) -> bool:
    return encoding == "fp8 by tensor" or (encoding == "fp8 by block" and layout != "in turns")


@pytest.mark.parametrize("sizes", few_of(SIZES, SIZES[:1]))
@pytest.mark.parametrize(("encoding", "layout"), [*product(ENCODERS, LAYOUTS)])
def test_every_encoding_is_read_in_every_layout(
    encoding: str, layout: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    gate_up, down = write(tmp_path, encoding, layout, sizes)
    native = is_native(encoding, layout)
    if not native:
        with pytest.raises(CheckpointError, match=rf"got {ENCODERS[encoding][1]}.*; with requantize: allow"):
            load(tmp_path)
    for experts in (None, "1-2"):
        weights = load(tmp_path, "refuse" if native else "allow", experts)
        held = slice(None) if experts is None else slice(1, 3)
        check(weights.gate_up, gate_up[held], encoding, is_native=native)
        check(weights.down, down[held], encoding, is_native=native or encoding == "fp8 by block")


FOUR_BITS = {
    "mxfp4": WeightFormat.MXFP4,
    "nvfp4": WeightFormat.NVFP4,
    "nvfp4, packed": WeightFormat.NVFP4,
    "int4": WeightFormat.INT4,
}


def check_four_bits(got: Weights, meant: list[Tensor], encoding: str) -> None:
    """Fail unless the experts' weights have four bits, and are what was meant, up to float32's rounding."""
    assert isinstance(got, FourBits)
    assert got.format is FOUR_BITS[encoding]
    for values, expected in zip(decode(got), meant, strict=True):
        if got.format is WeightFormat.NVFP4:
            torch.testing.assert_close(values, expected, rtol=2**-22, atol=0)
        else:
            assert torch.equal(values, expected)


@pytest.mark.parametrize("sizes", few_of(SIZES, SIZES[:1]))
@pytest.mark.parametrize(("encoding", "layout"), [*product(FOUR_BITS, LAYOUTS)])
def test_four_bits_stay_four_bits_in_every_layout(
    encoding: str, layout: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    gate_up, down = write(tmp_path, encoding, layout, sizes)
    for requantize, experts in (("refuse", None), ("allow", "1-2")):
        weights = load(tmp_path, requantize, experts, frozenset(WeightFormat))
        held = slice(None) if experts is None else slice(1, 3)
        check_four_bits(weights.gate_up, gate_up[held], encoding)
        check_four_bits(weights.down, down[held], encoding)
        if experts is None and layout in ("three stacks", "transposed"):  # whose shared experts are floats
            assert weights.shared is not None
            assert isinstance(weights.shared.down, Quantized)
        else:
            assert weights.shared is None


@pytest.mark.parametrize("encoding", FOUR_BITS)
def test_four_bits_are_rounded_where_that_is_asked_for(encoding: str, tmp_path: Path) -> None:
    gate_up, down = write(tmp_path, encoding, "three stacks")  # whose shared experts are floats
    weights = load(tmp_path, "always", takes=frozenset(WeightFormat))
    assert weights.shared is None, "it has the routed experts' format"
    for got, meant in ((weights.gate_up, gate_up), (weights.down, down)):
        assert isinstance(got, Quantized)
        check(Quantized(got.data[:EXPERTS], got.scales[:EXPERTS]), meant, encoding, is_native=False)
        if encoding == "mxfp4":
            for index, values in enumerate(meant):
                assert torch.equal(dequantize_blocks(got.data[index], got.scales[index]), values)


@pytest.mark.parametrize("encoding", FOUR_BITS)
def test_four_bits_of_other_sizes_are_filled_with_zeros(encoding: str, tmp_path: Path) -> None:
    gate_up, down = write(tmp_path, encoding, "in turns", (192, 160))
    weights = load(tmp_path, takes=frozenset(WeightFormat))
    halves = [[torch.nn.functional.pad(half, (0, 0, 0, 96)) for half in both.chunk(2)] for both in gate_up]
    check_four_bits(weights.gate_up, [torch.cat(both) for both in halves], encoding)
    check_four_bits(weights.down, [torch.nn.functional.pad(matrix, (0, 96)) for matrix in down], encoding)


@pytest.mark.parametrize("encoding", FOUR_BITS)
def test_who_takes_four_bits_is_said_where_another_does_not(encoding: str, tmp_path: Path) -> None:
    write(tmp_path, encoding)
    who = rf"to that FP8; backend {taking(FOUR_BITS[encoding])} takes it as it is$"
    for takes in (set[WeightFormat](), set(WeightFormat) - {FOUR_BITS[encoding]}):
        with pytest.raises(CheckpointError, match=who):
            load(tmp_path, takes=takes)


@pytest.mark.parametrize(("suffix", "value"), [("weight_scale", float("nan")), ("weight_scale", -1.0)])
@pytest.mark.parametrize("encoding", ["int4", "nvfp4"])
def test_scales_of_four_bits_are_finite_and_not_negative(
    encoding: str, suffix: str, value: float, tmp_path: Path
) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor.float(), value).to(tensor.dtype) if name == f".{suffix}" else tensor

    write(tmp_path, encoding, change=change)
    wrong = "expected finite numbers" if value != value else "expected scales of at least 0"
    with pytest.raises(CheckpointError, match=wrong):
        load(tmp_path, takes=frozenset(WeightFormat))


@pytest.mark.parametrize(("exponent", "wrong"), [(255, "finite numbers"), (150, "scales up to 1e.06, got")])
def test_exponents_are_finite_and_not_too_large(exponent: int, wrong: str, tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> Tensor:
        if name != ".scale":
            return tensor
        return torch.full(tensor.shape, exponent, dtype=torch.uint8).view(tensor.dtype)

    write(tmp_path, "mxfp4", change=change)
    with pytest.raises(CheckpointError, match=f"expected {wrong}"):
        load(tmp_path, takes=frozenset(WeightFormat))


@pytest.mark.parametrize("encoding", ENCODERS)
def test_sizes_without_whole_blocks_are_filled_with_zeros(encoding: str, tmp_path: Path) -> None:
    gate_up, down = write(tmp_path, encoding, "in turns", (192, 160))
    weights, native = load(tmp_path, "allow"), is_native(encoding, "in turns")
    halves = [[torch.nn.functional.pad(half, (0, 0, 0, 96)) for half in both.chunk(2)] for both in gate_up]
    check(weights.gate_up, [torch.cat(both) for both in halves], encoding, is_native=native)
    filled = [torch.nn.functional.pad(matrix, (0, 96)) for matrix in down]
    check(weights.down, filled, encoding, is_native=native or encoding == "fp8 by block")


STACKS = [layout for layout in LAYOUTS if layout != "a tensor each"]
SHAPES: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
    ("fp8 by tensor", "a tensor each", lambda scale: scale.reshape(1)),  # AutoFP8's
    ("fp8 by tensor", "a tensor each", lambda scale: scale.reshape(1, 1)),
    *(("fp8 by tensor", layout, lambda scales: scales[:, None]) for layout in STACKS),
    *(("fp8 by tensor", layout, lambda scales: scales[:, None, None]) for layout in STACKS),
    *(("fp8 by row", layout, lambda scales: scales.squeeze()) for layout in LAYOUTS),
    *(("fp8 by row", layout, lambda scales: scales.mT) for layout in STACKS),  # fbgemm's down, in one of them
    ("fp8 by block", "a tensor each", lambda scales: scales[:, None, :, None]),  # ModelOpt's FP8_PB_WO
    ("fp8 by block", "two stacks", lambda scales: scales[:, :, None, :, None]),
    *(("nvfp4", layout, lambda scales: scales) for layout in STACKS),
]


@pytest.mark.parametrize(("encoding", "layout", "reshaped"), SHAPES)
def test_scales_may_have_other_shapes(
    encoding: str, layout: str, reshaped: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    suffix = ".weight_scale_2" if encoding == "nvfp4" else ".weight_scale"

    def change(name: str, tensor: Tensor) -> Tensor:
        return reshaped(tensor) if name == suffix else tensor

    gate_up, down = write(tmp_path, encoding, layout, SIZES[1], change)
    weights, native = load(tmp_path, "allow"), is_native(encoding, layout)
    check(weights.gate_up, gate_up, encoding, is_native=native)
    check(weights.down, down, encoding, is_native=native)


@pytest.mark.parametrize("layout", ["transposed", "in turns"])
@pytest.mark.parametrize("encoding", ["fp8 by tensor", "fp8 by row", "fp8 by block"])
@pytest.mark.parametrize("name", ["_scale", "_scale_inv", "_weight_scale_inv"])
def test_scales_beside_a_parameter_have_several_names(
    layout: str, encoding: str, name: str, tmp_path: Path
) -> None:
    gate_up, _ = write(tmp_path, encoding, layout)
    file = tmp_path / "model.safetensors"
    save_file({old.replace("_weight_scale", name): tensor for old, tensor in load_file(file).items()}, file)
    if encoding == "fp8 by row" and name.endswith("inv"):
        with pytest.raises(CheckpointError, match=r"_inv shape: expected "):
            load(tmp_path, "allow")
    else:
        check(load(tmp_path, "allow").gate_up, gate_up, encoding, is_native=is_native(encoding, layout))


@pytest.mark.parametrize("shape", [(), (1,), (EXPERTS, 2), (EXPERTS, 2, 1)])
@pytest.mark.parametrize("layout", ["two stacks", "transposed"])
def test_one_scale_may_be_for_all_or_for_a_gate(shape: tuple[int, ...], layout: str, tmp_path: Path) -> None:
    """ModelOpt's Llama 4 has one for all experts, and transformers one for each gate and up."""
    hidden, size = SIZES[1]
    scales = torch.rand(shape, generator=fresh_generator()) + 0.5
    write(tmp_path, "fp8 by tensor", layout, (hidden, size))
    file, form = tmp_path / "model.safetensors", LAYOUTS[layout]
    tensors = load_file(file)
    (name,) = (
        name for name in tensors if name.endswith(("input_linear.weight_scale", "up_proj_weight_scale"))
    )
    save_file(tensors | {name: scales}, file)
    data = tensors[name.replace(".weight_scale", ".weight").replace("_weight_scale", "")]
    data = data.mT if form.transposed else data
    got = load(tmp_path).gate_up
    assert torch.equal(got.data[:EXPERTS].view(torch.uint8), data.contiguous().view(torch.uint8))
    halves = got.scales[:EXPERTS].view(EXPERTS, 2, -1, hidden // 128)
    assert torch.equal(halves, scales.reshape(-1, max([1, *shape[1:2]]), 1, 1).expand(halves.shape))


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("layout", STACKS)
def test_one_scale_of_scales_may_be_for_all(shape: tuple[int, ...], layout: str, tmp_path: Path) -> None:
    def change(suffix: str, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 0.01) if suffix == ".weight_scale_2" else tensor

    write(tmp_path, "nvfp4", layout, change=change)
    each, file = load(tmp_path, "allow"), tmp_path / "model.safetensors"
    one = {name: tensor[0].reshape(shape) for name, tensor in load_file(file).items() if name.endswith("_2")}
    edit_tensors(file, **one)
    again = load(tmp_path, "allow")
    for got, expected in zip(tensors_of(again.gate_up), tensors_of(each.gate_up), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("encode", [mxfp8, mxfp4])
def test_groups_may_be_in_the_last_dimension(encode: Encoder, tmp_path: Path) -> None:
    """ModelOpt's MX formats of Llama 4, whose matrices are [k, n]."""

    def along_n(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, values = encode(weight.t().contiguous())
        return {suffix: tensor.t() for suffix, tensor in stored.items()}, values.t()

    for sizes in SIZES:
        gate_up, down = write(tmp_path, along_n, "transposed", sizes)
        weights = load(tmp_path, "allow")
        check(weights.gate_up, gate_up, "mx", is_native=False)
        check(weights.down, down, "mx", is_native=False)


DOWN = "experts.down_proj"
GRANITE = "model.layers.0.block_sparse_moe"


@pytest.mark.parametrize(
    ("encoding", "layout", "name", "tensor", "message"),
    [
        ("fp8 by row", "two stacks", "input_linear.weight_scale", torch.ones(4, 128, 1), r"\(4, 4, 3\) or"),
        ("fp8 by row", "transposed", f"{DOWN}_weight_scale", torch.ones(3), r"\(4, 2, 3\) or \(4, 1, 384\)"),
        ("fp8 by row", "transposed", f"{DOWN}_weight_scale", torch.ones(4, 2), r", got \(4, 2\)$"),
        ("fp8 by row", "transposed", f"{DOWN}_weight_scale", torch.ones(4), None),
        ("fp8 by block", "in turns", "experts.gate_up_proj_weight_scale", torch.ones(4, 2), r"got \(4, 2\)$"),
        ("fp8 by row", "transposed", DOWN, torch.ones(4, 9, 9), r"expected \(4, 256, 384\), got"),
        (
            "fp8 by row", "transposed", f"{DOWN}_weight_scale", None,
            r"down_proj: expected scales beside it \(down_proj_weight_scale_inv, down_proj_scale_inv, "
            r"down_proj_weight_scale or down_proj_scale\), got none$",
        ),
        (
            "int4", "two stacks", "input_linear.weight_packed", None,
            rf"tensor {GRANITE}\.input_linear\.weight or {GRANITE}\.experts\.0\.gate_proj\.weight, got none",
        ),
        ("nvfp4", "transposed", f"{DOWN}_weight_scale_2", torch.ones(9), r"\(4, 1, 1\), got \(9,\)$"),
        ("nvfp4", "transposed", f"{DOWN}_weight_scale_2", None, r"down_proj_weight_scale_2, got none"),
        ("int4", "transposed", f"{DOWN}_zero_point", torch.ones(4), r"got .*down_proj_zero_point$"),
    ],
)  # fmt: skip
def test_tensors_that_fit_no_encoding_are_refused(
    encoding: str, layout: str, name: str, tensor: Tensor | None, message: str | None, tmp_path: Path
) -> None:
    """In words that are right: with shapes of this layout, and names that scales may have there."""
    write(tmp_path, encoding, layout, SIZES[1])
    block = f"model.layers.0.{LAYOUTS[layout].block}"
    edit_tensors(tmp_path / "model.safetensors", **{f"{block}.{name}": tensor})
    if message is None:
        load(tmp_path, "allow")
        return
    for requantize in ("refuse", "allow"):
        with pytest.raises(CheckpointError, match=message) as refused:
            load(tmp_path, requantize)
        assert "with requantize" not in str(refused.value)
