"""What a peer is, and a problem's rows packed as the peers take them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem


@dataclass(frozen=True)
class Peer:
    """One implementation.

    kernel     a word of its kernel's name
    same       whether it computes with our scales; else its output is another one
    available  whether it can run here
    prepare    (call, result) as `deep_gemm_peer.prepare`: result gives its output for our rows in order
    """

    name: str
    kernel: str
    same: bool
    available: Callable[[], bool]
    prepare: Callable[[Problem], tuple[Callable[[], object], Callable[[], Tensor]]]


@dataclass(frozen=True)
class Packed:
    """The real rows, group after group.

    data    e4m3 [M, K]
    scales  fp32 [M, K/128], contiguous
    ends    int32 [G]: where each group ends
    """

    data: Tensor
    scales: Tensor
    ends: Tensor


def packed(problem: Problem) -> Packed:
    """The problem's rows in this form."""
    data = problem.real_rows(problem.a.data.view(torch.uint8)).view(torch.float8_e4m3fn)
    rows = torch.tensor(problem.shape.rows, dtype=torch.int32)
    ends = rows.cumsum(0).to(torch.int32).to(data.device)
    return Packed(data, problem.real_rows(problem.a.scales).contiguous(), ends)
