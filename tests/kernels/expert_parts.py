"""A layer's experts cut into parts, for tests on any backend."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from expertd.kernels import ExpertBiases, ExpertPart, GroupTable, Weights
from expertd.kernels.ops.four_bits import mapped, tensors_of
from tests.kernels.helpers import fresh_generator

Cuts = Sequence[Sequence[int]]
"""The experts of each part."""


def num_groups_of(cuts: Cuts) -> int:
    """The groups of parts that are all as large as the largest."""
    return len(cuts) * max(map(len, cuts))


def placed(topk_ids: Tensor, cuts: Cuts, num_experts: int) -> Tensor:
    """The groups of topk_ids in these parts; ids that name no expert, or one of no part, name no group."""
    lookup = torch.full((num_experts + 2,), -1, dtype=torch.int32)
    for number, cut in enumerate(cuts):
        for place, expert in enumerate(cut):
            lookup[expert + 1] = number * max(map(len, cuts)) + place
    return lookup.to(topk_ids.device)[topk_ids.clamp(-1, num_experts).long() + 1].contiguous()


def in_one_memory(
    gate_up: Weights, down: Weights, cuts: Cuts, biases: ExpertBiases | None = None
) -> Iterator[ExpertPart]:
    """The parts, each of which overwrites the one before when it is asked for."""

    def room(tensor: Tensor) -> Tensor:
        made = tensor.new_empty((max(map(len, cuts)), *tensor.shape[1:]))
        made.view(torch.uint8).fill_(0xFF)  # NaN in all of floats
        return made

    own_biases = None if biases is None else ExpertBiases(*map(room, biases))
    part = ExpertPart(mapped(gate_up, room), mapped(down, room), own_biases)
    pairs = list(zip(_tensors(part), _tensors(ExpertPart(gate_up, down, biases)), strict=True))
    for cut in cuts:
        for place, expert in enumerate(cut):
            for to, tensor in pairs:
                to[place].view(torch.uint8).copy_(tensor[expert].view(torch.uint8))
        yield part


def _tensors(part: ExpertPart) -> tuple[Tensor, ...]:
    return *tensors_of(part.gate_up), *tensors_of(part.down), *(part.biases or ())


def random_biases(gate_up: Weights, down: Weights) -> ExpertBiases:
    """Biases of the experts with these matrices, about as large as their products."""
    generator = fresh_generator(gate_up.data.device.type)
    (num_experts, two_i), h = gate_up.data.shape[:2], down.data.shape[1]
    drawn = [torch.randn(num_experts, n, generator=generator, device=generator.device) for n in (two_i, h)]
    return ExpertBiases(*(bias.bfloat16() for bias in drawn))


def slots_of(num_experts: int, kept: Sequence[int], ids: Tensor) -> GroupTable:
    """A table of which experts are in which slots, for calls with these ids."""
    slots = torch.full((num_experts,), -1, dtype=torch.int32)
    slots[list(kept)] = torch.arange(len(kept), dtype=torch.int32)
    seen = torch.full((1 + ids.numel() + 3,), -7, dtype=torch.int32, pin_memory=ids.is_cuda)
    seen[0] = 0
    return GroupTable(slots.to(ids.device), seen)


def expect_slots_found(
    topk_ids: Tensor,
    num_experts: int,
    run: Callable[[GroupTable, Sequence[int], Tensor], Tensor],
    whole: Tensor,
) -> None:
    """`run` has the bits of `whole`, an output with all experts, if a table has the slots of those that are
    named; else its call says so. It has a table, the experts in slots, and offsets to write to.
    """
    named = sorted({expert for expert in topk_ids.flatten().tolist() if 0 <= expert < num_experts})
    kept = [named[place] for place in torch.randperm(len(named)).tolist()]
    offsets = torch.full((len(kept) + 1,), -7, dtype=torch.int32, pin_memory=topk_ids.is_cuda)
    table = slots_of(num_experts, kept, topk_ids)
    out = run(table, kept, offsets)
    if topk_ids.is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(out, whole)
    assert table.seen.tolist() == [0, *topk_ids.flatten().tolist(), -7, -7, -7]
    counts = [int((topk_ids == expert).sum()) for expert in kept]
    assert offsets.diff().tolist() == counts
    assert offsets[0] == 0
    table.groups[kept[-1]] = -1
    run(table, kept, offsets)
    if topk_ids.is_cuda:
        torch.cuda.synchronize()
    assert table.seen.tolist() == [1, *topk_ids.flatten().tolist(), -7, -7, -7]
