"""What peers are: of a grouped GEMM, with its rows packed as they take them, and of a layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem
from benchmarks.layer.problem import Layer, LayerProblem

BLOCK = [128, 128]  # of weights that share a scale


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


@dataclass(frozen=True)
class LayerPeer:
    """One implementation of a layer of experts, from bf16 hidden states with routing given to their sums.

    available  whether its packages are installed
    version    of its package
    prepare    the call, which returns its output bf16 [T, H]
    tuned      whether it has a configuration tuned for this GPU and layer; None: it has none to tune
    """

    name: str
    available: Callable[[], bool]
    version: Callable[[], str]
    prepare: Callable[[LayerProblem], Callable[[], Tensor]]
    tuned: Callable[[Layer], bool] | None = None
