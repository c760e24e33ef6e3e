"""Experts that move between ranks of a process group: gloo between machines, NVLink between GPUs."""

import pytest
import torch

from tests.kernels.helpers import fresh_generator
from tests.service.moe.parallel.cases import weights_of
from tests.service.moe.parallel.ranks import ranks_of
from tests.service.ranks.moving import SHAPE, run_moves

SLICES = (10_007, 65_536, 1 << 30)


def check_moves(num_ranks: int, on_gpus: bool) -> None:
    group, seed = tuple(range(num_ranks)), fresh_generator().initial_seed()
    with ranks_of(num_ranks, [group], 120) as ranks:
        for slice_bytes in SLICES:
            for result in ranks.run(group, run_moves, seed, slice_bytes, on_gpus):
                assert not isinstance(result, Exception)
                made, wrong = result
                assert made > 1
                assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_arrive_whole_however_they_are_cut(num_ranks: int) -> None:
    check_moves(num_ranks, on_gpus=False)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_experts_move_over_nvlink() -> None:
    check_moves(2, on_gpus=True)


def test_an_experts_bytes_are_those_of_its_tensors() -> None:
    weights = weights_of(SHAPE, 0)
    parts = (*weights.gate_up, *weights.down)
    assert SHAPE.expert_bytes == sum(part.nbytes for part in parts) // SHAPE.num_experts
