"""A layer on Hopper: a sequence of launches, each of which may begin before the preceding one ends."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from expertd.kernels.backends.hopper.combine_rows import combine_rows
from expertd.kernels.backends.hopper.compute_permutation import DevicePermutation, compute_permutation
from expertd.kernels.backends.hopper.dispatch_rows import dispatch_rows, packed_rows
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.permutation_of_ranks import permutation_of_ranks
from expertd.kernels.backends.hopper.permute_rows import permute_rows
from expertd.kernels.backends.hopper.quantize_permute import quantize_permute, quantize_permute_calls
from expertd.kernels.backends.hopper.route_tokens import route_tokens
from expertd.kernels.backends.hopper.router_logits import router_logits
from expertd.kernels.backends.hopper.tensor_maps import TensorMapCache, describe_rows
from expertd.kernels.backends.hopper.unpermute_rows import unpermute_calls, unpermute_rows
from expertd.kernels.backends.streams import OnStream, current_stream
from expertd.kernels.device_calls import CallTable
from expertd.kernels.ops.activation import Activation
from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import Weights
from expertd.kernels.ops.parts import ExpertPart, GroupTable, PartsOfRank
from expertd.kernels.ops.permute import write_no_rows
from expertd.kernels.ops.quantize import HiddenStates, Quantized
from expertd.kernels.overlap import Overlap
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.kernels.stages import Stages
from expertd.layout import Layout
from expertd.routing import Routing


class HopperLayer:
    """Routing and experts; nothing here reads a tensor on the host."""

    def __init__(self, kernels: Kernels, gemm: GroupedGemm) -> None:
        self._kernels = kernels
        self._gemm = gemm
        self._tensor_maps = TensorMapCache(describe_rows)

    def route(
        self,
        on: OnStream,
        hidden_states: Tensor,
        router: Tensor,
        router_bias: Tensor | None,
        top_k: int,
        routing: Routing,
        end_token: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(topk_ids, topk_weights) of bf16 [T, H] by a bf16 router [E, H]; two launches, batch-invariant.

        hidden_states and router are contiguous and 16-byte aligned. The preceding launch must not write
        router and router_bias, which are read before it ends.
        """
        logits = router_logits(self._kernels, on, self._tensor_maps, hidden_states, router)
        return route_tokens(self._kernels, on, logits, router_bias, top_k, routing, end_token)

    def experts(
        self,
        on: OnStream,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Weights,
        down: Weights,
        out: Tensor,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor | None,
        biases: ExpertBiases | None = None,
        stages: Stages | None = None,
    ) -> None:
        """Write out; see `fused_experts`. Five launches, on at least two SMs.

        hidden_states is contiguous and 16-byte aligned; if quantized, only each row of its data has to be.
        """
        permutation = compute_permutation(self._kernels, on, topk_ids, down.data.shape[0], num_sms, offsets)
        if stages is not None:
            stages.mark("sort")
        a = self._permuted(on, hidden_states, permutation)
        if stages is not None:
            stages.mark("quantize")
        rows = self._rows(on, a, permutation, gate_up, down, activation, num_sms, biases, stages)
        added = None if biases is None else (topk_ids, biases.down)
        unpermute_rows(self._kernels, on, rows, permutation.inverse, topk_weights, out, added)
        if stages is not None:
            stages.mark("combine")

    def call_experts(
        self,
        on: OnStream,
        calls: CallTable,
        num_tokens: int,
        top_k: int,
        gate_up: Weights,
        down: Weights,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None,
    ) -> None:
        """As `experts`, whose first launch follows the one that has taken calls; see `Backend.call_experts`.

        The second and the last read and write rows where callers have them.
        """
        topk_ids, topk_weights = calls.routing(num_tokens, top_k)
        num_experts, n = down.data.shape[:2]
        permutation = compute_permutation(self._kernels, on, topk_ids, num_experts, num_sms)
        a = quantize_permute_calls(self._kernels, on, calls.requests, n, permutation.inverse)
        rows = self._rows(on, a, permutation, gate_up, down, activation, num_sms, biases)
        added = None if biases is None else (topk_ids, biases.down)
        unpermute_calls(self._kernels, on, rows, permutation.inverse, topk_weights, calls, added)

    def experts_in_parts(
        self,
        on: OnStream,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        parts: Iterable[ExpertPart],
        num_groups: int,
        num_experts: int,
        out: Tensor,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor | None,
        table: GroupTable | None,
    ) -> None:
        """Write out; see `fused_experts_in_parts`. Two launches for each part, and three for all.

        With biases, PyTorch copies those of down, which the last launch adds: one more launch for each part,
        and a few for a table. hidden_states as in `experts`.
        """
        permutation = compute_permutation(self._kernels, on, topk_ids, num_groups, num_sms, offsets, table)
        a = self._permuted(on, hidden_states, permutation)
        size = topk_ids.numel(), out.shape[1]
        rows, first = torch.empty(size, dtype=torch.bfloat16, device=topk_ids.device), 0
        added: tuple[Tensor, Tensor] | None = None
        for part in parts:
            end = first + part.num_groups
            if part.biases is not None:
                if added is None:  # read by the last launch, when another part may be where this one is
                    groups = topk_ids if table is None else table.groups_of(topk_ids)
                    added = groups, rows.new_empty((num_groups, size[1]))
                added[1][first:end].copy_(part.biases.down)
            self._multiply_part(on, a, permutation, first, part, rows, activation, num_experts, num_sms)
            first = end
        unpermute_rows(self._kernels, on, rows, permutation.inverse, topk_weights, out, added)

    def parallel_experts(
        self,
        on: OnStream,
        memory: RankMemory,
        tokens: RankTokens,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Weights,
        down: Weights,
        out: Tensor,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor | None,
        overlap: Overlap | None = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        """As `experts`, with the experts of all ranks: each rank of `memory` calls it with its own tokens.

        gate_up, down and biases.gate_up have this rank's experts, biases.down those of all. Five launches, or
        with `overlap` two more for each further part of the output; then num_sms is None. A token's sum on
        each rank is rounded to bf16, and those are added up in fp32 in the order of ranks; with
        `memory.exact` the bits are those of `experts`.
        """
        if tokens.num_tokens == 0:  # no rank makes a launch
            if offsets is not None:
                write_no_rows(offsets, topk_ids.device)
            return
        hidden_states = packed_rows(hidden_states)  # not right before they are read
        kernels, device, (num_groups, n, _) = self._kernels, on.device, down.data.shape
        permutation = permutation_of_ranks(
            kernels, on, memory, tokens, topk_ids, topk_weights, num_groups, num_sms, offsets
        )
        inverse = permutation.inverse
        a = dispatch_rows(kernels, on, memory, tokens, hidden_states, topk_ids, inverse, num_sms)
        num_experts = tokens.places.numel()
        gate_up_bias, bias = (None, None) if biases is None else biases
        activated = self._activate(
            on, a, permutation, gate_up, activation, num_experts, num_sms, gate_up_bias
        )
        rows = torch.empty((inverse.numel(), n), dtype=torch.bfloat16, device=inverse.device)

        def multiply(columns: range, num_sms: int | None) -> None:
            on = current_stream(device)
            self._down(on, activated, permutation, down, rows, num_experts, num_sms, columns)

        def combine(columns: range, num_sms: int | None) -> None:
            on = current_stream(device)
            combine_rows(
                kernels, on, memory, tokens, topk_ids, topk_weights, rows, inverse, out, num_sms, columns,
                bias,
            )  # fmt: skip

        if overlap is None:
            multiply(range(n), num_sms)
            combine(range(n), num_sms)
        else:
            overlap.run(n, multiply, combine)

    def parallel_experts_in_parts(
        self,
        on: OnStream,
        memory: RankMemory,
        tokens: RankTokens,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_groups: int,
        parts_of: Callable[[], PartsOfRank],
        out: Tensor,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor,
        down_bias: Tensor | None,
    ) -> None:
        """As `parallel_experts`, see `Backend.parallel_experts_in_parts`.

        Two launches for each part, and three for all, beside a few by PyTorch: once the parts are known, they
        write where rows are in the order of parts. So tokens are sent only then.
        """
        if tokens.num_tokens == 0:  # no rank makes a launch
            write_no_rows(offsets, topk_ids.device)
            return
        hidden_states = packed_rows(hidden_states)  # not right before they are read
        kernels, n, num_experts = self._kernels, out.shape[1], tokens.places.numel()
        permutation = permutation_of_ranks(
            kernels, on, memory, tokens, topk_ids, topk_weights, num_groups, num_sms, offsets
        )
        known = parts_of()
        inverse = known.rows(permutation.inverse, permutation.offsets)
        permutation = permutation._replace(inverse=inverse, offsets=known.offsets)
        a = dispatch_rows(kernels, on, memory, tokens, hidden_states, topk_ids, inverse, num_sms)
        rows, first = torch.empty((inverse.numel(), n), dtype=torch.bfloat16, device=inverse.device), 0
        for part in known.parts:
            self._multiply_part(on, a, permutation, first, part, rows, activation, num_experts, num_sms)
            first += part.num_groups
        combine_rows(
            kernels, on, memory, tokens, topk_ids, topk_weights, rows, inverse, out, num_sms, None, down_bias
        )

    def _multiply_part(
        self,
        on: OnStream,
        a: Quantized,
        permutation: DevicePermutation,
        first: int,
        part: ExpertPart,
        rows: Tensor,
        activation: Activation,
        num_experts: int,
        num_sms: int | None,
    ) -> None:
        """Both GEMMs of a part's groups, from group `first` on; num_experts: of all ranks, and parts."""
        own = permutation._replace(offsets=permutation.offsets[first : first + part.num_groups + 1])
        bias = None if part.biases is None else part.biases.gate_up
        activated = self._activate(on, a, own, part.gate_up, activation, num_experts, num_sms, bias)
        self._down(on, activated, own, part.down, rows, num_experts, num_sms, range(rows.shape[1]))

    def _rows(
        self,
        on: OnStream,
        a: Quantized,
        permutation: DevicePermutation,
        gate_up: Weights,
        down: Weights,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None,
        stages: Stages | None = None,
    ) -> Tensor:
        """Both GEMMs: the experts' rows bf16 [R, H] of permuted rows [R, H]."""
        num_experts, n = down.data.shape[:2]
        bias = None if biases is None else biases.gate_up
        activated = self._activate(on, a, permutation, gate_up, activation, num_experts, num_sms, bias)
        if stages is not None:
            stages.mark("gate_up")
        rows = torch.empty((len(a.data), n), dtype=torch.bfloat16, device=a.data.device)
        self._down(on, activated, permutation, down, rows, num_experts, num_sms, range(n))
        if stages is not None:
            stages.mark("down")
        return rows

    def _permuted(
        self, on: OnStream, hidden_states: HiddenStates, permutation: DevicePermutation
    ) -> Quantized:
        """Permuted rows e4m3 [T * top_k, H]."""
        if isinstance(hidden_states, Quantized):
            return permute_rows(self._kernels, on, hidden_states, permutation.inverse)
        return quantize_permute(self._kernels, on, hidden_states, permutation.inverse)

    def _activate(
        self,
        on: OnStream,
        a: Quantized,
        permutation: DevicePermutation,
        gate_up: Weights,
        activation: Activation,
        num_experts: int,
        num_sms: int | None,
        bias: Tensor | None = None,
    ) -> Quantized:
        """The first GEMM: permuted rows e4m3 [R, I]; num_experts: of all ranks, and parts."""
        first = Groups(permutation.offsets, ready=True, tile_counter=permutation.tile_counters[0])
        expected_m = a.data.shape[0] / num_experts
        return self._gemm.multiply_swiglu(on, a, gate_up, first, activation, expected_m, num_sms, bias)

    def _down(
        self,
        on: OnStream,
        activated: Quantized,
        permutation: DevicePermutation,
        down: Weights,
        rows: Tensor,
        num_experts: int,
        num_sms: int | None,
        columns: range,
    ) -> None:
        """The second GEMM: these columns of the permuted rows bf16 [R, H]; num_experts: of all ranks."""
        # One counter for all columns: their launches run one after another, and each leaves zeros.
        groups = Groups(permutation.offsets, ready=True, tile_counter=permutation.tile_counters[1])
        expected_m = rows.shape[0] / num_experts
        self._gemm.multiply(
            on, Layout.CONTIGUOUS, activated, down, groups, rows, expected_m, num_sms, columns
        )
