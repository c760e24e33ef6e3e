"""The weights of one MoE layer: random by seed, or read from a safetensors file."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from expertd.kernels import ExpertBiases, ExpertPart, FourBits, Quantized, Weights, quantize_blocks
from expertd.kernels.ops.four_bits import (
    W,
    format_of,
    mapped,
    quantize_int4,
    quantize_mxfp4,
    quantize_nvfp4,
    tensors_of,
    with_data,
)
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.tensor_file import TensorFile
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights_file import (
    BIASES,
    TensorSpec,
    check_tensor,
    check_tensors,
    tensor_specs,
)
from expertd.weight_format import WeightFormat, WeightLayout

# safetensors' names, so that errors about files and about tensors use the same ones.
_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
MATRICES = ("gate_up", "down")
"""The matrices of an expert, as `ExpertWeights` names them."""


@dataclass(frozen=True)
class ExpertWeights:
    """router [E, H] float32 or bfloat16; gate_up [G, 2I, H], gate rows before up rows; down [G, H, I].

    The G groups are the held routed experts in order, followed by the shared experts. router_bias, float32
    [E], is added to the scores for the choice of experts; None: no bias. The shared experts' output is
    multiplied by sigmoid(hidden_states @ shared_gate), float32 [H]; None: it is not. biases: the experts';
    None: they have none. shared: the shared experts, if they have another layout than the routed ones; then
    gate_up and down have only these.
    """

    router: Tensor
    gate_up: Weights
    down: Weights
    router_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    biases: ExpertBiases | None = None
    shared: ExpertPart | None = None

    def matrix(self, name: str) -> Weights:
        """One of the MATRICES."""
        return self.gate_up if name == "gate_up" else self.down

    def with_matrix(self, name: str, matrix: Weights) -> "ExpertWeights":
        """With another one of the MATRICES."""
        return replace(self, gate_up=matrix) if name == "gate_up" else replace(self, down=matrix)

    def without_matrix(self, name: str) -> "ExpertWeights":
        """With the mere shape of one of the MATRICES."""
        kept = self.with_matrix(name, without_data(self.matrix(name)))
        if self.shared is None:
            return kept
        return replace(kept, shared=self.shared._replace(**{name: without_data(getattr(self.shared, name))}))

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors, also where a backend has packed the matrices."""
        tensors = (
            self.router,
            *tensors_of(self.gate_up),
            *tensors_of(self.down),
            *(tensor for matrix in self.shared_matrices for tensor in tensors_of(matrix)),
            self.router_bias,
            self.shared_gate,
            *(self.biases or ()),
        )
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)

    @property
    def shared_matrices(self) -> tuple[Weights, ...]:
        """Those of the shared experts, if they have another layout than the routed ones; else none."""
        return () if self.shared is None else self.shared.matrices


def without_data(weights: W) -> W:
    """The shape of weights, on the meta device."""
    return with_data(weights, weights.data.to("meta"))


def empty_matrices(layout: WeightLayout, count: int, n: int, k: int, device: torch.device | str) -> Weights:
    """Room for `count` matrices [n, k] on a device, not initialized."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty((count, *shape), dtype=dtype, device=device)

    scales = empty(layout.scale_shape(n, k), _TORCH_DTYPES[layout.scales])
    if layout.format is WeightFormat.FP8:
        return Quantized(empty((n, k), torch.float8_e4m3fn), scales)
    whole = empty((n,), torch.float32) if layout.has_whole else None
    return FourBits(empty((n, k // 2), torch.uint8), scales, layout.format, whole)


def cut(weights: ExpertWeights, at: int) -> tuple[ExpertWeights, ExpertWeights]:
    """The weights of the groups before `at`, and of those from there on."""

    def part(groups: slice) -> ExpertWeights:
        gate_up, down = (mapped(w, itemgetter(groups)) for w in (weights.gate_up, weights.down))
        biases = weights.biases and ExpertBiases(*(bias[groups] for bias in weights.biases))
        return replace(weights, gate_up=gate_up, down=down, biases=biases, shared=None)

    if weights.shared is None:
        return part(slice(at)), part(slice(at, None))
    gate_up, down = weights.shared.matrices
    return replace(weights, shared=None), replace(weights, gate_up=gate_up, down=down, shared=None)


def copied(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    """With copies of the experts' matrices and biases, on a device; of weights without `shared`."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to(device, copy=True)

    biases = weights.biases and ExpertBiases(*map(copy, weights.biases))
    gate_up, down = (mapped(weights.matrix(name), copy) for name in MATRICES)
    return replace(weights, gate_up=gate_up, down=down, biases=biases)


