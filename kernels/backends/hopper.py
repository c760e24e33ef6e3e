"""The Hopper backend: grouped GEMMs and a layer's experts as kernels compiled just in time."""

from typing import ClassVar

import torch
from torch import Tensor

from kernels import jit, layer_kernels, tiles
from kernels.backends.base import Backend, Progress
from kernels.backends.hopper_gemm import GroupedGemm
from kernels.backends.hopper_kernels import LoadedKernels, current_stream
from kernels.backends.hopper_layer import LayerKernels
from kernels.quantize import Quantized
from kernels.tiles import Layout


class HopperBackend(Backend):
    """Grouped FP8 GEMMs on a Hopper GPU; kernels are compiled by `warm_up`, else on first use."""

    name: ClassVar[str] = "hopper"
    device_type: ClassVar[str | None] = "cuda"

    def __init__(self) -> None:
        kernels = LoadedKernels()
        self._gemm = GroupedGemm(kernels)
        self._layer = LayerKernels(kernels)

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
        num_sms: int | None,
    ) -> Tensor:
        """See `fused_experts`; five launches, each begun while the one before it ends."""
        on = current_stream(_current(hidden_states, "hidden_states"))
        num_groups, h, _ = down.data.shape
        rows, offsets = self._layer.sort(on, topk_ids, num_groups, num_sms)
        a = self._layer.quantize(on, hidden_states.contiguous(), rows)
        activated = self._gemm.swiglu(on, a, gate_up, offsets, num_sms)
        out = torch.empty((rows.numel(), h), dtype=torch.bfloat16, device=rows.device)
        self._gemm.multiply(
            on, Layout.CONTIGUOUS, activated, down, offsets, out, rows.numel() / num_groups, num_sms,
            extents_are_older=True,
        )  # fmt: skip
        return self._layer.combine(on, out, rows, topk_weights)


def _current(tensor: Tensor, name: str) -> int:
    """The tensor's device, which has to be the current one: launches go where torch's stream is."""
    device, current = tensor.get_device(), torch.cuda.current_device()
    if device != current:
        raise ValueError(f"{name} device: expected the current one, cuda:{current}, got {tensor.device}")
    return device
