"""What ranks do in tests of moves: they go from one placement to another, without a server."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from expertd.kernels import Quantized
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.service.moe.parallel import Exchange, PlacedExperts
from expertd.service.moe.parallel.placed import tables_of
from expertd.service.moe.placement import Placement
from expertd.service.moe.placement.rounds import rounds
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.split import experts_of_rank
from expertd.service.moe.weights import ExpertWeights
from expertd.service.ranks.messages import MoveCommand, MoveKind
from expertd.service.ranks.worker.mover import Mover
from expertd.service.ranks.worker.transport import PeerTransport, RankTransport, TorchTransport
from tests.service.moe.parallel.cases import part_of, weights_of

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=10, top_k=3)
BEFORE = [9, 0, 4, 4, 2, 7, 1, 8, 3, 4, 5, 6, 0]  # 13 physical experts
AFTER = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 7, 1]


def run_moves(
    exchange: Exchange, seed: int, slice_bytes: int, on_gpus: bool = False
) -> tuple[int, list[int]]:
    """The number of rounds from BEFORE to AFTER, and the slots of this rank whose weights are wrong then."""
    device, transport = _means(exchange.rank, on_gpus)
    experts = _experts(exchange, seed, device)
    mover = Mover(exchange.rank, [experts], transport)
    transport.connect()
    old, new = (Placement(np.array(held), SHAPE.num_experts, exchange.num_ranks) for held in (BEFORE, AFTER))
    made = rounds(old, new)
    for each in made:
        commands = [
            MoveCommand(
                1, 0, MoveKind.FETCH, each.fetches, start, min(start + slice_bytes, SHAPE.expert_bytes)
            )
            for start in range(0, SHAPE.expert_bytes, slice_bytes)
        ]
        commands += [MoveCommand(2, 0, MoveKind.PREPARE, each.fetches, matrix) for matrix in range(2)]
        for command in (*commands, MoveCommand(3, 0, MoveKind.SWITCH, each.fetches)):
            mover.run(command)
            dist.barrier()  # the front end waits for all ranks after each command
    physical = experts.tables.physical
    for rank in range(exchange.num_ranks):
        held = experts_of_rank(physical, rank, exchange.num_ranks)
        assert sorted(held) == sorted(new.experts_of_rank(rank))
    weights = weights_of(SHAPE, seed)
    wrong = [slot for slot in experts.slots if not _is(experts.expert_bytes(slot), weights, physical[slot])]
    return len(made), wrong


def _means(rank: int, on_gpus: bool) -> tuple[torch.device, RankTransport]:
    if not on_gpus:
        device = torch.device("cpu")
        return device, TorchTransport(SHAPE.expert_bytes, device)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device, PeerTransport(SHAPE.expert_bytes, device)


def _experts(exchange: Exchange, seed: int, device: torch.device) -> PlacedExperts:
    whole, held = weights_of(SHAPE, seed), SHAPE.held_experts
    own, shared = (
        _on(device, part_of(whole, held, experts, 0))
        for experts in (experts_of_rank(BEFORE, exchange.rank, exchange.num_ranks), [])
    )
    tables = tables_of(SHAPE, exchange.num_ranks, BEFORE, device)
    return PlacedExperts(tables, exchange.rank, own, shared, ReferenceBackend())


def _on(device: torch.device, weights: ExpertWeights) -> ExpertWeights:
    gate_up, down = (
        Quantized(w.data.to(device), w.scales.to(device)) for w in (weights.gate_up, weights.down)
    )
    return ExpertWeights(weights.router.to(device), gate_up, down)


def _is(got: Sequence[Tensor], weights: ExpertWeights, expert: int) -> bool:
    expected = [part[expert] for part in (*weights.gate_up, *weights.down)]
    pairs = zip(got, expected, strict=True)
    return all(torch.equal(a.cpu(), b.view(torch.uint8).flatten()) for a, b in pairs)
