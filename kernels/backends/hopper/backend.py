"""The Hopper backend: grouped GEMMs and a layer's experts as kernels compiled just in time."""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels import jit
from expertd.kernels.backends.base import Backend, Progress, without_padding
from expertd.kernels.backends.hopper import plans
from expertd.kernels.backends.hopper.device_calls import HopperCallGraph
from expertd.kernels.backends.hopper.gather_rows import gather_rows
from expertd.kernels.backends.hopper.grouped_gemm import Choose, GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.layer import HopperLayer
from expertd.kernels.backends.hopper.packed_weights import PackedWeights, pack
from expertd.kernels.backends.hopper.route_tokens import can_route, route_tokens
from expertd.kernels.backends.hopper.router_logits import Logits
from expertd.kernels.backends.hopper.scatter_rows import answer_calls, scatter_rows
from expertd.kernels.backends.hopper.unpermute_rows import can_unpermute, unpermute_rows
from expertd.kernels.backends.hopper.variants import VARIANTS
from expertd.kernels.backends.streams import current_stream
from expertd.kernels.device_calls import CallGraph, CallTable
from expertd.kernels.expert_checks import check_parallel, check_parallel_in_parts, checked_parts
from expertd.kernels.ops.activation import SILU, Activation
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.checks import check_logits, check_router
from expertd.kernels.ops.four_bits import FourBits, W, Weights, format_of, mapped
from expertd.kernels.ops.parts import ExpertPart, GroupTable, PartsOfRank
from expertd.kernels.ops.quantize import HiddenStates, Quantized, values_of
from expertd.kernels.overlap import Overlap
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.kernels.request_table import RequestTable
from expertd.kernels.stages import Stages
from expertd.layout import Layout
from expertd.routing import Routing