def random_weights(
    shape: LayerShape,
    seed: int,
    device: torch.device | str,
    part: Sequence[int] | None = None,
    shared_experts: bool = True,
    experts_on: torch.device | None = None,
) -> ExpertWeights:
    """Normal weights with variance 1/fan-in, quantized; reproducible for a seed on one type of device.

    An expert has the same weights whichever others are held, so that parts with one seed make up a layer.

    part            these of the held routed experts in this order, also several times; None: all
    shared_experts  whether the shared ones follow
    experts_on      where the matrices are, with the values that they have on `device`; None: there, too
    """
    whole, held = replace(shape, local_experts=None), shape.held_experts
    kept = _kept(whole, held if part is None else [held[place] for place in part], shared_experts)
    generator = torch.Generator(device).manual_seed(seed)
    router = _normal((shape.num_experts, shape.hidden_size), generator).to(torch.bfloat16)
    i, h = shape.intermediate_size, shape.hidden_size
    gate_up, shared_gate_up = _random_experts(whole, kept, 2 * i, h, generator, experts_on)
    down, shared_down = _random_experts(whole, kept, h, i, generator, experts_on)
    shared = ExpertPart(shared_gate_up, shared_down) if shared_gate_up and shared_down else None
    return ExpertWeights(router, gate_up, down, shared=shared)


def save_weights(path: Path | str, weights: ExpertWeights) -> None:
    """Write a safetensors file: router, gate_up, gate_up_scale, down, down_scale, and the others if any.

    Raises ValueError for weights of four bits.
    """
    if (found := format_of(weights.gate_up)) is not WeightFormat.FP8:
        raise ValueError(f"weights: expected FP8, got {found}")
    save_file(_by_name(weights), str(path))


def load_weights(
    path: Path | str,
    shape: LayerShape,
    device: torch.device | str,
    part: Sequence[int] | None = None,
    shared_experts: bool = True,
) -> ExpertWeights:
    """Read a file of `shape`, in the format of `save_weights`, directly to `device`.

    part            these of the routed experts in this order, also several times; None: all
    shared_experts  whether the shared ones follow; else they are not read

    Raises ValueError if the file cannot be read or is truncated meanwhile, or if a tensor is missing,
    unknown, or has the wrong shape or dtype.
    """
    with TensorFile(Path(path)) as file, TensorReader() as reader:
        check_tensors(file, shape)
        kept = _kept(shape, part, shared_experts)
        names = file.tensors.keys() - (() if shared_experts else {"shared_gate"})
        tensors = {name: _read(reader, file, name, kept, device) for name in names}
    return ExpertWeights(
        tensors["router"],
        Quantized(tensors["gate_up"], tensors["gate_up_scale"]),
        Quantized(tensors["down"], tensors["down_scale"]),
        tensors.get("router_bias"),
        tensors.get("shared_gate"),
        ExpertBiases(*(tensors[name] for name in BIASES)) if BIASES[0] in tensors else None,
    )


def _kept(shape: LayerShape, part: Sequence[int] | None, shared_experts: bool) -> list[int]:
    """The groups of `shape` that are kept: `part` of its routed experts, None: all, and the shared ones."""
    num_routed = len(shape.held_experts)
    shared = range(num_routed, shape.num_groups if shared_experts else num_routed)
    return [*(range(num_routed) if part is None else part), *shared]


