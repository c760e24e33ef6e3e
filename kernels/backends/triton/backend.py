"""The Triton backend: grouped GEMMs and a layer's experts as kernels for any NVIDIA GPU from Ampere on."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels.backends.base import Backend, Progress
from expertd.kernels.backends.triton import plans
from expertd.kernels.backends.triton.build import build_all
from expertd.kernels.backends.triton.launch import LoadedTritonKernels
from expertd.kernels.backends.triton.targets import Target, target_of
from expertd.kernels.backends.triton.variants import (
    EXPERT_COUNTS,
    ROUTER_COLUMNS,
    ROUTER_EXPERTS,
    ROUTER_TOKENS,
    SLOTS,
    gated_heights,
    heights,
    variants_for,
)
from expertd.kernels.checks import refusal
from expertd.kernels.ops.activation import Activation, OtherGlu
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.checks import check_logits, check_router
from expertd.kernels.ops.four_bits import SCALE_DTYPES, FourBits, Weights, format_of
from expertd.kernels.ops.parts import ExpertPart, GroupTable
from expertd.kernels.ops.quantize import HiddenStates, Quantized, values_of
from expertd.kernels.request_table import MAX_GIVEN_TOP_K, RequestTable
from expertd.kernels.stages import Stages
from expertd.layout import Layout
from expertd.limits import SCALE_BLOCK
from expertd.routing import Routing
from expertd.weight_format import WeightFormat

_MAX_K = 2**24  # offsets within a tile of 128 rows have 32 bits
_TOKEN_COLUMNS = 1024  # of a token, by a program


class TritonBackend(Backend):
    """Grouped FP8 GEMMs in Triton; kernels are compiled by `warm_up`, else on first use.

    target  what to compile for; None: the current GPU
    """

    name: ClassVar[str] = "triton"
    capabilities = BACKENDS["triton"]

    def __init__(self, target: Target | None = None) -> None:
        target = target or target_of(torch.cuda.get_device_capability())
        assert target is not None  # see `why_not`
        self._kernels = LoadedTritonKernels(target)
        self._variants = variants_for(target)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile (or fetch) every variant, in parallel, and load it on the current device."""
        device, variants = torch.cuda.current_device(), list(self._variants)
        for done, (variant, binary) in enumerate(build_all(variants, self._kernels.target), start=1):
            self._kernels.load(device, variant, binary)
            if progress is not None:
                progress(done, len(variants), variant.name)

    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        """Write out [M, N]; see `grouped_gemm_contiguous`."""
        expected_m = a.data.shape[0] / b.data.shape[0]
        self._multiply_into(Layout.CONTIGUOUS, a, b, offsets, out, expected_m, num_sms)

    def masked(
        self,
        a: Quantized,
        b: Weights,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write the first counts[g] rows of each out[g]; see `grouped_gemm_masked`."""
        self._multiply_into(Layout.MASKED, a, b, counts, out, expected_m or a.data.shape[1], num_sms)

    @torch.no_grad()
    def experts(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Weights,
        down: Weights,
        out: Tensor,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor | None = None,
        biases: ExpertBiases | None = None,
        stages: Stages | None = None,
    ) -> None:
        """See `fused_experts`: five launches, with the activation and its quantization in the first GEMM."""

        def mark(stage: str) -> None:
            if stages is not None:
                stages.mark(stage)

        _check_device("hidden_states", values_of(hidden_states))
        own_offsets, inverse = self._permutation(topk_ids, down.data.shape[0])
        if offsets is not None:
            offsets.copy_(own_offsets, non_blocking=True)
        mark("sort")
        a = self._permute(hidden_states, inverse)
        mark("quantize")
        expected_m = inverse.numel() / down.data.shape[0]
        activated = self._activate(a, gate_up, own_offsets, activation, expected_m, num_sms, biases)
        mark("gate_up")
        rows = torch.empty((inverse.numel(), down.data.shape[1]), dtype=torch.bfloat16, device=out.device)
        bias = None if biases is None else biases.down
        self._multiply_into(Layout.CONTIGUOUS, activated, down, own_offsets, rows, expected_m, num_sms, bias)
        mark("down")
        self._combine(rows, inverse, topk_weights, out)
        mark("combine")

    @torch.no_grad()
    def experts_in_parts(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        parts: Iterable[ExpertPart],
        num_groups: int,
        num_experts: int,
        out: Tensor,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor | None = None,
        table: GroupTable | None = None,
    ) -> None:
        """See `fused_experts_in_parts`: two launches for each part, and three for all."""
        _check_device("hidden_states", values_of(hidden_states))
        all_offsets, inverse = self._permutation(topk_ids, num_groups, table)
        if offsets is not None:
            offsets.copy_(all_offsets, non_blocking=True)
        a, expected_m, first = self._permute(hidden_states, inverse), inverse.numel() / num_experts, 0
        rows = torch.empty((inverse.numel(), out.shape[1]), dtype=torch.bfloat16, device=out.device)
        for part in parts:
            own = all_offsets[first : first + part.num_groups + 1]
            activated = self._activate(a, part.gate_up, own, activation, expected_m, num_sms, part.biases)
            bias = None if part.biases is None else part.biases.down
            self._multiply_into(Layout.CONTIGUOUS, activated, part.down, own, rows, expected_m, num_sms, bias)
            first += part.num_groups
        self._combine(rows, inverse, topk_weights, out)

    def unpermute(self, rows: Tensor, inverse: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """See `Backend.unpermute`; one launch for bf16 rows [R, H], H a multiple of 16."""
        fits = (
            rows.dtype == torch.bfloat16 and rows.shape[1] % 16 == 0 and out.dtype in self._variants.combine
        )
        if not fits or not inverse.numel() or not all(map(_is_aligned, (rows, out))):
            super().unpermute(rows, inverse, topk_weights, out)
            return
        _check_device("rows", rows)
        self._combine(rows, inverse, topk_weights, out)

    @torch.no_grad()
    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `expertd.kernels.choose_experts`; one launch for the rules of `_can_route`."""
        check_logits(logits, bias, top_k, routing)
        if not len(logits) or not _can_route(logits.shape[1], top_k, routing):
            return super().choose_experts(logits, bias, top_k, routing)
        _check_device("logits", logits)
        return self._route(logits.contiguous()[None], bias, top_k, routing, None)

    @torch.no_grad()
    def route(
        self,
        hidden_states: Tensor,
        router: Tensor,
        bias: Tensor | None,
        top_k: int,
        routing: Routing,
        end_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.route`; in bf16 two launches, and batch-invariant.

        In other dtypes, and for rules that the kernel lacks, logits come from cuBLAS.
        """
        check_router(hidden_states, router, bias, top_k, routing)
        (num_tokens, k), num_experts = hidden_states.shape, router.shape[0]
        is_bf16 = hidden_states.dtype == router.dtype == torch.bfloat16
        if not is_bf16 or not num_tokens or k % 16 != 0 or not _can_route(num_experts, top_k, routing):
            return super().route(hidden_states, router, bias, top_k, routing, end_token)
        _check_device("hidden_states", hidden_states)
        device, parts = hidden_states.device, -(-k // ROUTER_COLUMNS)
        logits = torch.empty((parts, num_tokens, num_experts), dtype=torch.float32, device=device)
        self._kernels.launch(
            self._variants.router_logits, device,
            (-(-num_tokens // ROUTER_TOKENS), -(-num_experts // ROUTER_EXPERTS), parts),
            _aligned(hidden_states), _aligned(router), logits, num_tokens, num_experts, k,
        )  # fmt: skip
        return self._route(logits, bias, top_k, routing, end_token)

    def gather_rows(
        self,
        table: RequestTable,
        hidden_states: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int = 2**31 - 1,
    ) -> None:
        """See `Backend.gather_rows`; one launch."""
        _check_device("hidden_states", hidden_states)
        (num_tokens, h), top_k = hidden_states.shape, 0 if topk_ids is None else topk_ids.shape[1]
        if top_k > MAX_GIVEN_TOP_K:
            raise refusal("topk_ids top_k", f"at most {MAX_GIVEN_TOP_K}", top_k)
        ids = hidden_states.view(torch.int32) if topk_ids is None else topk_ids
        weights = hidden_states.view(torch.float32) if topk_weights is None else topk_weights
        self._kernels.launch(
            self._variants.gather_rows, hidden_states.device, (num_tokens,),
            table.address, hidden_states, ids, weights, h, top_k, num_experts,
        )  # fmt: skip

    def scatter_rows(self, rows: Tensor, table: RequestTable) -> None:
        """See `Backend.scatter_rows`; one launch."""
        _check_device("rows", rows)
        num_tokens, h = rows.shape
        self._kernels.launch(self._variants.scatter_rows, rows.device, (num_tokens,), table.address, rows, h)

    def _multiply_into(
        self,
        layout: Layout,
        a: Quantized,
        b: Weights,
        extents: Tensor,
        out: Tensor,
        expected_m: float,
        num_sms: int | None,
        bias: Tensor | None = None,
    ) -> None:
        """Write out bf16: each group's rows of a times its b, plus bias bf16 [G, N]."""
        _check_device("a", a.data)
        (num_groups, n, k), rows = b.data.shape, a.data.shape[-2]
        if a.data.shape[-1] > _MAX_K:
            raise refusal("K", f"at most {_MAX_K}", a.data.shape[-1])
        device, weights = out.device, format_of(b)
        fitting = heights(self._kernels.target, weights)
        height = plans.choose(fitting, expected_m, num_groups, n, num_sms or _sms(device))
        variant = self._variants.multiply[weights, layout, height]
        programs = self._kernels.programs(variant, device, num_sms)
        is_masked = layout is Layout.MASKED
        strides = a.scales.stride() if is_masked else (0, *a.scales.stride())
        self._kernels.launch(
            variant, device, (min(programs, plans.max_tiles(layout, rows, num_groups, n, height)),),
            *self._operands(a, b), extents, out, out if bias is None else bias,
            num_groups, n, k, rows if is_masked else 0, *strides, *_of_scales(b), int(bias is not None),
        )  # fmt: skip

    def _activate(
        self,
        a: Quantized,
        b: Weights,
        offsets: Tensor,
        activation: Activation,
        expected_m: float,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> Quantized:
        """Permuted rows e4m3 [R, I], activated: a [R, K] times b [G, 2I, K], gates first."""
        (num_groups, n2, k), num_rows = b.data.shape, a.data.shape[0]
        n, device = n2 // 2, a.data.device
        weights = format_of(b)
        height = plans.choose(gated_heights(weights), expected_m, num_groups, n, num_sms or _sms(device))
        variant = self._variants.multiply_gated[weights, height]
        programs = self._kernels.programs(variant, device, num_sms)
        data = torch.empty((num_rows, n), dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty((n // SCALE_BLOCK, num_rows), dtype=torch.float32, device=device)
        up_offset, after = 0.0, False
        if isinstance(activation, OtherGlu):
            up_offset, after = activation.up_offset, activation.clamp_after
        self._kernels.launch(
            variant, device,
            (min(programs, plans.max_tiles(Layout.CONTIGUOUS, num_rows, num_groups, n, height)),),
            *self._operands(a, b), offsets, data.view(torch.uint8), scales,
            a.scales if biases is None else biases.gate_up,
            num_groups, num_rows, n, k, *a.scales.stride(), *_of_scales(b), int(biases is not None),
            activation.alpha, activation.limit, up_offset, int(after),
        )  # fmt: skip
        return Quantized(data, scales.t())

    def _route(
        self, logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing, end_token: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The choice by logits fp32 [parts, T, E], which are added up first."""
        parts, num_tokens, num_experts = logits.shape
        ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
        weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
        count = min(each for each in EXPERT_COUNTS if each >= num_experts)
        self._kernels.launch(
            self._variants.route_tokens[count], logits.device, (num_tokens,),
            logits, logits if bias is None else bias.contiguous(), ids if end_token is None else end_token,
            ids, weights, parts, num_experts, top_k,
            int(routing.scoring_func == "softmax"), int(routing.bias_on == "logits"),
            int(routing.renormalize), routing.routed_scaling_factor,
            routing.num_expert_groups, routing.topk_group, int(bias is not None), int(end_token is not None),
        )  # fmt: skip
        return ids, weights

    def _permutation(
        self, topk_ids: Tensor, num_groups: int, table: GroupTable | None = None
    ) -> tuple[Tensor, Tensor]:
        """(offsets int32 [G + 1], inverse int32 [T, top_k]): where each pair's row is, -1: nowhere."""
        inverse = torch.empty_like(topk_ids)
        offsets = torch.empty(num_groups + 1, dtype=torch.int32, device=topk_ids.device)
        groups, seen = (topk_ids, topk_ids) if table is None else table
        self._kernels.launch(
            self._variants.permutation[table is not None], topk_ids.device, (num_groups + 1,),
            topk_ids, inverse, offsets, groups, seen, topk_ids.numel(), num_groups, groups.numel(),
        )  # fmt: skip
        return offsets, inverse

    def _permute(self, hidden_states: HiddenStates, inverse: Tensor) -> Quantized:
        """Permuted rows e4m3 [T * top_k, K]; a row's last scale may stand for fewer than 128 columns."""
        tokens, (num_tokens, top_k) = _with_aligned_rows(values_of(hidden_states)), inverse.shape
        k, num_rows = tokens.shape[1], inverse.numel()
        data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
        scales = torch.empty((-(-k // SCALE_BLOCK), num_rows), dtype=torch.float32, device=inverse.device)
        given = hidden_states.scales if isinstance(hidden_states, Quantized) else scales
        codes = isinstance(hidden_states, Quantized)
        self._kernels.launch(
            self._variants.permute[tokens.dtype], inverse.device, (num_tokens, -(-k // _TOKEN_COLUMNS)),
            tokens.view(torch.uint8) if codes else tokens, given, inverse, data.view(torch.uint8), scales,
            top_k, k, num_rows, tokens.stride(0), *given.stride(),
        )  # fmt: skip
        return Quantized(data, scales.t())

    def _combine(self, rows: Tensor, inverse: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        (num_tokens, top_k), n = inverse.shape, rows.shape[1]
        self._kernels.launch(
            self._variants.combine[out.dtype], out.device, (num_tokens, -(-n // _TOKEN_COLUMNS)),
            rows, inverse, topk_weights, out, top_k, n,
        )  # fmt: skip

    def _operands(self, a: Quantized, b: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows and weights as kernels take them; the last one counts in NVFP4 alone."""
        if isinstance(b, FourBits):
            scales = b.scales if b.format is WeightFormat.MXFP4 else b.scales.view(torch.int16)
            whole = a.scales if b.whole is None else b.whole
            return a.data.view(torch.int16), a.scales, b.data, scales, whole
        data = (a.data, b.data)
        if not self._kernels.target.fp8:
            data = (a.data.view(torch.uint8), b.data.view(torch.uint8))
        return data[0], a.scales, data[1], b.scales, a.scales


def _of_scales(weights: Weights) -> tuple[int, int]:
    """(scales_of_block, scale_dtype) of a GEMM; NVFP4's are read in pairs."""
    if not isinstance(weights, FourBits) or weights.format is not WeightFormat.INT4:
        return 4, 0
    dtypes = SCALE_DTYPES[WeightFormat.INT4]
    return SCALE_BLOCK // weights.group_size, dtypes.index(weights.scales.dtype)


def _sms(device: torch.device) -> int:
    """SMs of the device."""
    if device.type == "cpu":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _with_aligned_rows(tokens: Tensor) -> Tensor:
    """Rows of consecutive elements that begin at multiples of 16 bytes and elements; copied if necessary."""
    is_aligned = tokens.stride(1) == 1 and tokens.stride(0) % 16 == 0 and tokens.data_ptr() % 16 == 0
    return tokens if is_aligned else tokens.clone(memory_format=torch.contiguous_format)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at a multiple of 16 bytes; copied only if necessary."""
    return tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _can_route(num_experts: int, top_k: int, routing: Routing) -> bool:
    """Whether the kernel supports this rule."""
    return (
        routing.in_kernels
        and max(top_k, routing.num_expert_groups) <= SLOTS
        and num_experts <= max(EXPERT_COUNTS)
    )


def _check_device(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is on the current device: launches go to torch's current stream."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        expected = f"the current one, cuda:{torch.cuda.current_device()}"
        raise refusal(f"{name} device", expected, tensor.device)
