"""The memory that a layer needs on its device, by arithmetic. Does not import torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertd.backends import Capabilities
from expertd.limits import SCALE_BLOCK
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights_file import BIASES, tensor_specs
from expertd.weight_format import WeightLayout

GROUPS_AT_ONCE = 4
"""Experts that are read at a time: one waits for small tensors, or is decoded, while others are read."""
_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
TOKEN_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Of captured steps, on each rank. In larger steps, launch latency is hidden."""
STORE_TOKEN_COUNTS = (1, 4, 16, 64)
"""The same of layers with a store: graphs take memory from experts, and larger steps lack some anyway."""
_GRAPH_BYTES = 64 * 1024 * 1024  # of the driver, for the graphs of a layer with TOKEN_COUNTS
_QUANTIZED_BYTES = 12  # a value of the one matrix that is being quantized: as stored, in fp32 and in FP8
_PACKING_BYTES = 10  # a value of a matrix that a GPU's backend packs, one group after another
_STORED_BYTES = 4  # a value of the others that are being read
_STEPS = 2  # that have memory of their own for what they read and write


@dataclass(frozen=True)
class Needs:
    """Bytes for a layer's weights, for its steps and for its graphs.

    graph_steps  of the graphs' bytes, those that graphs of other layers use, too
    """

    weights: int
    steps: int
    graphs: int
    graph_steps: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.graphs

    def __str__(self) -> str:
        parts = {"weights": self.weights, "steps": self.steps, "graphs": self.graphs}
        listed = ", ".join(f"{name} {num_bytes / 1e6:.1f}" for name, num_bytes in parts.items())
        return f"{self.total / 1e6:.1f} MB ({listed})"


def needs_of(
    shape: LayerShape,
    max_tokens: int,
    capabilities: Capabilities,
    *,
    staging: int = 0,
    has_biases: bool = False,
    weighs_input: bool = False,
    keeps_given: bool = False,
    num_graphs: int = len(TOKEN_COUNTS),
    graph_tokens: int = TOKEN_COUNTS[-1],
) -> Needs:
    """What a layer needs with steps of `max_tokens`, with a backend of these capabilities.

    staging       bytes by which memory for all layers grows
    has_biases    whether the experts have some
    weighs_input  whether routing weights multiply the experts' input, see `ExpertRule`
    keeps_given   whether a backend that packs needs the matrices also as they are: experts move
    num_graphs    numbers of tokens for which steps are captured
    graph_tokens  of the largest captured step, those of all ranks
    """
    in_bf16 = capabilities.keeps_bf16

    def step_bytes(num_tokens: int) -> int:
        return _step_bytes(shape, num_tokens, in_bf16) + weighs_input * _weighing_bytes(shape, num_tokens)

    router = shape.num_experts * shape.hidden_size * (4 + 2)  # copies of it in fp32 and bf16
    weights, reading = weights_bytes(shape, has_biases) + router, 0
    given = [layout for layout in shape.weight_layouts if layout.format in capabilities.packs]
    packs = [layout for layout in given if not layout.is_packed]
    data, packed = _packed_bytes(shape, packs, capabilities.weight_bytes)
    if packs:
        if not keeps_given:  # they are freed matrix by matrix, the larger one first
            reading = max(data - packed // 3, data // 3)
            weights -= data
        weights += packed
    if capabilities.weight_bytes is None:
        a_value = _QUANTIZED_BYTES + (GROUPS_AT_ONCE - 1) * _STORED_BYTES
        if given:  # for a store one expert after another is here, as it is and packed
            a_value = max(a_value, 2 * _PACKING_BYTES + 2)
        reading += a_value * shape.hidden_size * shape.intermediate_size
    steps = max(step_bytes(max_tokens), reading) + staging
    if not capabilities.captures or num_graphs == 0:
        return Needs(weights, steps, 0)
    in_graphs = step_bytes(graph_tokens)
    return Needs(weights, steps, in_graphs + _GRAPH_BYTES * num_graphs // len(TOKEN_COUNTS), in_graphs)


def stored_shape(shape: LayerShape, capabilities: Capabilities) -> LayerShape:
    """The layer with experts as a store has them, in slots and in the host's memory: maybe packed."""

    def stored(layout: WeightLayout) -> WeightLayout:
        return replace(layout, is_packed=layout.format in capabilities.stores_packed)

    layouts = stored(shape.weight_layout), stored(shape.shared_layout)
    return replace(shape, weight_layout=layouts[0], shared_layout=layouts[1])


def part_of_layer(shape: LayerShape, num_experts: int) -> LayerShape:
    """The layer with only `num_experts` routed experts, whichever they are; replicas count."""
    return replace(shape, local_experts=range(min(num_experts, shape.num_experts)))


def together(each: Sequence[Needs]) -> Needs:
    """What layers need whose steps run one after another, with graphs in memory that they share."""
    in_graphs = max((needs.graph_steps for needs in each), default=0)
    return Needs(
        sum(needs.weights for needs in each),
        max((needs.steps for needs in each), default=0),
        in_graphs + sum(needs.graphs - needs.graph_steps for needs in each),
        in_graphs,
    )


def weights_bytes(shape: LayerShape, has_biases: bool = False) -> int:
    """Bytes of a layer's weights, in its layouts; of those in `OPTIONAL`, only of the experts' biases."""
    specs = tensor_specs(shape)
    names = {"router", *(BIASES if has_biases else ())}
    others = sum(math.prod(specs[name].shape) * _BYTES[specs[name].dtypes[0]] for name in names)
    routed = len(shape.held_experts) * shape.expert_bytes
    return others + routed + shape.num_shared_experts * shape.shared_expert_bytes


def _packed_bytes(
    shape: LayerShape, layouts: Sequence[WeightLayout], weight_bytes: int | None
) -> tuple[int, int]:
    """Bytes of the values of all matrices of these layouts, without scales; and of their copies."""
    h, i, counts = shape.hidden_size, shape.intermediate_size, shape.weight_layouts
    data = sum(counts[layout] * layout.data_bytes(3 * i, h) for layout in layouts)
    if weight_bytes is not None:
        return data, sum(weight_bytes * counts[layout] * 3 * i * h for layout in layouts)

    def copied(layout: WeightLayout) -> int:
        packed = replace(layout, is_packed=True)
        return packed.num_bytes(2 * i, h, pairs=True) + packed.num_bytes(h, i)

    return data, sum(counts[each] * copied(each) for each in layouts)


def staging_bytes(max_tokens: int, hidden_size: int, top_k: int, itemsize: int) -> int:
    """Bytes on a GPU from which steps read, and to which they write, before they are copied to the host."""
    return _STEPS * max_tokens * (2 * hidden_size * itemsize + top_k * 8)


def _step_bytes(shape: LayerShape, num_tokens: int, in_bf16: bool) -> int:
    """Bytes of what a step computes on the way to its output, and of that."""
    h, i, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
    rows = num_tokens * (shape.top_k + shape.num_shared_experts)
    token = 2 * 4 * h + 4 * e  # hidden states and output in fp32, logits
    if in_bf16:
        return num_tokens * token + rows * 2 * h + num_tokens * 2 * h
    fp8 = h + i + 4 * (h + i) // SCALE_BLOCK
    return num_tokens * token + rows * (fp8 + 2 * h + 16)


def _weighing_bytes(shape: LayerShape, num_tokens: int) -> int:
    """Bytes for weights on inputs: a slot's input and output in fp32, and a token's sum of these."""
    return num_tokens * (2 * shape.top_k + 1) * 4 * shape.hidden_size
