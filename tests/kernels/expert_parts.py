"""A layer's experts cut into parts, for tests on any backend."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from expertd.kernels import ExpertPart, GroupTable, Weights
from expertd.kernels.ops.four_bits import mapped, tensors_of

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


def in_one_memory(gate_up: Weights, down: Weights, cuts: Cuts) -> Iterator[ExpertPart]:
    """The parts, each of which overwrites the one before when it is asked for."""
    part = ExpertPart(*(_room(weights, max(map(len, cuts))) for weights in (gate_up, down)))
    for cut in cuts:
        for place, expert in enumerate(cut):
            for whole, own in zip((gate_up, down), part, strict=True):
                for to, tensor in zip(tensors_of(own), tensors_of(whole), strict=True):
                    to[place].view(torch.uint8).copy_(tensor[expert].view(torch.uint8))
        yield part


def _room(weights: Weights, num_groups: int) -> Weights:
    def filled(tensor: Tensor) -> Tensor:
        made = tensor.new_empty((num_groups, *tensor.shape[1:]))
        made.view(torch.uint8).fill_(0xFF)  # NaN in all of floats
        return made

    return mapped(weights, filled)


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
