"""The weights of one MoE layer: random by seed, or read from a safetensors file."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from expertd.kernels import Quantized, quantize_blocks
from expertd.limits import SCALE_BLOCK
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights_file import TensorSpec, check_tensor, check_weights_file, tensor_specs

# safetensors' names, so that errors about files and about tensors use the same ones.
_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
}


@dataclass(frozen=True)
class ExpertWeights:
    """router [E, H] float32 or bfloat16; gate_up [G, 2I, H], gate rows before up rows; down [G, H, I].

    The G groups are the held routed experts in order, followed by the shared experts. router_bias, float32
    [E], is added to the scores for the choice of experts; None: no bias.
    """

    router: Tensor
    gate_up: Quantized
    down: Quantized
    router_bias: Tensor | None = None


def random_weights(shape: LayerShape, seed: int, device: torch.device | str) -> ExpertWeights:
    """Normal weights with variance 1/fan-in, quantized; reproducible for a seed on one type of device."""
    generator = torch.Generator(device).manual_seed(seed)
    router = _normal((shape.num_experts, shape.hidden_size), generator).to(torch.bfloat16)
    gate_up = _random_experts(shape.num_groups, 2 * shape.intermediate_size, shape.hidden_size, generator)
    down = _random_experts(shape.num_groups, shape.hidden_size, shape.intermediate_size, generator)
    return ExpertWeights(router, gate_up, down)


def save_weights(path: Path | str, weights: ExpertWeights) -> None:
    """Write router, gate_up, gate_up_scale, down, down_scale and any router_bias to one safetensors file."""
    save_file(_by_name(weights), str(path))


def load_weights(path: Path | str, shape: LayerShape, device: torch.device | str) -> ExpertWeights:
    """Read a file in the format of `save_weights` directly to `device`.

    Raises ValueError if the file cannot be read, or if a tensor is missing, unknown, or has the wrong shape
    or dtype.
    """
    check_weights_file(Path(path), shape)
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            tensors = {name: _aligned(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: expected a safetensors file, got: {error}") from error
    return ExpertWeights(
        tensors["router"],
        Quantized(tensors["gate_up"], tensors["gate_up_scale"]),
        Quantized(tensors["down"], tensors["down_scale"]),
        tensors.get("router_bias"),
    )


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, aligned to 16 bytes for the kernels; in a file, tensors are only aligned to 8 bytes."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def check_weights(shape: LayerShape, weights: ExpertWeights) -> None:
    """Raise ValueError (name, expected, got) unless every tensor has the right shape and dtype."""
    specs = tensor_specs(shape)
    for name, tensor in _by_name(weights).items():
        dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
        check_tensor(name, specs[name], TensorSpec(tuple(tensor.shape), (dtype,)))


def _by_name(weights: ExpertWeights) -> dict[str, Tensor]:
    bias = {} if weights.router_bias is None else {"router_bias": weights.router_bias}
    return bias | {
        "router": weights.router,
        "gate_up": weights.gate_up.data,
        "gate_up_scale": weights.gate_up.scales,
        "down": weights.down.data,
        "down_scale": weights.down.scales,
    }


def _random_experts(num_groups: int, n: int, k: int, generator: torch.Generator) -> Quantized:
    data = torch.empty((num_groups, n, k), dtype=torch.float8_e4m3fn, device=generator.device)
    scales = torch.empty((num_groups, n // SCALE_BLOCK, k // SCALE_BLOCK), device=generator.device)
    for group in range(num_groups):  # one at a time: a large layer would not fit unquantized
        group_data, group_scales = quantize_blocks(_normal((n, k), generator))
        data[group].copy_(group_data)
        scales[group].copy_(group_scales)
    return Quantized(data, scales)


def _normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, device=generator.device, generator=generator).mul_(shape[1] ** -0.5)