def _read(
    reader: TensorReader, file: TensorFile, name: str, kept: list[int], device: torch.device | str
) -> Tensor:
    """A tensor of the file on `device`, with the groups in `kept`, in their order."""
    tensor = file.tensors[name]
    dtype = _TORCH_DTYPES[tensor.dtype]
    if name in ("router", "router_bias", "shared_gate"):
        out = torch.empty(tensor.shape, dtype=dtype, device=device)
        reader.read(file, tensor, out)
        return out
    out = torch.empty((len(kept), *tensor.shape[1:]), dtype=dtype, device=device)
    starts = [at for at in range(len(kept)) if at == 0 or kept[at] != kept[at - 1] + 1]
    for start, end in pairwise([*starts, len(kept)]):
        run = out[start:end]
        reader.read(file, tensor, run, kept[start] * out[start].nbytes)
    return out


def check_weights(shape: LayerShape, weights: ExpertWeights) -> None:
    """Raise ValueError (name, expected, got) unless every tensor has the right shape and dtype."""
    specs = tensor_specs(shape)
    for name, tensor in _by_name(weights).items():
        if name not in specs:
            raise ValueError(f"{name}: expected none without shared experts, got one")
        dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
        check_tensor(name, specs[name], TensorSpec(tuple(tensor.shape), (dtype,)))


def _by_name(weights: ExpertWeights) -> dict[str, Tensor]:
    vectors = {"router_bias": weights.router_bias, "shared_gate": weights.shared_gate}
    biases = {} if weights.biases is None else dict(zip(BIASES, weights.biases, strict=True))
    return (
        {name: tensor for name, tensor in vectors.items() if tensor is not None}
        | biases
        | {
            "router": weights.router,
        }
        | _named("gate_up", weights.gate_up)
        | _named("down", weights.down)
        | {
            name: tensor
            for prefix, matrix in zip(
                ("shared_gate_up", "shared_down"), weights.shared_matrices, strict=False
            )
            for name, tensor in _named(prefix, matrix).items()
        }
    )


def _named(name: str, matrix: Weights) -> dict[str, Tensor]:
    return dict(zip((name, f"{name}_scale", f"{name}_whole"), tensors_of(matrix), strict=False))


def _random_experts(
    whole: LayerShape,
    kept: list[int],
    n: int,
    k: int,
    generator: torch.Generator,
    device: torch.device | None,
) -> tuple[Weights, Weights | None]:
    """Matrices [n, k] of the groups in `kept`; those of shared experts apart if they have another layout."""
    device, at = device or generator.device, len(kept)
    if whole.splits_shared:
        at = sum(group < whole.num_experts for group in kept)
    routed = empty_matrices(whole.weight_layout, at, n, k, device)
    shared = empty_matrices(whole.shared_layout, len(kept) - at, n, k, device)
    places = defaultdict[int, list[Weights]](list)
    for place, group in enumerate(kept):
        matrix = mapped(routed, itemgetter(place)) if place < at else mapped(shared, itemgetter(place - at))
        places[group].append(matrix)
    for group in range(whole.num_groups):  # one at a time: a large layer would not fit unquantized
        normal = _normal((n, k), generator)  # also of the others: the next ones depend on it
        if group in places:
            layout = whole.weight_layout if group < whole.num_experts else whole.shared_layout
            made = _quantized(normal, layout)
            for matrix in places[group]:
                for to, tensor in zip(tensors_of(matrix), tensors_of(made), strict=True):
                    to.copy_(tensor)
    return routed, shared if whole.splits_shared else None


def _quantized(matrix: Tensor, layout: WeightLayout) -> Weights:
    match layout.format:
        case WeightFormat.MXFP4:
            return quantize_mxfp4(matrix)
        case WeightFormat.NVFP4:
            return quantize_nvfp4(matrix)
        case WeightFormat.INT4:
            return quantize_int4(matrix, layout.group_size, _TORCH_DTYPES[layout.scales])
    return quantize_blocks(matrix)


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, dtype=torch.float32, device=generator.device, generator=generator)
    return normal.mul_(shape[1] ** -0.5)