class HopperBackend(Backend):
    """Grouped FP8 GEMMs on a Hopper GPU; kernels are compiled by `warm_up`, else on first use.

    choose  the function that plans a GEMM (its tile, and how groups are cut)
    """

    name: ClassVar[str] = "hopper"
    capabilities = BACKENDS["hopper"]

    def __init__(self, choose: Choose = plans.choose) -> None:
        self._kernels = Kernels()
        self._gemm = GroupedGemm(self._kernels, choose)
        self._layer = HopperLayer(self._kernels, self._gemm)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile (or fetch) every variant, in parallel, and load it on the current device."""
        device = torch.cuda.current_device()
        self._gemm.tile_counters.prepare(device)
        variants = {variant.source: variant for variant in VARIANTS}
        for done, (source, binary) in enumerate(jit.build_all(list(variants)), start=1):
            self._kernels.load(device, variants[source], binary)
            if progress is not None:
                progress(done, len(variants), source.name)

    def packed(self, weights: W, *, pairs: bool = False) -> W:
        """See `Backend.packed`; calls with four bits read a copy, and the scales only as a key to it."""
        return (
            self._gemm.packed_weights.packed(weights, pairs)
            if format_of(weights) in self.capabilities.packs
            else weights
        )

    def prepare_weights(self, group: Weights, *, pairs: bool = False) -> object:
        """See `Backend.prepare_weights`."""
        if not isinstance(group, FourBits):
            return None
        return pack(mapped(group, lambda tensor: tensor[None]), pairs)

    def weights_changed(self, weights: Weights, groups: Sequence[int], prepared: Sequence[object]) -> None:
        """See `Backend.weights_changed`; overwrites what captured calls read."""
        if isinstance(weights, FourBits):
            replacements = [packed for packed in prepared if isinstance(packed, PackedWeights)]
            self._gemm.packed_weights.refresh(weights, groups, replacements)

    def room(self, weights: W, device: torch.device, *, pairs: bool = False) -> tuple[W, tuple[Tensor, ...]]:
        """See `Backend.room`; of four bits, packed."""
        if not isinstance(weights, FourBits):
            return super().room(weights, device, pairs=pairs)
        packed = self._gemm.packed_weights.room(weights, device, pairs)
        return weights, (packed.data, packed.scales)

    def contents(self, weights: Weights, *, pairs: bool = False, first: int = 0) -> tuple[Tensor, ...]:
        """See `Backend.contents`."""
        if not isinstance(weights, FourBits):
            return super().contents(weights, pairs=pairs, first=first)
        packed = pack(weights, pairs, first)
        return packed.data, packed.scales

    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        """Write out [M, N]; see `grouped_gemm_contiguous`."""
        on = current_stream(_current(a.data, "a"))
        expected_m = a.data.shape[0] / b.data.shape[0]
        self._gemm.multiply(on, Layout.CONTIGUOUS, a, b, Groups(offsets), out, expected_m, num_sms)

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
        on = current_stream(_current(a.data, "a"))
        max_m = a.data.shape[1]
        expected_m = max_m if expected_m is None else min(expected_m, max_m)
        self._gemm.multiply(on, Layout.MASKED, a, b, Groups(counts), out, expected_m, num_sms)

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
        """See `fused_experts`. One SM cannot run a pair of CTAs, so num_sms=1 runs each step separately."""
        if num_sms == 1:
            operands = hidden_states, topk_ids, topk_weights, gate_up, down, out
            super().experts(*operands, activation, num_sms, offsets, biases, stages)
            return
        on = current_stream(_current(values_of(hidden_states), "hidden_states"))
        self._layer.experts(
            on,
            _with_aligned_rows(hidden_states),
            topk_ids,
            topk_weights,
            gate_up,
            down,
            out,
            activation,
            num_sms,
            offsets,
            biases,
            stages,
        )

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
        """See `fused_experts_in_parts`, and `experts` for num_sms=1."""
        operands = (
            topk_ids, topk_weights, parts, num_groups, num_experts, out, activation, num_sms, offsets, table,
        )  # fmt: skip
        if num_sms == 1:
            super().experts_in_parts(hidden_states, *operands)
            return
        on = current_stream(_current(values_of(hidden_states), "hidden_states"))
        self._layer.experts_in_parts(on, _with_aligned_rows(hidden_states), *operands)

    def parallel_experts(
        self,
        memory: RankMemory,
        tokens: RankTokens,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Weights,
        down: Weights,
        out: Tensor,
        num_sms: int | None,
        offsets: Tensor | None = None,
        overlap: Overlap | None = None,
        activation: Activation = SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        """See `Backend.parallel_experts`."""
        check_parallel(
            self.capabilities, memory, tokens, hidden_states, topk_ids, topk_weights, gate_up, down, out,
            activation=activation, num_sms=num_sms, offsets=offsets, biases=biases,
            has_overlap=overlap is not None,
        )  # fmt: skip
        on = current_stream(_current(values_of(hidden_states), "hidden_states"))
        self._layer.parallel_experts(
            on,
            memory,
            tokens,
            hidden_states if isinstance(hidden_states, Quantized) else _aligned(hidden_states),
            topk_ids,
            topk_weights,
            gate_up,
            down,
            out,
            activation,
            num_sms,
            offsets,
            overlap,
            biases,
        )

    def parallel_experts_in_parts(
        self,
        memory: RankMemory,
        tokens: RankTokens,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_groups: int,
        parts_of: Callable[[], PartsOfRank],
        out: Tensor,
        num_sms: int | None,
        offsets: Tensor,
        activation: Activation = SILU,
        down_bias: Tensor | None = None,
    ) -> None:
        """See `Backend.parallel_experts_in_parts`."""
        check_parallel_in_parts(
            self.capabilities, memory, tokens, hidden_states, topk_ids, topk_weights, num_groups, out,
            activation, num_sms, offsets, down_bias,
        )  # fmt: skip

        def checked() -> PartsOfRank:
            known, size = parts_of(), (out.shape[1], out.device)
            parts = checked_parts(self.capabilities, known.parts, len(known.offsets) - 1, *size)
            return known._replace(parts=parts)

        on = current_stream(_current(values_of(hidden_states), "hidden_states"))
        self._layer.parallel_experts_in_parts(
            on, memory, tokens,
            hidden_states if isinstance(hidden_states, Quantized) else _aligned(hidden_states),
            topk_ids, topk_weights, num_groups, checked, out, activation, num_sms, offsets, down_bias,
        )  # fmt: skip

    def unpermute(self, rows: Tensor, inverse: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """See `Backend.unpermute`; one launch for bf16 rows [R, H], H a multiple of 8."""
        if out.shape[0] == 0 or not can_unpermute(rows, inverse, out):
            super().unpermute(rows, inverse, topk_weights, out)
            return
        on = current_stream(_current(rows, "rows"))
        unpermute_rows(self._kernels, on, rows, inverse, topk_weights, out)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """See `expertd.kernels.choose_experts`; one launch for the rules of `can_route`."""
        check_logits(logits, bias, top_k, routing)
        if not len(logits) or not can_route(logits.shape[1], top_k, routing):
            return super().choose_experts(logits, bias, top_k, routing)
        on = current_stream(_current(logits, "logits"))
        bias = None if bias is None else bias.contiguous()
        return route_tokens(self._kernels, on, Logits(_aligned(logits)[None], 1), bias, top_k, routing)

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

        router and bias must then be contiguous (router 16-byte aligned), and the preceding launch must not
        write them: they are read before it ends. In other dtypes, and for rules that the kernel lacks, logits
        come from cuBLAS.
        """
        check_router(hidden_states, router, bias, top_k, routing)
        is_bf16 = hidden_states.dtype == router.dtype == torch.bfloat16
        if not is_bf16 or not len(hidden_states):
            return super().route(hidden_states, router, bias, top_k, routing, end_token)
        on = current_stream(_current(hidden_states, "hidden_states"))
        as_they_are = _is_aligned(router) and (bias is None or bias.is_contiguous())
        if not as_they_are or router.shape[1] % 8 != 0 or not can_route(router.shape[0], top_k, routing):
            logits = torch.mm(hidden_states, router.t(), out_dtype=torch.float32)
            return without_padding(*self.choose_experts(logits, bias, top_k, routing), end_token)
        return self._layer.route(on, _aligned(hidden_states), router, bias, top_k, routing, end_token)

    def gather_rows(
        self,
        table: RequestTable,
        hidden_states: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int = 2**31 - 1,
    ) -> None:
        """See `Backend.gather_rows`; one launch."""
        on = current_stream(_current(hidden_states, "hidden_states"))
        gather_rows(self._kernels, on, table, hidden_states, topk_ids, topk_weights, num_experts)

    def scatter_rows(self, rows: Tensor, table: RequestTable) -> None:
        """See `Backend.scatter_rows`; one launch."""
        scatter_rows(self._kernels, current_stream(_current(rows, "rows")), rows, table)

    def call_experts(
        self,
        calls: CallTable,
        num_tokens: int,
        top_k: int,
        gate_up: Weights,
        down: Weights,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> None:
        """See `Backend.call_experts`; five launches."""
        on = current_stream(_current(down.scales, "down"))
        self._layer.call_experts(on, calls, num_tokens, top_k, gate_up, down, activation, num_sms, biases)

    def answer_calls(self, rows: Tensor, calls: CallTable) -> None:
        """See `Backend.answer_calls`; one launch."""
        answer_calls(self._kernels, current_stream(_current(rows, "rows")), rows, calls)

    def call_graph(
        self, calls: CallTable, sizes: Sequence[int], graphs: Sequence[Sequence[int]]
    ) -> CallGraph:
        """See `Backend.call_graph`."""
        return HopperCallGraph(self._kernels, calls, sizes, graphs)


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous, at a 16-byte aligned address; copied only if necessary."""
    return rows if _is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def _is_aligned(rows: Tensor) -> bool:
    return rows.is_contiguous() and rows.data_ptr() % 16 == 0


def _with_aligned_rows(hidden_states: HiddenStates) -> HiddenStates:
    """Floats contiguous and 16-byte aligned; of FP8 data, each row. Copied only if necessary."""
    if isinstance(hidden_states, Tensor):
        return _aligned(hidden_states)
    data, scales = hidden_states
    stride = data.stride(0)
    if data.stride(1) != 1 or stride % 16 != 0 or stride >= 2**32 or data.data_ptr() % 16 != 0:
        data = data.clone(memory_format=torch.contiguous_format)
    return Quantized(data, scales)


def _current(tensor: Tensor, name: str) -> int:
    """The tensor's device, which must be the current one: launches go to torch's current stream."""
    device, current = tensor.get_device(), torch.cuda.current_device()
    if device != current:
        raise ValueError(f"{name} device: expected the current one, cuda:{current}, got {tensor.device}")
    return device
