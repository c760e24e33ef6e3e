"""Steps of any size on a GPU, launch by launch; `graphs` has small ones.

A request's rows are copied from where they lie straight to the GPU, and its output straight to where it is
wanted, on streams of their own: meanwhile the GPU computes the step before. A single request whose rows lie
in this GPU's memory is not copied at all.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.kernels import HiddenStates, Quantized, as_floats, values_of
from expertd.service.device import Copies, Device, Graph, Stream
from expertd.service.memory import HIDDEN, Buffer, Span, host_view, is_on_gpu
from expertd.service.moe.base import Layer
from expertd.service.moe.request import FP8, LayerRequest, OutputMemory, StepPlan, StepResult, row_bytes
from expertd.service.moe.step.batch import FLOATS, Batch, count_named, empty_slots, joined, rows_of
from expertd.service.moe.step.recurring import RecurringSteps
from expertd.service.moe.step.running import RunningStep
from expertd.service.moe.step.stages import GpuStages
from expertd.service.moe.step.staging import ALIGNMENT, Staging, StepBuffers, address_of, is_aligned
from expertd.service.moe.step.step_counts import Launches

INTEGERS = {"INT32": torch.int32, "INT64": torch.int64}
_Routing = tuple[Tensor, Tensor]


class _Repeat(NamedTuple):
    """What the next step of the same request repeats if it has the same buffers, and nothing has changed."""

    graph: Graph
    valid: tuple[int, int, int]
    batch: Batch
    stream: Stream
    copies_in: Copies
    copies_out: Copies
    outputs: list[OutputMemory | Tensor]


class DeviceSteps:
    """Begins the steps of one layer, and counts them in `launches`."""

    def __init__(self, layer: Layer, device: Device, staging: Staging, launches: Launches) -> None:
        self._launches = launches
        self._layer = layer
        self._staging, self._device = staging, device
        self._recurring = RecurringSteps()
        self._owner = object()  # of plans

    def release_graphs(self) -> None:
        """Free the graphs of steps that recur."""
        self._recurring.clear()

    def begin(
        self, batch: Batch, stream: Stream, num_sms: int | None, stages: GpuStages | None = None
    ) -> RunningStep:
        """Enqueue a step whose launches go to `stream`, the current one.

        stages  notified of the step's stages, none of which is a graph's; only if the layer is a MoELayer
        """
        began = time.perf_counter()
        buffers = self._staging.take()
        try:
            outputs = self._enqueue(batch, buffers, stream, num_sms, stages)
        except BaseException:
            self._abandon(buffers)
            raise
        return self._running(batch, buffers, outputs, began)

    def again(self, request: LayerRequest) -> RunningStep | None:
        """As `begin` for a request alone that recurs, in less time; None: not possible."""
        repeats = request.planned(self._owner)
        if repeats is None:
            return None
        began = time.perf_counter()
        buffers = self._staging.take()
        plan: _Repeat | None = repeats.get(buffers)
        if plan is None or plan.valid != self._valid(buffers) or not self._device.is_current(plan.stream):
            self._staging.give_back(buffers)
            return None
        try:
            self._copy_in(buffers, plan.copies_in, plan.stream)
            plan.graph.replay()
            self._launches.recurring += 1
            self._copy_out(buffers, plan.copies_out, plan.stream, plan.batch)
        except BaseException:
            self._abandon(buffers)
            raise
        return self._running(plan.batch, buffers, plan.outputs, began)

    def _running(
        self, batch: Batch, buffers: StepBuffers, outputs: list[OutputMemory | Tensor], began: float
    ) -> RunningStep:
        return RunningStep(
            buffers.copied_out,
            buffers.host_offsets,
            partial(self._ended, buffers, began),
            partial(self._result, batch, outputs),
        )

    def _abandon(self, buffers: StepBuffers) -> None:
        try:
            self._device.synchronize()  # copies to and from the buffers may be running
        finally:
            self._staging.give_back(buffers)

    def _enqueue(
        self,
        batch: Batch,
        buffers: StepBuffers,
        stream: Stream,
        num_sms: int | None,
        stages: GpuStages | None,
    ) -> list[OutputMemory | Tensor]:
        """Start everything; each request's own output, or a pinned tensor of its bytes."""
        copies_in, copies_out = Copies(), Copies()
        parts = self._hidden_states(batch, buffers, copies_in)
        given = self._given(batch, buffers, copies_in) if batch.with_routing else None
        self._copy_in(buffers, copies_in, stream, stages)
        hidden_states = self._together(parts, batch)
        topk_ids, topk_weights = self._routing(batch, parts, hidden_states, given)
        if stages is not None and topk_ids is not None and batch.needs_router:
            stages.mark("router")
        out = self._out(batch, buffers)
        if topk_ids is not None and batch.with_routing:
            count_named(self._layer.shape, topk_ids, buffers.offsets)
        offsets = buffers.offsets[: self._layer.shape.num_groups + 1]
        compute: Callable[..., Tensor] = partial(
            self._layer, hidden_states, topk_ids, topk_weights, num_sms, out, offsets
        )
        key = (
            *map(_name, (values_of(hidden_states), topk_ids, out)),
            _name(hidden_states.scales if isinstance(hidden_states, Quantized) else None),
            id(buffers),
            num_sms,
            stream.stream_id,
            self._layer.rank_tokens,
        )
        graph: Graph | None = None
        if stages is not None:
            compute(stages=stages)
        elif (
            self._layer.is_capturable
            and len(parts) == 1
            and len(batch.with_routing) in (0, len(batch.requests))
        ):
            # All of its memory is in the buffers, or the request's own.
            graph = self._recurring.run(key, compute, buffers.pool, stream)
        else:
            compute()
        if graph is None:
            self._launches.eager += 1
        else:
            self._launches.recurring += 1
        outputs = self._outputs(batch, buffers, out, copies_out)
        self._copy_out(buffers, copies_out, stream, batch, stages)
        request = batch.requests[0]
        if graph is not None and len(batch.requests) == 1 and _stays_in_place(request):
            repeats = request.planned(self._owner)
            if repeats is None:
                request.plan = StepPlan(self._owner, None, repeats := {})
            own = Batch([replace(request, plan=None)])  # no circle of references
            repeats[buffers] = _Repeat(
                graph, self._valid(buffers), own, stream, copies_in, copies_out, outputs
            )
        return outputs

    def _valid(self, buffers: StepBuffers) -> tuple[int, int, int]:
        """Differs if a plan must not be repeated: graphs were freed, or memory lies elsewhere."""
        return self._recurring.generation, buffers.device_in.generation, buffers.device_out.generation

    def _copy_in(
        self, buffers: StepBuffers, copies: Copies, stream: Stream, stages: GpuStages | None = None
    ) -> None:
        """`stream` waits for the copies, which the step before does not delay."""
        if len(copies):
            if stages is not None:
                stages.begin(self._staging.copy_in)
            self._device.copy(copies, self._staging.copy_in)
            buffers.copied_in.record(self._staging.copy_in)
            if stages is not None:
                stages.mark("copy_in")
            stream.wait_event(buffers.copied_in)
        if stages is not None:
            stages.begin(stream)

    def _copy_out(
        self,
        buffers: StepBuffers,
        copies: Copies,
        stream: Stream,
        batch: Batch,
        stages: GpuStages | None = None,
    ) -> None:
        """Copies wait for `stream`, and the step's end for them."""
        last = stream
        if len(copies):
            buffers.computed.record(stream)
            last = self._staging.copy_out
            last.wait_event(buffers.computed)
            if stages is not None:
                stages.begin(last)
            self._device.copy(copies, last)
            if stages is not None:
                stages.mark("copy_out")
        self._staging.signal(batch.requests, last)
        buffers.copied_out.record(last)

    def _ended(self, buffers: StepBuffers, began: float) -> float:
        self._staging.give_back(buffers)
        return self._staging.seconds_since(began)

    def _result(
        self, batch: Batch, outputs: list[OutputMemory | Tensor], offsets: NDArray[np.int32], seconds: float
    ) -> StepResult:
        return StepResult(
            outputs=[self._bytes_of(output) if isinstance(output, Tensor) else output for output in outputs],
            layout=self._layer.layout(batch.num_tokens),
            num_tokens=batch.num_tokens,
            count_tokens=partial(self._layer.tokens_per_expert, offsets),
            compute_seconds=seconds,
            empty_slots=empty_slots(self._layer.shape, batch.num_tokens, not batch.with_routing, offsets),
        )

    def _bytes_of(self, output: Tensor) -> bytes:
        return self._staging.host_copies.timed(output.numpy().tobytes, output.numel() * output.itemsize)

    def _hidden_states(self, batch: Batch, buffers: StepBuffers, copies: Copies) -> list[HiddenStates]:
        """As `rows_of` once `copies` are done, in one part for each request if they differ."""
        h = self._layer.shape.hidden_size
        first, scales = batch.requests[0].hidden_states, batch.requests[0].scales
        if len(batch.requests) == 1 and self._is_in_place(first):
            data = self._as_bytes(first)
            if scales is None:
                return [rows_of(data, batch.requests[0].datatype, h)]
            if self._is_in_place(scales, 4):
                return [rows_of(data, FP8, h, self._as_bytes(scales))]
        datatypes = {request.datatype for request in batch.requests}
        sizes = [request.num_tokens * row_bytes(request.datatype, h) for request in batch.requests]
        starts = list(accumulate(sizes, initial=0))
        copied, staged = buffers.device_in.take(starts[-1]), buffers.host_in.take(starts[-1])

        def fetch(memory: Buffer | Span, begin: int, end: int) -> None:
            source = address_of(memory, staged[begin:end], self._staging.host_copies)
            owner = memory.owner if isinstance(memory, Span) else staged
            copies.add(copied.data_ptr() + begin, source, end - begin, owner)

        for request, (start, end) in zip(batch.requests, pairwise(starts), strict=True):
            middle = end if request.scales is None else start + request.num_tokens * h
            fetch(request.hidden_states, start, middle)
            if request.scales is not None:
                fetch(request.scales, middle, end)
        if len(datatypes) == 1 and all(request.scales is None for request in batch.requests):
            return [rows_of(copied, batch.requests[0].datatype, h)]
        spans = zip(batch.requests, pairwise(starts), strict=True)
        return [_rows_of(request, copied[start:end], h) for request, (start, end) in spans]

    def _given(self, batch: Batch, buffers: StepBuffers, copies: Copies) -> _Routing:
        """topk_ids int32 and topk_weights fp32 [T, top_k] on the GPU, for requests with routing on the host.

        The other rows stay uninitialized.
        """
        shape = batch.num_tokens, self._layer.shape.top_k
        num_bytes = shape[0] * shape[1] * 8
        staged, copied = buffers.host_routing.take(num_bytes), buffers.device_routing.take(num_bytes)
        ids, weights = (half.view(shape) for half in staged.view(torch.int32).chunk(2))
        for request, part in zip(batch.requests, batch.parts, strict=True):
            if request.topk_ids is None or request.topk_weights is None or is_on_gpu(request.topk_ids):
                continue
            given = np.frombuffer(host_view(request.topk_ids), request.topk_ids_datatype.lower())
            np.copyto(ids[part].numpy(), given.reshape(-1, shape[1]), casting="same_kind")
            given = np.frombuffer(host_view(request.topk_weights), np.int32)
            np.copyto(weights[part].numpy(), given.reshape(-1, shape[1]))
        copies.add(copied.data_ptr(), staged.data_ptr(), num_bytes, staged)
        on_gpu = copied.view(torch.int32).chunk(2)
        return on_gpu[0].view(shape), on_gpu[1].view(torch.float32).view(shape)

    def _together(self, parts: list[HiddenStates], batch: Batch) -> HiddenStates:
        """All rows of a step; those in FP8 keep their bits unless the layer needs the floats of others."""
        if len(parts) == 1:
            return parts[0]
        if self._layer.needs_floats or not any(isinstance(part, Quantized) for part in parts):
            return _floats(parts, batch)
        return joined(parts)

    def _routing(
        self, batch: Batch, parts: list[HiddenStates], hidden_states: HiddenStates, given: _Routing | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The step's routing on the GPU; None: the layer routes all tokens."""
        if given is None:
            if isinstance(hidden_states, Quantized) and len(parts) > 1:  # some may have been floats
                return self._layer.route(_floats(parts, batch))
            return None, None
        ids, weights = given
        for request, part in zip(batch.requests, batch.parts, strict=True):
            if is_on_gpu(request.topk_ids) and is_on_gpu(request.topk_weights):
                dtype = INTEGERS[request.topk_ids_datatype]
                given_ids = self._view(request.topk_ids, dtype, ids.shape[1])
                ids[part] = without_outside(given_ids, self._layer.shape.num_experts)
                weights[part] = self._view(request.topk_weights, torch.float32, ids.shape[1])
        if batch.needs_router:
            routed_ids, routed_weights = self._layer.route(_floats(parts, batch))
            for part in batch.with_routing:
                routed_ids[part] = ids[part]
                routed_weights[part] = weights[part]
            return routed_ids, routed_weights
        return ids, weights

    def _out(self, batch: Batch, buffers: StepBuffers) -> Tensor:
        """Where the layer writes [T, H] of `batch.out_dtype`: to the only request's own memory if it can."""
        h, dtype = self._layer.shape.hidden_size, batch.out_dtype
        wanted = batch.requests[0].output
        if len(batch.requests) == 1 and self._is_in_place(wanted):
            return self._view(wanted, dtype, h)
        return buffers.device_out.take(batch.num_tokens * h * dtype.itemsize).view(dtype).view(-1, h)

    def _outputs(
        self, batch: Batch, buffers: StepBuffers, out: Tensor, copies: Copies
    ) -> list[OutputMemory | Tensor]:
        outputs: list[OutputMemory | Tensor] = []
        h = out.shape[1]
        sizes = [
            0 if request.output is not None else request.num_tokens * row_bytes(request.output_datatype, h)
            for request in batch.requests
        ]
        starts = list(accumulate(sizes, initial=0))
        staged = buffers.host_out.take(starts[-1])
        for request, part, start in zip(batch.requests, batch.parts, starts[:-1], strict=True):
            rows = out[part].to(FLOATS[request.output_datatype])
            num_bytes = rows.numel() * rows.itemsize
            owner: object = staged
            if request.output is None:
                own = staged[start : start + num_bytes]
                outputs.append(own)
                address = own.data_ptr()
            else:
                outputs.append(request.output)
                address, owner = request.output.address, request.output.owner
            is_part = rows.dtype == out.dtype  # else it has memory of its own
            copies.add(address, rows.data_ptr(), num_bytes, owner if is_part else None)
            buffers.kept.append(rows)
        return outputs

    def _is_in_place(self, memory: object, alignment: int = ALIGNMENT) -> TypeGuard[Span]:
        """Whether kernels can use `memory` as it is."""
        here = self._device.tensors.index
        return is_on_gpu(memory) and memory.device == here and is_aligned(memory, alignment)

    def _view(self, memory: Span, dtype: torch.dtype, columns: int) -> Tensor:
        """A span of a GPU's memory as a tensor [rows, columns]; a copy if kernels could not read elements."""
        data = self._as_bytes(memory)
        return (data if is_aligned(memory, dtype.itemsize) else data.clone()).view(dtype).view(-1, columns)

    def _as_bytes(self, memory: Span) -> Tensor:
        """Memory that the GPU can read, as a tensor which does not keep it; of a hidden GPU, it is a copy."""
        if memory.device != HIDDEN:
            return self._device.bytes_at(memory.address, memory.num_bytes, memory.device)
        copied = torch.empty(memory.num_bytes, dtype=torch.uint8, device=self._device.tensors)
        copies = Copies()
        copies.add(copied.data_ptr(), memory.address, memory.num_bytes, None)
        self._device.copy(copies, self._device.current_stream())
        return copied


def _floats(parts: list[HiddenStates], batch: Batch) -> Tensor:
    """All rows of a step as floats of `batch.dtype`."""
    floats = [as_floats(part) for part in parts]
    return floats[0] if len(floats) == 1 else torch.cat([part.to(batch.dtype) for part in floats])


def _rows_of(request: LayerRequest, data: Tensor, hidden_size: int) -> HiddenStates:
    """A request's rows in `data`, uint8; scales that lay apart follow the values."""
    if request.scales is None:
        return rows_of(data, request.datatype, hidden_size)
    size = request.num_tokens * hidden_size
    return rows_of(data[:size], FP8, hidden_size, data[size:])


def _stays_in_place(request: LayerRequest) -> bool:
    """Whether nothing of a request is copied by the host, or laid out for this step alone."""
    spans = isinstance(request.hidden_states, Span) and request.output is not None
    in_place = request.scales is None or isinstance(request.scales, Span)
    return spans and in_place and request.topk_ids is None


def without_outside(ids: Tensor, num_experts: int) -> Tensor:
    """Ids of experts, of any integer dtype; -1 for all that name none."""
    return torch.where(ids.clamp(0, num_experts - 1) == ids, ids, -1)


def _name(tensor: Tensor | None) -> object:
    """What a launch depends on."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
