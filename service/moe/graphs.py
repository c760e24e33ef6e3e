"""Small steps as CUDA graphs: captured for a short list of token counts, padded inside, replayed."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from service.moe.layer import MoELayer

TOKEN_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""What is captured; a step in between takes the next one. Larger steps take longer than their launches."""


class Step(NamedTuple):
    """What a replay left behind, until the next one: out fp32 [T, H], tokens_per_expert int64 [E]."""

    out: Tensor
    tokens_per_expert: Tensor


class GraphPool:
    """Memory shared by graphs that never run at the same time; torch ends a pool with its last graph."""

    def __init__(self, device: torch.device) -> None:
        self._anchor, nothing = torch.cuda.CUDAGraph(), torch.zeros((), device=device)
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            self._anchor.capture_begin(capture_error_mode="thread_local")
            nothing.zero_()
            self._anchor.capture_end()

    @property
    def handle(self) -> Any:
        """For `capture_begin`."""
        return self._anchor.pool()


class StepGraphs:
    """The graphs of one layer on one device; for one thread, which reads a step's results before the next.

    Steps are bfloat16 hidden states with routing given for all tokens, or for none. Tokens of padding have no
    routed expert: they cost no rows but those of shared experts, and change nothing. A graph belongs to the
    stream and the SMs that it was captured with: after these have changed, it is captured anew when it is
    next needed. Layers whose steps never overlap may have one pool, in which their graphs keep what they need
    inside.
    """

    def __init__(self, layer: MoELayer, device: torch.device, pool: GraphPool) -> None:
        most, shape = TOKEN_COUNTS[-1], layer.shape
        self._layer = layer
        self._device = device
        self._pool = pool
        self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._hidden_states = torch.zeros(most, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self._topk_ids = torch.zeros(most, shape.top_k, dtype=torch.int32, device=device)
        self._topk_weights = torch.zeros(most, shape.top_k, device=device)
        self._padding = torch.zeros(most, 1, dtype=torch.bool, device=device)
        self._num_tokens = most
        self._out = torch.empty(most, shape.hidden_size, device=device)
        self._counts = torch.empty(shape.num_experts, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._captured_for: tuple[int, int | None] | None = None

    def fits(self, hidden_states: Tensor) -> bool:
        """Whether `run` takes a step with these."""
        num_tokens = hidden_states.shape[0]
        return (
            hidden_states.dtype == torch.bfloat16
            and 0 < num_tokens <= TOKEN_COUNTS[-1]
            and self._layer.layout(_padded(num_tokens)) == "contiguous"
        )

    def capture(self, num_sms: int | None) -> None:
        """Capture all that `fits` lets in, on the current stream."""
        for count in TOKEN_COUNTS:
            if self._layer.layout(count) == "contiguous":
                for routed in (True, False):
                    self._graph(count, routed, num_sms)

    def run(
        self, hidden_states: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None, num_sms: int | None
    ) -> Step:
        """Replay a step of host tensors (pinned: without waiting) on the current stream."""
        num_tokens = hidden_states.shape[0]
        graph = self._graph(_padded(num_tokens), topk_ids is None, num_sms)
        self._hidden_states[:num_tokens].copy_(hidden_states, non_blocking=True)
        if topk_ids is not None and topk_weights is not None:
            self._topk_ids[:num_tokens].copy_(topk_ids, non_blocking=True)
            self._topk_weights[:num_tokens].copy_(topk_weights, non_blocking=True)
        if num_tokens != self._num_tokens:
            self._padding[:num_tokens] = False
            self._padding[num_tokens:] = True
            self._num_tokens = num_tokens
        graph.replay()
        return Step(self._out[:num_tokens], self._counts)

    def _graph(self, count: int, routed: bool, num_sms: int | None) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.current_stream(self._device)
        if self._captured_for != (stream.cuda_stream, num_sms):
            self._graphs.clear()
            self._captured_for = (stream.cuda_stream, num_sms)
        graph = self._graphs.get((count, routed))
        if graph is None:
            self._step(count, routed, num_sms)  # what is made at a first use cannot be made in a capture
            stream.synchronize()
            # The default stream cannot be captured; a partition's must be, for the graph to stay inside.
            on = self._side_stream if stream == torch.cuda.default_stream(self._device) else stream
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(on):
                # Other threads may go on using the device meanwhile.
                graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
                try:
                    self._step(count, routed, num_sms)
                finally:
                    graph.capture_end()
            self._graphs[count, routed] = graph
        return graph

    def _step(self, count: int, routed: bool, num_sms: int | None) -> None:
        hidden_states = self._hidden_states[:count]
        topk_ids, topk_weights = self._topk_ids[:count], self._topk_weights[:count]
        if routed:
            topk_ids, topk_weights = self._layer.route(hidden_states)
        topk_ids = topk_ids.masked_fill(self._padding[:count], -1)
        self._layer(hidden_states, topk_ids, topk_weights, num_sms, self._out[:count])
        self._counts.copy_(tokens_per_expert(topk_ids, self._layer.shape.num_experts))


def tokens_per_expert(topk_ids: Tensor, num_experts: int) -> Tensor:
    """int64 [E], how often each comes in topk_ids int32 [T, k] (-1: none), without a host sync."""
    ids = topk_ids.flatten().to(torch.int64) + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[1:]  # bincount syncs


def _padded(num_tokens: int) -> int:
    return next(count for count in TOKEN_COUNTS if num_tokens <= count)
