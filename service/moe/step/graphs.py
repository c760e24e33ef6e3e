"""Small steps as CUDA graphs, captured for a few token counts; a step is padded to the next one.

A graph's first launch reads the requests' rows where they lie, in pinned memory or on a GPU, and its last one
writes the outputs where they are wanted: for the host, a step is one launch and no copies.

The graph of a layer with a store of experts looks for them in slots. If some are not there, which the host
learns at its end, they are fetched, and it runs once more.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from expertd.kernels.request_table import MAX_GIVEN_TOP_K, MAX_REQUESTS, RequestRows, RequestTable
from expertd.layout import Layout
from expertd.limits import MAX_GROUPS
from expertd.service.device import Device, Event, Graph, GraphPool, Stream
from expertd.service.memory import Buffer, Span, host_view, is_on_gpu
from expertd.service.moe.base import Layer
from expertd.service.moe.expert_store import ExpertStore
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import STORE_TOKEN_COUNTS, TOKEN_COUNTS
from expertd.service.moe.request import LayerRequest, OutputMemory, StepPlan, StepResult
from expertd.service.moe.step.batch import FLOATS, Batch, count_named, empty_slots
from expertd.service.moe.step.running import RunningStep
from expertd.service.moe.step.staging import ALIGNMENT, PinnedRows, Staging, is_aligned
from expertd.service.moe.step.step_counts import HostCopies


class _Tensors:
    """Memory of the largest step, and pinned memory, to which requests are copied that the GPU cannot read in
    place. Rows past a step's tokens are padding, without experts.
    """

    def __init__(self, hidden_size: int, top_k: int, device: Device, copies: HostCopies) -> None:
        where, max_tokens = device.tensors, TOKEN_COUNTS[-1]
        self.table = RequestTable()
        self.hidden_states = torch.zeros(max_tokens, hidden_size, dtype=torch.bfloat16, device=where)
        self.topk_ids = torch.full((max_tokens, top_k), -1, dtype=torch.int32, device=where)
        self.topk_weights = torch.zeros(max_tokens, top_k, dtype=torch.float32, device=where)
        self.out = torch.empty(max_tokens, hidden_size, dtype=torch.float32, device=where)
        self.offsets = device.pinned(MAX_GROUPS + 2, dtype=torch.int32).zero_()  # see `count_named`
        self.host_hidden_states = PinnedRows(max_tokens, hidden_size * 2, device, copies)
        self.host_topk_ids = PinnedRows(max_tokens, top_k * 8, device, copies)
        self.host_topk_weights = PinnedRows(max_tokens, top_k * 4, device, copies)
        self.host_out = PinnedRows(max_tokens, hidden_size * 4, device, copies)
        self.host_offsets = self.offsets.numpy()
        self.are_free = True  # for the host to write: no step uses them
        self.ended = device.new_event()
        """The end of the step that uses them: on its stream, a later one may follow."""
        device.synchronize()  # other streams will use them

    def launch(
        self, layer: Layer, num_sms: int | None, count: int, routed: bool, in_slots: bool = False
    ) -> None:
        """A step of `count` tokens; routed: the layer routes all of them, else their requests do.

        in_slots  for a layer with a store: the device looks for the experts
        """
        backend, shape = layer.backend, layer.shape
        hidden_states, topk_ids, topk_weights, out = (
            tensor[:count] for tensor in (self.hidden_states, self.topk_ids, self.topk_weights, self.out)
        )
        layer.set_equal_token_counts(count)
        if routed:
            backend.gather_rows(self.table, hidden_states, None, None)
            topk_ids, topk_weights = layer.route(hidden_states, self.table.end_token)
        else:
            backend.gather_rows(self.table, hidden_states, topk_ids, topk_weights, shape.num_experts)
            count_named(shape, topk_ids, self.offsets)
        given = hidden_states, topk_ids, topk_weights, num_sms, out
        if in_slots:
            assert isinstance(layer, MoELayer)
            layer.in_slots(*given, self.offsets)
        else:
            layer(*given, self.offsets[: shape.num_groups + 1])
        backend.scatter_rows(out, self.table)


class StepGraphs:
    """The graphs of one layer on one stream. They share memory with those of other layers of the same sizes:
    until the step of one has ended, nothing fits.

    A step is bfloat16 hidden states with routing for all tokens, or for none. Padding tokens have no routed
    experts, and shared experts compute them.
    """

    def __init__(
        self,
        layer: Layer,
        stream: Stream,
        num_sms: int | None,
        pool: GraphPool,
        staging: Staging,
    ) -> None:
        self._layer = layer
        self._store = layer.store if isinstance(layer, MoELayer) else None
        self._counts = TOKEN_COUNTS if self._store is None else STORE_TOKEN_COUNTS
        self._stream = stream
        self._num_sms = num_sms
        self._staging, self._device = staging, staging.device
        sizes = layer.shape.hidden_size, layer.shape.top_k
        self._tensors = staging.shared(sizes, lambda: _Tensors(*sizes, staging.device, staging.host_copies))
        self._owner = object()  # of plans: identifies the captured graphs
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._tensors.table.write([])  # no requests: it still names those of another layer's last step
        for count in reversed(self._counts):  # largest first, so that the others reuse its memory in the pool
            if layer.layout(count) is Layout.CONTIGUOUS:
                for routed in (True, False) if layer.shape.top_k <= MAX_GIVEN_TOP_K else (True,):
                    self._graphs[count, routed] = self._capture(count, routed, pool)

    def fits(self, batch: Batch) -> bool:
        """Whether `begin` supports this step on the current stream."""
        return (
            batch.num_tokens <= self._counts[-1]
            and self._tensors.are_free
            and len(batch.requests) <= MAX_REQUESTS
            and all(map(_fits, batch.requests))
            and len(batch.with_routing) in (0, len(batch.requests))
            and self._device.is_current(self._stream)
            and self.has(padded_tokens(batch.num_tokens, self._counts), not batch.with_routing)
        )

    def has(self, padded: int, routed: bool) -> bool:
        """Whether there is a graph for `padded` tokens; routed: the layer routes them."""
        return (padded, routed) in self._graphs

    def begin(self, batch: Batch, padded: int | None = None, routed: bool | None = None) -> RunningStep:
        """Replay a step on the current stream.

        padded, routed  the graph, which ranks choose together: its tokens, and whether the layer routes
        """
        began = time.perf_counter()
        tensors = self._tensors
        tensors.table.write(
            [self._rows(request, part) for request, part in zip(batch.requests, batch.parts, strict=True)]
        )
        key = (
            padded or padded_tokens(batch.num_tokens, self._counts),
            not batch.with_routing if routed is None else routed,
        )
        if len(batch.requests) == 1 and _stays_in_place(batch.requests[0]):
            batch.requests[0].plan = StepPlan(self._owner, None, (key, tensors.table.only_request()))
        return self._replay(key, batch.requests, partial(self._outputs, batch), began)

    def again(self, request: LayerRequest) -> RunningStep | None:
        """As `begin` for a request alone that was alone before, in less time; None: not possible."""
        planned = request.planned(self._owner)
        if planned is None:
            return None
        if not self._device.is_current(self._stream) or not self._tensors.are_free:
            return None
        began = time.perf_counter()
        key, table = planned
        self._tensors.table.restore(table)
        assert request.output is not None
        outputs: list[OutputMemory] = [request.output]
        return self._replay(key, (request,), lambda: outputs, began)

    def _replay(
        self,
        key: tuple[int, bool],
        requests: Sequence[LayerRequest],
        outputs: Callable[[], list[OutputMemory]],
        began: float,
    ) -> RunningStep:
        self._tensors.are_free = False
        store, in_slots = self._store, None
        try:
            if store is not None:
                experts = store.begin_in_slots(self._stream)
                in_slots = _InSlots(
                    store, experts, self._tensors.ended, partial(self._complete, key, requests)
                )
            self._graphs[key].replay()
            if store is None:
                self._staging.signal(requests, self._stream)
            self._tensors.ended.record(self._stream)
        except BaseException:
            self._device.synchronize()  # it may have begun
            self._tensors.are_free = True
            raise
        num_tokens = sum(request.num_tokens for request in requests)
        return RunningStep(
            in_slots or self._tensors.ended,
            self._tensors.host_offsets,
            partial(self._ended, began),
            partial(self._result, num_tokens, key[1], outputs, in_slots),
        )

    def _complete(self, key: tuple[int, bool], requests: Sequence[LayerRequest], step: "_InSlots") -> None:
        """See that a step which has ended had all of its experts; else run it again."""
        tensors, stream = self._tensors, self._stream
        try:
            if step.store.lacks_experts:
                with torch.inference_mode(), self._device.steps_on(stream):
                    if step.store.fetch_seen(key[0], stream):
                        step.experts = step.store.begin_in_slots(stream)
                        self._graphs[key].replay()
                    else:
                        step.experts = None
                        tensors.launch(self._layer, self._num_sms, *key)
                    tensors.ended.record(stream)
                step.is_counted = True
                tensors.ended.synchronize()
            self._staging.signal(requests, stream)
        except BaseException:
            self._device.synchronize()  # it may have begun
            raise

    def _ended(self, began: float) -> float:
        """The seconds that the step took."""
        self._tensors.are_free = True
        return self._staging.seconds_since(began)

    def _rows(self, request: LayerRequest, part: slice) -> RequestRows:
        """Where the request's rows are, or are copied to."""
        tensors, dtype = self._tensors, FLOATS[request.output_datatype]
        out = tensors.host_out.address(part.start)
        if request.output is not None and is_aligned(request.output):
            out = request.output.address
        hidden_states = tensors.host_hidden_states.hold(request.hidden_states, part.start, ALIGNMENT)
        if request.topk_ids is None or request.topk_weights is None:
            return RequestRows(request.num_tokens, hidden_states, out, dtype)
        wide = request.topk_ids_datatype == "INT64"
        return RequestRows(
            request.num_tokens, hidden_states, out, dtype,
            tensors.host_topk_ids.hold(request.topk_ids, part.start, 8 if wide else 4),
            tensors.host_topk_weights.hold(request.topk_weights, part.start, 4),
            wide,
        )  # fmt: skip

    def _result(
        self,
        num_tokens: int,
        routed: bool,
        outputs: Callable[[], list[OutputMemory]],
        in_slots: "_InSlots | None",
        offsets: NDArray[np.int32],
        seconds: float,
    ) -> StepResult:
        count_tokens = self._layer.tokens_per_expert
        return StepResult(
            outputs=outputs(),
            layout=Layout.CONTIGUOUS,
            num_tokens=num_tokens,
            count_tokens=partial(count_tokens, offsets)
            if in_slots is None
            else in_slots.counter(count_tokens, offsets),
            compute_seconds=seconds,
            empty_slots=empty_slots(self._layer.shape, num_tokens, routed, offsets),
        )

    def _outputs(self, batch: Batch) -> list[OutputMemory]:
        return [
            self._output(request, part) for request, part in zip(batch.requests, batch.parts, strict=True)
        ]

    def _output(self, request: LayerRequest, part: slice) -> OutputMemory:
        if request.output is not None and is_aligned(request.output):
            return request.output
        size = request.num_tokens * self._layer.shape.hidden_size * FLOATS[request.output_datatype].itemsize
        rows = self._tensors.host_out.rows(part.start, size)
        copies, output = self._staging.host_copies, request.output
        if output is None:
            return copies.timed(lambda: bytes(rows), size)
        copies.copy(host_view(output), rows)
        return output

    def release(self) -> None:
        """Free the graphs and their memory in the pool; `fits` then returns False."""
        self._owner = object()
        self._graphs.clear()

    def _capture(self, count: int, routed: bool, pool: GraphPool) -> Graph:
        work = partial(
            self._tensors.launch, self._layer, self._num_sms, count, routed, self._store is not None
        )
        work()  # creates what is created on first use, which a capture does not allow
        self._stream.synchronize()
        return pool.capture(work, self._stream)


