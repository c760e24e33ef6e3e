"""Small steps as CUDA graphs, captured for a few token counts; a step is padded to the next one."""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertd.layout import Layout
from expertd.service.moe.layer import MoELayer

TOKEN_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The captured token counts. In larger steps, launch latency is hidden."""


class Step(NamedTuple):
    """A replay's result, valid until the next replay: out fp32 [T, H], topk_ids int32 [T, top_k]."""

    out: Tensor
    topk_ids: Tensor


class GraphPool:
    """Memory shared by graphs that never run at the same time; torch frees a pool with its last graph."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # destroying unreachable graphs and streams during a capture would invalidate it
        # The default stream cannot be captured. All graphs use one other: streams cannot share pool memory.
        self.side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._steps: dict[tuple[int, int], _Tensors] = {}
        nothing = torch.zeros((), device=device)
        self._anchor = _captured(nothing.zero_, self.side_stream)

    @property
    def handle(self) -> Any:
        """The pool argument of `capture_begin`."""
        return self._anchor.pool()

    def tensors(self, hidden_size: int, top_k: int, device: torch.device) -> "_Tensors":
        """The tensors that graphs of layers with these sizes read and write."""
        sizes = hidden_size, top_k
        if sizes not in self._steps:
            self._steps[sizes] = _Tensors(*sizes, device)
        return self._steps[sizes]


class _Tensors:
    """Input and output of the largest step. Rows past a step's tokens are padding, without experts."""

    def __init__(self, hidden_size: int, top_k: int, device: torch.device) -> None:
        most = TOKEN_COUNTS[-1]
        self.hidden_states = torch.zeros(most, hidden_size, dtype=torch.bfloat16, device=device)
        self.topk_ids = torch.full((most, top_k), -1, dtype=torch.int32, device=device)
        self.topk_weights = torch.zeros(most, top_k, device=device)
        self.padding = torch.ones(most, 1, dtype=torch.bool, device=device)
        self.no_expert = torch.tensor(-1, dtype=torch.int32, device=device)
        self.out = torch.empty(most, hidden_size, device=device)
        self._num_tokens = 0
        torch.cuda.synchronize(device)  # other streams will use them

    def fill(self, hidden_states: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None) -> None:
        """Copy a step's host tensors to these; copies from pinned memory are asynchronous."""
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
    """The graphs of one layer on one stream, for one thread that reads a step's results before the next step.

    A step is bfloat16 hidden states with routing for all tokens, or for none. Padding tokens have no routed
    expert: they cost only the shared experts' rows and do not change the result. The constructor captures
    every step that `fits` accepts. Layers whose steps never overlap can share a pool.

    Keeps the stream object, and with it a partition's green context: a bare handle could be reused.
    """

    def __init__(
        self, layer: MoELayer, stream: torch.cuda.Stream, num_sms: int | None, pool: GraphPool
    ) -> None:
        self._layer = layer
        self._stream = stream
        self._num_sms = num_sms
        self._tensors = pool.tensors(layer.shape.hidden_size, layer.shape.top_k, stream.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        for count in reversed(TOKEN_COUNTS):  # largest first, so that the others reuse its memory in the pool
            if layer.layout(count) is Layout.CONTIGUOUS:
                for routed in (True, False):
                    self._graphs[count, routed] = self._capture(count, routed, pool)

    def fits(self, hidden_states: Tensor) -> bool:
        """Whether `run` supports a step with these hidden states on the current stream."""
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
        """Free the graphs and their memory in the pool; `fits` then returns False."""
        self._graphs.clear()

    def _capture(self, count: int, routed: bool, pool: GraphPool) -> torch.cuda.CUDAGraph:
        self._step(count, routed)  # creates what is created on first use, which a capture does not allow
        self._stream.synchronize()
        # A partition's own stream is captured, so that the graph stays inside the partition.
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
        # Other threads may use the device during the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the capture may be invalid already
                torch.zeros((), device=stream.device)  # torch warns about an empty graph
            with suppress(RuntimeError):  # it would only say that the capture is invalid
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


def _padded(num_tokens: int) -> int:
    return next(count for count in TOKEN_COUNTS if num_tokens <= count)
