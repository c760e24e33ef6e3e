"""The peers of a layer, from DeepGEMM's wheel: its two GEMMs alone, and its SM90 Mega MoE."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gemm.problem import ALIGNMENT
from benchmarks.layer.problem import LayerProblem
from expertd.kernels import Quantized

MASKED_MAX_TOKENS = 256  # above this, DeepGEMM's contiguous layout is faster


def two_gemms(problem: LayerProblem, masked: bool | None = None) -> Callable[[], object]:
    """Both of DeepGEMM's grouped GEMMs on the layer's own rows, and nothing else of the layer.

    masked  in the masked layout; None: if the layer has few tokens
    """
    first, second, rows = problem.rows()
    if masked is None:
        masked = problem.hidden_states.shape[0] <= MASKED_MAX_TOKENS
    prepare = _masked if masked else _contiguous
    calls = [
        prepare(*pair, rows)
        for pair in ((first, problem.weights.whole_gate_up), (second, problem.weights.down))
    ]

    def run() -> None:
        for call in calls:
            call()

    return run


def has_mega_moe() -> bool:
    """Whether this build of DeepGEMM has the SM90 Mega MoE; not every build does."""
    import deep_gemm

    return hasattr(deep_gemm, "get_symm_buffer_for_sm90_mega_moe")


def mega_moe(problem: LayerProblem, max_tokens: int | None = None) -> Callable[[], Tensor]:
    """SM90 Mega MoE, routing given: quantize and dispatch, then all the rest in one kernel.

    It runs on the GPUs of the default group, of which this one has the problem's weights and tokens.
    max_tokens  of a GPU; None: as many as here
    """
    import deep_gemm

    (num_tokens, h), layer = problem.hidden_states.shape, problem.layer
    capacity = -(-(max_tokens or num_tokens) // 128) * 128
    buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
        _group(), layer.num_experts, capacity, layer.top_k, h, layer.intermediate_size
    )
    weights = deep_gemm.transform_weights_for_mega_moe_sm90(
        tuple(problem.weights.gate_up), tuple(problem.weights.down)
    )
    out = torch.empty_like(problem.hidden_states)
    given = (problem.hidden_states, problem.topk_ids, problem.topk_weights)

    def run() -> Tensor:
        targets = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
        deep_gemm.mega_moe_pre_dispatch_sm90(*given, *targets, num_tokens)
        deep_gemm.fp8_mega_moe(out, *weights, buffer)
        return out

    return run


def _masked(a: Quantized, b: Quantized, rows: list[int]) -> Callable[[], object]:
    import deep_gemm

    num_groups, n, k = b.data.shape
    max_m = -(-max(*rows, 1) // ALIGNMENT) * ALIGNMENT
    data = torch.zeros(num_groups, max_m, k, dtype=torch.uint8, device="cuda")
    scales = torch.ones(num_groups, k // 128, max_m, device="cuda").mT
    start = 0
    for group, count in enumerate(rows):
        data[group, :count] = a.data[start : start + count].view(torch.uint8)
        scales[group, :count] = a.scales[start : start + count]
        start += count
    out = torch.empty(num_groups, max_m, n, dtype=torch.bfloat16, device="cuda")
    counts, mean = torch.tensor(rows, dtype=torch.int32, device="cuda"), max(1, sum(rows) // num_groups)
    padded = (data.view(torch.float8_e4m3fn), scales)
    return lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(padded, tuple(b), out, counts, mean)


def _contiguous(a: Quantized, b: Quantized, rows: list[int]) -> Callable[[], object]:
    import deep_gemm

    padded_rows = [-(-count // ALIGNMENT) * ALIGNMENT for count in rows]
    m, (_, n, k) = sum(padded_rows), b.data.shape
    data = torch.zeros(m, k, dtype=torch.uint8, device="cuda")
    scales = torch.ones(k // 128, m, device="cuda").t()
    index = torch.full((m,), -1, dtype=torch.int32, device="cuda")
    start = to = 0
    for group, (count, padded) in enumerate(zip(rows, padded_rows, strict=True)):
        data[to : to + count] = a.data[start : start + count].view(torch.uint8)
        scales[to : to + count] = a.scales[start : start + count]
        index[to : to + count] = group
        start, to = start + count, to + padded
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    padded_a = (data.view(torch.float8_e4m3fn), scales)
    return lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(padded_a, tuple(b), out, index)


def _group() -> object:
    """The process group that Mega MoE needs, with only this process in it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    return dist.group.WORLD