class _InSlots:
    """The progress of a step whose experts are looked for in slots.

    experts     in slots when it found all of them; None: it ran without the table of slots
    is_counted  the store has counted its experts
    """

    def __init__(
        self,
        store: ExpertStore,
        experts: NDArray[np.intp],
        ended: Event,
        complete: "Callable[[_InSlots], None]",
    ) -> None:
        self.store, self.is_counted = store, False
        self.experts: NDArray[np.intp] | None = experts
        self._ended, self._complete = ended, complete

    def query(self) -> bool:
        """Whether it has run once: `synchronize` may yet run it again."""
        return self._ended.query()

    def synchronize(self) -> None:
        """Wait until it has had all of its experts."""
        self._ended.synchronize()
        self._complete(self)

    def counter(
        self, count_tokens: Callable[[NDArray[np.int32]], NDArray[np.int32]], offsets: NDArray[np.int32]
    ) -> Callable[[], NDArray[np.int32]]:
        """What counts the tokens of experts; notes what the step used. `offsets`: that it wrote."""
        experts = self.experts
        if experts is None:
            return partial(count_tokens, offsets)
        if not self.is_counted:
            self.is_counted = True
            self.store.note_in_slots(offsets, experts)
        return lambda: count_tokens(self.store.offsets_of_experts(offsets, experts))


def _fits(request: LayerRequest) -> bool:
    """Whether kernels can read and write the request's rows, in place or in a copy on the host."""
    aligned = all(
        not is_on_gpu(memory) or is_aligned(memory) for memory in (request.hidden_states, request.output)
    )
    routing = all(
        not is_on_gpu(memory) or is_aligned(memory, 8) for memory in (request.topk_ids, request.topk_weights)
    )
    return request.datatype == "BF16" and aligned and routing


def _stays_in_place(request: LayerRequest) -> bool:
    """Whether nothing of a request that fits is copied on the host."""
    memories: list[Buffer | Span | None] = [request.hidden_states, request.output]
    if request.topk_ids is not None:
        memories += [request.topk_ids, request.topk_weights]
    return all(isinstance(memory, Span) and is_aligned(memory) for memory in memories)


def padded_tokens(num_tokens: int, counts: Sequence[int] = TOKEN_COUNTS) -> int:
    """The tokens of the smallest graph with room for `num_tokens`."""
    return next(count for count in counts if num_tokens <= count)
