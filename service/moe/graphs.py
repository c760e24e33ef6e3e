"""Small steps as CUDA graphs: captured for a short list of token counts, padded inside, replayed."""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertd.layout import Layout
from expertd.service.moe.layer import MoELayer

TOKEN_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""What is captured; a step in between takes the next one. Larger steps take longer than their launches."""


class Step(NamedTuple):
    """What a replay left behind, until the next one: out fp32 [T, H], topk_ids int32 [T, k]."""

    out: Tensor
    topk_ids: Tensor


class GraphPool:
    """Memory that graphs share which never run at the same time; torch ends a pool with its last graph."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # graphs and streams that are garbage may not be destroyed during a capture
        # The default stream cannot be captured. One other for all, since memory is not shared across streams.
        self.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._steps: dict[tuple[int, int], _Tensors] = {}
        nothing = torch.zeros((), device=device)
        self._anchor = _captured(nothing.zero_, self.side_stream)

    @property
    def handle(self) -> Any:
        """For `capture_begin`."""
        return self._anchor.pool()

    def tensors(self, hidden_size: int, top_k: int, device: torch.device) -> "_Tensors":
        """What the graphs of layers with these sizes read and write."""
        sizes = hidden_size, top_k
        if sizes not in self._steps:
            self._steps[sizes] = _Tensors(*sizes, device)
        return self._steps[sizes]


class _Tensors:
    """A step's input and output, the longest there is. Rows past its tokens are padding, with no experts."""

    def __init__(self, hidden_size: int, top_k: int, device: torch.device) -> None:
        most = TOKEN_COUNTS[-1]
        self.hidden_states = torch.zeros(most, hidden_size, dtype=torch.bfloat16, device=device)
        self.topk_ids = torch.full((most, top_k), -1, dtype=torch.int32, device=device)
        self.topk_weights = torch.zeros(most, top_k, device=device)
        self.padding = torch.ones(most, 1, dtype=torch.bool, device=device)
        self.no_expert = torch.tensor(-1, dtype=torch.int32, device=device)
        self.out = torch.empty(most, hidden_size, device=device)
        self._num_tokens = 0
        torch.cuda.synchronize(device)  # other streams than this one will use them

    def fill(self, hidden_states: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None) -> None:
        """Bring a step of host tensors (pinned: without waiting) here."""
        num_tokens = hidden_states.shape[0]
        self.hidden_states[:num_tokens].copy_(hidden_states, non_blocking=True)
        if topk_ids is not None and topk_weights is not None:
            self.topk_ids[:num_tokens].copy_(topk_ids, non_blocking=True)
            self.topk_weights[:num_tokens].copy_(topk_weights, non_blocking=True)
        if num_tokens != self._num_tokens:
            self.padding[:num_tokens] = False
            self.padding[num_tokens:] = True
            self.topk_ids[num_tokens:] = -1
            self._num_tokens = num_tokens


class StepGraphs:
    """The graphs of one layer on one stream; for one thread, which reads a step's results before the next.

    Steps are bfloat16 hidden states with routing given for all tokens, or for none. Tokens of padding have no
    routed expert: they cost no rows but those of shared experts, and change nothing. All that `fits` lets in
    is captured when this is made. Layers whose steps never overlap may have one pool.

    stream is held, and with it a partition's green context: a handle alone might come to mean another one.
    """

    def __init__(
        self, layer: MoELayer, stream: torch.cuda.Stream, num_sms: int | None, pool: GraphPool
    ) -> None:
        self._layer = layer
        self._stream = stream
        self._num_sms = num_sms
        self._tensors = pool.tensors(layer.shape.hidden_size, layer.shape.top_k, stream.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        for count in reversed(TOKEN_COUNTS):  # the largest first, for the others find its memory in the pool
            if layer.layout(count) is Layout.CONTIGUOUS:
                for routed in (True, False):
                    self._graphs[count, routed] = self._capture(count, routed, pool)

    def fits(self, hidden_states: Tensor) -> bool:
        """Whether `run` takes a step with these on the current stream."""
        num_tokens = hidden_states.shape[0]
        return (
            hidden_states.dtype == torch.bfloat16
            and 0 < num_tokens <= TOKEN_COUNTS[-1]
            and (_padded(num_tokens), True) in self._graphs
            and torch.cuda.current_stream(self._stream.device) == self._stream
        )

    def run(self, hidden_states: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None) -> Step:
        """Replay a step of host tensors on the current stream."""
        num_tokens = hidden_states.shape[0]
        self._tensors.fill(hidden_states, topk_ids, topk_weights)
        self._graphs[_padded(num_tokens), topk_ids is None].replay()
        return Step(self._tensors.out[:num_tokens], self._tensors.topk_ids[:num_tokens])

    def release(self) -> None:
        """Let go of the graphs, of their part in the pool, and then of the stream; nothing fits any more."""
        self._graphs.clear()

    def _capture(self, count: int, routed: bool, pool: GraphPool) -> torch.cuda.CUDAGraph:
        self._step(count, routed)  # what is made at a first use cannot be made in a capture
        self._stream.synchronize()
        # A partition's own stream is captured, for the graph to stay inside.
        default = self._stream == torch.cuda.default_stream(self._stream.device)
        stream = pool.side_stream if default else self._stream
        return _captured(lambda: self._step(count, routed), stream, pool.handle)

    def _step(self, count: int, routed: bool) -> None:
        step = self._tensors
        hidden_states, topk_ids, topk_weights = (
            tensor[:count] for tensor in (step.hidden_states, step.topk_ids, step.topk_weights)
        )
        if routed:
            chosen, topk_weights = self._layer.route(hidden_states)
            torch.where(step.padding[:count], step.no_expert, chosen, out=topk_ids)
        self._layer(hidden_states, topk_ids, topk_weights, self._num_sms, step.out[:count])


def _captured(
    work: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # Other threads may go on using the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the capture may be void already
                torch.zeros((), device=stream.device)  # torch warns of a graph with nothing in it
            with suppress(RuntimeError):  # which would say only that the capture is void
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def _padded(num_tokens: int) -> int:
    return next(count for count in TOKEN_COUNTS if num_tokens <= count)
