"""The interface every backend of grouped GEMMs and experts implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from expertd.backends import Capabilities
from expertd.kernels.ops.activation import SILU, Activation, swiglu
from expertd.kernels.ops.biases import ExpertBiases, add_biases
from expertd.kernels.ops.checks import check_router
from expertd.kernels.ops.four_bits import W, Weights, mapped, tensors_of
from expertd.kernels.ops.parts import ExpertPart, GroupTable, PartsOfRank
from expertd.kernels.ops.permute import compute_permutation, permute_rows
from expertd.kernels.ops.quantize import HiddenStates, Quantized, quantize_rows
from expertd.kernels.ops.router import choose_experts
from expertd.kernels.ops.unpermute import unpermute_rows
from expertd.kernels.stages import Stages
from expertd.limits import SCALE_BLOCK
from expertd.routing import Routing

if TYPE_CHECKING:
    from expertd.kernels.device_calls import CallGraph, CallTable
    from expertd.kernels.overlap import Overlap
    from expertd.kernels.partitions import SMPartitions
    from expertd.kernels.rank_memory import RankMemory, RankTokens
    from expertd.kernels.request_table import RequestTable

Progress = Callable[[int, int, str], None]
"""Called with (steps done, total steps, name of the step just done)."""


class Backend(ABC):
    """Computes grouped GEMMs and experts.

    Arguments arrive checked (kernels/checks.py, kernels/expert_checks.py) and non-empty, with weights of one
    of `Capabilities.weight_formats`, but for methods that raise ValueError themselves.
    """

    name: ClassVar[str]
    capabilities: Capabilities = Capabilities()

    @property
    def device(self) -> torch.device:
        """Where a server keeps the tensors of its layers; the current GPU if it needs one."""
        kind = self.capabilities.device_type or "cpu"
        if not self.capabilities.on_gpu:
            return torch.device(kind)
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def partitions(self) -> "SMPartitions | None":
        """Partitions of the device's SMs, whose counts become `num_sms`; None if it cannot be partitioned."""
        if not self.capabilities.partitions:
            return None
        from expertd.kernels.partitions import partitions_of

        return partitions_of(self.device.index)

    def warm_up(self, progress: Progress | None = None) -> None:  # noqa: B027  (a backend may have nothing to do)
        """Do everything that a first call would otherwise do lazily, above all compilation."""

    def packed(self, weights: W, *, pairs: bool = False) -> W:
        """The same weights [G, N, K], only for calls of this backend, which may free the copy given.

        pairs  whether they are the gate_up of experts, else weights of any other GEMM

        Its data may be on the meta device: then it can be neither read nor changed. Raises ValueError for
        weights that the backend cannot pack.
        """
        return weights

    def prepare_weights(self, group: Weights, *, pairs: bool = False) -> object:
        """What is kept of a group that will have these weights [N, K]; for `weights_changed`."""
        return None

    def weights_changed(  # noqa: B027
        self, weights: Weights, groups: Sequence[int], prepared: Sequence[object]
    ) -> None:
        """These groups were overwritten, and no others. `prepared`: of each, by `prepare_weights`.

        Changes in place raise torch's version counters, and are noticed without this call. Changes through
        `.data` or a pointer are not.
        """

    def room(self, weights: W, device: torch.device, *, pairs: bool = False) -> tuple[W, tuple[Tensor, ...]]:
        """Room for weights of this size: what calls take, and the tensors [G, ..] from which they read these.

        weights  [G, N, K] on the meta device, for their shapes and dtypes
        device   where the room is; it is filled with zeros
        pairs    as in `packed`

        The owner copies to a group's place in each tensor what `contents` has for its weights, also by a
        pointer, and between calls of a CUDA graph. A backend that packs may give no data but in the tensors.
        """
        made = mapped(weights, lambda tensor: _zeros(tensor, device))
        return made, tensors_of(made)

    def contents(self, weights: Weights, *, pairs: bool = False, first: int = 0) -> tuple[Tensor, ...]:
        """What the tensors of `room` have of weights [G, N, K].

        first  the number of the first group, for errors

        Raises ValueError for weights that the backend cannot pack.
        """
        return tensors_of(weights)

    @abstractmethod
    def contiguous(self, a: Quantized, b: Weights, offsets: Tensor, out: Tensor, num_sms: int | None) -> None:
        """Write out [M, N]: rows offsets[g]:offsets[g+1] of a [M, K] times b[g] [N, K] transposed."""

    @abstractmethod
    def masked(
        self,
        a: Quantized,
        b: Weights,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write the first counts[g] rows of each out[g] [max_m, N], and nothing past them."""

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
        """See `fused_experts`; by default in steps."""
        operands = hidden_states, topk_ids, topk_weights, gate_up, down, out
        self.experts_in_steps(*operands, activation, num_sms, offsets, biases, stages)

    @torch.no_grad()
    def experts_in_steps(
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
        """See `fused_experts`: permutes rows by group, calls `ffn` and sums the results."""
        permutation = compute_permutation(topk_ids, down.data.shape[0])
        if offsets is not None:
            offsets.copy_(permutation.offsets, non_blocking=True)
        if stages is not None:
            stages.mark("sort")
        rows = self.ffn(
            hidden_states,
            permutation.token_ids,
            gate_up,
            down,
            permutation.offsets,
            activation,
            num_sms,
            biases,
        )
        if stages is not None:
            stages.mark("ffn")
        unpermute_rows(rows, permutation.inverse, topk_weights, permutation.absent, out)
        if stages is not None:
            stages.mark("combine")

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
        """See `fused_experts_in_parts`. This default waits for the device."""
        permutation = compute_permutation(topk_ids if table is None else table.find(topk_ids), num_groups)
        if offsets is not None:
            offsets.copy_(permutation.offsets, non_blocking=True)
        rows = torch.empty((topk_ids.numel(), out.shape[1]), dtype=torch.bfloat16, device=out.device)
        bounds, first = permutation.offsets.tolist(), 0
        for part in parts:
            groups = slice(first, first + part.num_groups + 1)
            own = slice(bounds[first], bounds[groups.stop - 1])
            if own.stop > own.start:
                tokens, ends = permutation.token_ids[own], permutation.offsets[groups] - own.start
                rows[own] = self.ffn(
                    hidden_states, tokens, *part.matrices, ends, activation, num_sms, part.biases
                )
            first += part.num_groups
        unpermute_rows(rows, permutation.inverse, topk_weights, permutation.absent, out)

    def ffn(
        self,
        hidden_states: HiddenStates,
        tokens: Tensor,
        gate_up: Weights,
        down: Weights,
        offsets: Tensor,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        """bf16 [R, H]: the FFN of each row's group on hidden_states[tokens[r]]; a step of `experts`.

        tokens int64 [R], sorted by group; offsets int32 [G+1]. Rows from offsets[G] on are undefined. This
        default rounds activations to FP8 before each of two contiguous GEMMs.
        """
        if isinstance(hidden_states, Tensor):
            missing = -hidden_states.shape[1] % SCALE_BLOCK
            if missing:  # zeros change nothing
                hidden_states = torch.nn.functional.pad(hidden_states, (0, missing))
                if not gate_up.data.is_meta:  # those of `packed` have such columns
                    gate_up = _with_columns(gate_up, missing)
            hidden_states = quantize_rows(hidden_states)  # once per token, not once per row
        a = permute_rows(hidden_states, tokens)
        rows = self._multiply(a, gate_up, offsets, num_sms)
        if biases is not None:
            rows = add_biases(rows, biases.gate_up, offsets)
        rows = self._multiply(quantize_rows(swiglu(rows, activation)), down, offsets, num_sms)
        return rows if biases is None else add_biases(rows, biases.down, offsets)

    def parallel_experts(
        self,
        memory: "RankMemory",
        tokens: "RankTokens",
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        gate_up: Weights,
        down: Weights,
        out: Tensor,
        num_sms: int | None,
        offsets: Tensor | None = None,
        overlap: "Overlap | None" = None,
        activation: Activation = SILU,
        biases: ExpertBiases | None = None,
    ) -> None:
        """As `experts`, with those of all ranks of `memory`, each of which calls it together.

        hidden_states  [t, H], this rank's tokens, also Quantized; t may be 0, and as `tokens` says
        topk_ids       int32 [t, top_k]: experts of all ranks, as in `tokens.places`; others name none
        gate_up, down  this rank's experts
        out            [t, H]: each rank's sum rounded to bf16, and these added in fp32 in the order of ranks,
                       or as by `experts` with `memory.exact`
        num_sms        the same on all ranks, at least 2
        offsets        int32 [G + 1] over this rank's experts, of all ranks' tokens
        overlap        lanes for parts of the output that are combined while others are multiplied, with the
                       same bits; then num_sms is None. None: one thing after another
        biases         gate_up [G, 2I] of this rank's experts; down [E, H] of all ranks', which are added in
                       fp32 to the sums, or as by `experts` with `memory.exact`

        Nothing waits on the host. On the device a rank waits for the others up to the memory's timeout, and
        then sets `memory.late_rank`.
        """
        raise RuntimeError(f"backend: expected one whose ranks share a GPU's memory, got {self.name!r}")

    def parallel_experts_in_parts(
        self,
        memory: "RankMemory",
        tokens: "RankTokens",
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
        """As `parallel_experts`, with weights of this rank that come one part after another, and its bits.

        num_groups  this rank's experts
        parts_of    says what comes. Asked once the launch that writes `offsets` is on the stream: it may wait
                    for that, and so know the experts that have rows. Parts as in `fused_experts_in_parts`,
                    checked when they come. Not asked if no rank has tokens
        offsets     as by `parallel_experts`, in memory that the host can read
        down_bias   bf16 [E, H] of all ranks' experts; None: there is none. Parts then have no biases
        """
        raise RuntimeError(f"backend: expected one whose ranks share a GPU's memory, got {self.name!r}")

    def unpermute(self, rows: Tensor, inverse: Tensor, topk_weights: Tensor, out: Tensor) -> None:
        """Write out [T, H]: the fp32 sum over s of topk_weights[t, s] * rows[inverse[t, s]], in this order.

        rows          [R, H] of any float dtype, contiguous; bf16 rows give the bits of `experts`, whose last
                      step this is
        inverse       int32 [T, C], contiguous; -1: nothing to add, whatever the weight is
        topk_weights  fp32 [T, C], contiguous

        The preceding launch must not write inverse and topk_weights.
        """
        if rows.shape[0] == 0:
            out.zero_()
            return
        unpermute_rows(rows, inverse.clamp(min=0), topk_weights, inverse < 0, out)

    def choose_experts(
        self, logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """(topk_ids int32 [T, top_k], topk_weights fp32 [T, top_k]); see `choose_experts`.

        Raises ValueError (name, expected, got). Rules that are not `in_kernels` run in PyTorch.
        """
        return choose_experts(logits, bias, top_k, routing)

    def route(
        self,
        hidden_states: Tensor,
        router: Tensor,
        bias: Tensor | None,
        top_k: int,
        routing: Routing,
        end_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(topk_ids int32 [T, top_k], topk_weights fp32 [T, top_k]) of hidden_states [T, H] by router [E, H].

        Logits are summed in fp32; the rest is `choose_experts`. router and bias belong to a layer: the
        preceding launch must not write them. end_token is an int32 scalar that the device can read: tokens
        from it on are padding, and get expert -1; None: there is none.

        Raises ValueError (name, expected, got).
        """
        check_router(hidden_states, router, bias, top_k, routing)
        logits = hidden_states.to(torch.float32) @ router.to(torch.float32).t()
        return without_padding(*self.choose_experts(logits, bias, top_k, routing), end_token)

    def route_in_steps(
        self,
        hidden_states: Tensor,
        router: Tensor,
        bias: Tensor | None,
        top_k: int,
        routing: Routing,
        end_token: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `route`, in PyTorch, and for every rule, also those that are not `in_kernels`."""
        check_router(hidden_states, router, bias, top_k, routing)
        logits = hidden_states.to(torch.float32) @ router.to(torch.float32).t()
        return without_padding(*choose_experts(logits, bias, top_k, routing), end_token)

    def gather_rows(
        self,
        table: "RequestTable",
        hidden_states: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int = 2**31 - 1,
    ) -> None:
        """Copy the rows of all requests in `table` to hidden_states bf16 [T, H], one after another.

        With topk_ids int32 [T, top_k] and topk_weights fp32 [T, top_k], also their routing; top_k at most
        256, and ids outside 0 to num_experts - 1 become -1. Tokens past the last request are padding: they
        keep their rows and get expert -1. Only with `Capabilities.request_table`.
        """
        raise RuntimeError(f"backend: expected one with request tables, got {self.name!r}")

    def scatter_rows(self, rows: Tensor, table: "RequestTable") -> None:
        """Copy rows fp32 [T, H] to the requests in `table`, each in its datatype. As `gather_rows`."""
        raise RuntimeError(f"backend: expected one with request tables, got {self.name!r}")

    def call_experts(
        self,
        calls: "CallTable",
        num_tokens: int,
        top_k: int,
        gate_up: Weights,
        down: Weights,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> None:
        """A step of device calls of at most `num_tokens`: `experts` of their rows and routing, and answers.

        num_sms is not 1. Only with `Capabilities.device_calls`.
        """
        raise RuntimeError(f"backend: expected one with device calls, got {self.name!r}")

    def answer_calls(self, rows: Tensor, calls: "CallTable") -> None:
        """Write rows fp32 [T, H] to the callers of a step, in bf16, and answer them. As `call_graph`."""
        raise RuntimeError(f"backend: expected one with device calls, got {self.name!r}")

    def call_graph(
        self, calls: "CallTable", sizes: Sequence[int], graphs: Sequence[Sequence[int]]
    ) -> "CallGraph":
        """A graph that answers calls by `graphs`, one for each layer and size; see `CallGraph`.

        Each ends with `call_experts` or `answer_calls`. Only with `Capabilities.device_calls`.
        """
        raise RuntimeError(f"backend: expected one with device calls, got {self.name!r}")

    def _multiply(self, a: Quantized, b: Weights, offsets: Tensor, num_sms: int | None) -> Tensor:
        size = (a.data.shape[0], b.data.shape[1])
        out = torch.empty(size, dtype=torch.bfloat16, device=a.data.device)
        self.contiguous(a, b, offsets, out, num_sms)
        return out


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(like, device=device)
    made.view(torch.uint8).zero_()  # also of dtypes that PyTorch cannot fill
    return made


def _with_columns(weights: Weights, count: int) -> Weights:
    """Weights [..., K + count]: these, then columns of zeros."""

    def padded(tensor: Tensor, count: int) -> Tensor:
        return torch.nn.functional.pad(tensor.view(torch.uint8), (0, count)).view(tensor.dtype)

    if isinstance(weights, Quantized):
        return weights._replace(data=padded(weights.data, count))
    scales = padded(weights.scales, count // weights.group_size * weights.scales.itemsize)
    return weights._replace(data=padded(weights.data, count // 2), scales=scales)


def without_padding(
    topk_ids: Tensor, topk_weights: Tensor, end_token: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The routing, with expert -1 for tokens from `end_token` on; see `Backend.route`."""
    if end_token is None:
        return topk_ids, topk_weights
    token = torch.arange(len(topk_ids), device=topk_ids.device)[:, None]
    return topk_ids.masked_fill(token >= end_token.to(topk_ids.device, non_blocking=True), -1), topk_weights
