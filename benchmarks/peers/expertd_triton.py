"""Our own Triton backend, which is for other GPUs: its grouped GEMMs, and its layer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem
from benchmarks.layer.problem import LayerProblem
from benchmarks.peers.peer import LayerPeer, Peer
from expertd.kernels import fused_experts, resolve_backend
from expertd.kernels.backends import why_not

NAME = "expertd Triton"


def prepare(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """The same call as ours, with its own output."""
    own = replace(problem, out=torch.full_like(problem.out, torch.nan))
    call = partial(own.run, backend=resolve_backend("triton"))
    return call, lambda: problem.real_rows(call())


def prepare_layer(problem: LayerProblem) -> Callable[[], Tensor]:
    """The same call as ours."""
    backend, weights = resolve_backend("triton"), problem.weights
    out = torch.empty_like(problem.hidden_states)
    routing = problem.topk_ids, problem.topk_weights
    return lambda: fused_experts(
        problem.hidden_states, *routing, weights.gate_up, weights.down, out=out, backend=backend
    )


def _version() -> str:
    import triton

    return f"triton {triton.__version__}"


def _available() -> bool:
    return why_not("triton") is None


PEER = Peer(NAME, "multiply", True, _available, prepare)
LAYER_PEER = LayerPeer(NAME, _available, _version, prepare_layer)
