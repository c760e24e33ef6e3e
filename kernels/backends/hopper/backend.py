"""The Hopper backend: grouped GEMMs and a layer's experts as kernels compiled just in time."""

from typing import ClassVar

import torch
from torch import Tensor

from expertd.kernels import jit
from expertd.kernels.backends.base import Backend, Progress
from expertd.kernels.backends.hopper import layer_kernels, tiles
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import LoadedKernels, current_stream
from expertd.kernels.backends.hopper.layer import LayerKernels, Logits
from expertd.kernels.ops.activation import Swiglu
from expertd.kernels.ops.quantize import Quantized
from expertd.kernels.partitions import SMPartitions
from expertd.layout import Layout
from expertd.routing import Routing

WARP = 32


class HopperBackend(Backend):
    """Grouped FP8 GEMMs on a Hopper GPU; kernels are compiled by `warm_up`, else on first use."""

    name: ClassVar[str] = "hopper"
    device_type: ClassVar[str | None] = "cuda"

    def __init__(self) -> None:
        kernels = LoadedKernels()
        self._gemm = GroupedGemm(kernels)
        self._layer = LayerKernels(kernels)

    def partitions(self) -> SMPartitions:
        """Green contexts of the device."""
        return SMPartitions(self.device.index)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile (or fetch) every variant, in parallel, and load it on the current device."""
        device = torch.cuda.current_device()
        gemms = {tiles.source(*variant) for variant in tiles.VARIANTS}
        sources = [*gemms, *layer_kernels.SOURCES]
        for done, (source, binary) in enumerate(jit.build_all(sources), start=1):
            (self._gemm if source in gemms else self._layer).load(device, source, binary)
            if progress is not None:
                progress(done, len(sources), source.name)

    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        offsets: Tensor,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write out [M, N]; see `grouped_gemm_contiguous`."""
        on = current_stream(_current(a, "a"))
        rows = a.shape[0] / b.shape[0]
        a_, b_ = Quantized(a, a_scales), Quantized(b, b_scales)
        self._gemm.multiply(on, Layout.CONTIGUOUS, a_, b_, offsets, out, rows, num_sms)

    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write the first counts[g] rows of each out[g]; see `grouped_gemm_masked`."""
        on = current_stream(_current(a, "a"))
        max_m = a.shape[1]
        rows = min(expected_m or max_m, max_m)
        a_, b_ = Quantized(a, a_scales), Quantized(b, b_scales)
        self._gemm.multiply(on, Layout.MASKED, a_, b_, counts, out, rows, num_sms)

    def experts(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Quantized,
        down: Quantized,
        out: Tensor,
        activation: Swiglu,
        num_sms: int | None,
    ) -> None:
        """See `fused_experts`; five launches, each begun while the one before it ends.

        On a single SM, which has no pair of CTAs, the composition of single steps.
        """
        if num_sms == 1:
            super().experts(hidden_states, topk_ids, topk_weights, gate_up, down, out, activation, num_sms)
            return
        on = current_stream(_current(hidden_states, "hidden_states"))
        num_groups, h, _ = down.data.shape
        hidden_states = _aligned(hidden_states)  # before the sort, for quantize reads it before it waits
        rows, offsets, claims = self._layer.sort(on, topk_ids, num_groups, num_sms)
        a = self._layer.quantize(on, hidden_states, rows)
        activated = self._gemm.swiglu(on, a, gate_up, offsets, claims[0], activation, num_sms)
        values = torch.empty((rows.numel(), h), dtype=torch.bfloat16, device=rows.device)
        self._gemm.multiply(
            on, Layout.CONTIGUOUS, activated, down, offsets, values, rows.numel() / num_groups, num_sms,
            claims=claims[1],
        )  # fmt: skip
        self._layer.combine(on, values, rows, topk_weights, out)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `expertd.kernels.choose_experts`; one launch, but for rules that are wider than a warp."""
        if not _narrow(logits.shape[1], top_k, routing):
            return super().choose_experts(logits, bias, top_k, routing)
        on = current_stream(_current(logits, "logits"))
        bias = None if bias is None else bias.contiguous()
        return self._layer.route(on, Logits(_aligned(logits)[None], 1), bias, top_k, routing)

    def route(
        self, hidden_states: Tensor, router: Tensor, bias: Tensor | None, top_k: int, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.route`; two launches for bf16, and the same bits in any company.

        router and bias must be contiguous then (router 16-byte aligned) and older than the launch before, for
        they are read while it ends; else, and for wider rules, logits come from cuBLAS.
        """
        if not hidden_states.dtype == router.dtype == torch.bfloat16:
            return super().route(hidden_states, router, bias, top_k, routing)
        on = current_stream(_current(hidden_states, "hidden_states"))
        as_they_are = _is_aligned(router) and (bias is None or bias.is_contiguous())
        if not as_they_are or router.shape[1] % 8 != 0 or not _narrow(router.shape[0], top_k, routing):
            logits = torch.mm(hidden_states, router.t(), out_dtype=torch.float32)
            return self.choose_experts(logits, bias, top_k, routing)
        return self._layer.route(
            on, self._layer.logits(on, _aligned(hidden_states), router), bias, top_k, routing
        )


def _narrow(num_experts: int, top_k: int, routing: Routing) -> bool:
    """Whether a warp can have a token: a lane each slot, and each group."""
    return max(top_k, routing.num_expert_groups) <= WARP and num_experts <= layer_kernels.MAX_EXPERTS


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous, and where 16 bytes can be loaded at a time."""
    return rows if _is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def _is_aligned(rows: Tensor) -> bool:
    return rows.is_contiguous() and rows.data_ptr() % 16 == 0


def _current(tensor: Tensor, name: str) -> int:
    """The tensor's device, which has to be the current one: launches go where torch's stream is."""
    device, current = tensor.get_device(), torch.cuda.current_device()
    if device != current:
        raise ValueError(f"{name} device: expected the current one, cuda:{current}, got {tensor.device}")
    return device
