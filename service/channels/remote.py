"""An HTTP process's access to the engine in another process, by one channel of that."""

import asyncio
import math
import os
import socket
import struct
import time
from dataclasses import dataclass

from expertd.service.channels.cells import CELL_BYTES, RequestBuffers, int32_ids
from expertd.service.channels.waiting import QueueKey, WaitingCalls
from expertd.service.engine.errors import (
    DeviceLostError,
    EngineError,
    ExecutorClosedError,
    ModelUnloadedError,
    NotReadyError,
    QueueFullError,
    QueueTimeoutError,
    RegionsElsewhereError,
    RequestRefusedError,
    StepFailedError,
    TooManyRequestsError,
)
from expertd.service.engine.queue_counts import QueueCounts
from expertd.service.engine.spec import MODEL_VERSION, LayerSpec, served, specs_of
from expertd.service.engine.steps import StepTimes, Submission
from expertd.service.memory import Arena, Block, RegionUses
from expertd.service.moe.request import FP8, LayerRequest, OutputMemory, row_bytes
from expertd.service.moe.routing_checks import check_routing
from expertd.service.settings.model import Settings
from expertd_client.channel.claiming import mapped
from expertd_client.channel.layout import (
    CALLER,
    CODES,
    FP8_CODE,
    HEADER_BYTES,
    REASON_CODES,
    REQUEST,
    ROUTED,
    SLOT_BYTES,
)
from expertd_client.channel.link import ChannelClient

_KEPT_PART = 8  # an eighth of the cells is kept for kinds of requests that have none in the channel
_CODES = {**CODES, FP8: FP8_CODE}
_LINE = struct.Struct(REQUEST.format + CALLER.format[1:])  # without a cancellation in between
_ERRORS: dict[int, type[EngineError]] = {
    REASON_CODES["step_failed"]: StepFailedError,
    REASON_CODES["queue_timeout"]: QueueTimeoutError,
    REASON_CODES["shutting_down"]: ExecutorClosedError,
    REASON_CODES["not_ready"]: DeviceLostError,
}


@dataclass(slots=True, eq=False)
class RemoteCall:
    """A request, until its `done` is called."""

    submission: Submission
    kind: QueueKey
    arrived: float = 0.0  # if it had to wait for room in the channel, or there are spans
    sent: float = 0.0  # into the channel; as `arrived`
    sequence: int = 0  # 0: it waits for room
    cell: int = 0
    output: tuple[int, int] = (0, 0)  # offset and bytes, unless the request says where it goes
    block: Block | None = None
    error: Exception | None = None  # it is cancelled with
    began: float | None = None  # its step: only the engine knows
    stages: tuple[float, float] | None = None  # seconds in the queue and in steps, if the engine has said so

    @property
    def caller(self) -> int:
        return self.submission.caller

    @property
    def left(self) -> int:
        """Its tokens."""
        return self.submission.request.num_tokens

    def times(self, now: float) -> StepTimes | None:
        """Those of a request that is answered `now`; None if they are not known."""
        if self.stages is None:
            return None
        began = self.sent + self.stages[0]
        return StepTimes(self.arrived, began, min(now, began + self.stages[1]), 0)


class RemoteEngine:
    """Submits requests through a channel, which `connect` sets up once the engine has loaded.

    The beginning of the channel's data region holds cells, one for each request in the channel; the rest is
    the arena. What finds no room in the channel waits in the engine's order. The last cells are for requests
    like which there is none in the channel, of that caller: the engine has to know all between which it
    chooses. All methods but `validate` and `region_uses` belong to the event loop.

    counts    of what waits in all processes; None: of this one alone
    buffered  the cell for the arena's bytes in use
    """

    def __init__(
        self,
        settings: Settings,
        counts: QueueCounts | None = None,
        buffered: "memoryview[float] | None" = None,
    ) -> None:
        self.settings = settings
        self.models = specs_of(settings)
        self.arena: Arena | None = None
        self._buffered = buffered
        self.draining = False
        self._numbers = {name: number for number, name in enumerate(self.models)}
        self._experts = {model.name: model.num_experts for model in settings.models}
        # Lines of requests have times, as spans do.
        logs_times = settings.access_log and settings.log_format == "json"
        self._is_traced = logs_times or settings.tracing.endpoint is not None
        self._calls: dict[int, RemoteCall] = {}  # in the channel, by sequence
        self._waiting: WaitingCalls[RemoteCall] = WaitingCalls(settings, counts)
        self._in_channel = self._waiting.in_channel

    def connect(self, descriptors: list[int], connection: socket.socket, num_cells: int) -> None:
        """Use the channel of these descriptors from now on, in the running event loop.

        It lives as long as `connection`, which the caller of this watches.
        """
        control_bytes, data_bytes = (os.fstat(descriptor).st_size for descriptor in descriptors[:2])
        num_slots = (control_bytes - HEADER_BYTES) // SLOT_BYTES
        sizes = {"num_slots": num_slots, "control_bytes": control_bytes, "data_bytes": data_bytes}
        self._link = link = ChannelClient(mapped("", sizes, descriptors, connection, None))
        assert link.data is not None
        region = memoryview(link.data)
        self._cells = RequestBuffers(region, num_cells)
        self._kept_cells = max(1, num_cells // _KEPT_PART)
        self.arena = Arena(0, memory=region[num_cells * CELL_BYTES :], used=self._buffered)
        asyncio.get_running_loop().add_reader(link.answers, self._on_answers)

    # For infer requests; see `InferEngine`.

    def model(self, name: str, version: str = MODEL_VERSION) -> LayerSpec:
        return served(self.models, name, version)

    def check_loaded(self, model: str) -> None:
        if self.arena is None:
            phase = "draining" if self.draining else "loading"
            raise NotReadyError(f"model {model} is not ready: the server is {phase}")

    def check_capacity(self, model: str, num_tokens: int = 1, caller: int = 0) -> None:
        """Of what the engine has read, and of what waits; what is in channels, it has yet to refuse."""
        self._waiting.check_capacity(model, num_tokens, caller)

    def validate(self, model: str, request: LayerRequest) -> None:
        """Of 64-bit ids, because they are sent as 32-bit ones; all others are checked by the engine."""
        if request.topk_ids_datatype == "INT64":
            check_routing(request, self._experts[model], self.models[model].top_k)

    def submit(self, submission: Submission) -> RemoteCall:
        num_tokens, caller = submission.request.num_tokens, submission.caller
        kind = self._waiting.kind(submission.model, num_tokens, submission.priority)
        call = RemoteCall(submission, kind)
        if self._is_traced:
            call.arrived = time.perf_counter()
        if self._room() > (self._kept_cells if (kind, caller) in self._in_channel else 0):
            self._send(call)
        else:
            call.arrived = time.perf_counter()
            self._waiting.put(call)
        return call

    def cancel(self, call: RemoteCall, error: Exception) -> bool:
        call.error = error
        if not call.sequence:
            self._waiting.remove(call)
            call.submission.done(error)
            return True
        if call.sequence in self._calls:
            self._link.cancel(call.sequence)
        return False

    def region_uses(self) -> RegionUses | None:
        if self.settings.shared_memory.enabled:
            raise RegionsElsewhereError
        return None

    # The channel.

    def _room(self) -> int:
        """How many more requests may be sent now."""
        return len(self._cells.free) if self._link.has_room() else 0

    def _send(self, call: RemoteCall) -> None:
        """Send a request, for which there is room. Raises MemoryFullError."""
        submission = call.submission
        request = submission.request
        assert self.arena is not None
        ids = int32_ids(request)
        spec = self.models[submission.model]
        size = request.num_tokens * row_bytes(request.output_datatype, spec.hidden_size)
        tensors = (request.hidden_states, ids, request.topk_weights)
        cell = self._cells.cell_for(self._link.sequence % self._link.num_slots)
        output = request.output or size
        offsets, call.block = self._cells.place(cell, tensors, output, self.arena)
        if request.output is None:
            call.output = offsets[3], size
        codes = _CODES[request.datatype], _CODES[request.output_datatype]
        flags, timeout_us = 0 if ids is None else ROUTED, 0
        if call.arrived:
            call.sent = time.perf_counter()
        if submission.timeout is not None:
            timeout_us = max(1, round(1e6 * (submission.timeout - (call.sent - call.arrived))))
        whose = call.kind.priority, self._numbers[submission.model], call.caller
        line = _LINE.pack(request.num_tokens, *codes, flags, timeout_us, *offsets, *whose)
        call.cell = cell
        self._cells.free.remove(cell)
        self._in_channel[call.kind, call.caller] += 1
        call.sequence = self._link.send(line)
        self._calls[call.sequence] = call

    def _on_answers(self) -> None:
        self._link.clear()  # before the look: an answer after it rings again
        is_answered = self._link.is_answered
        for sequence in [sequence for sequence in self._calls if is_answered(sequence)]:
            call = self._calls.pop(sequence)
            answer = self._answer(call)
            self._cells.free.add(call.cell)
            like = call.kind, call.caller
            self._in_channel[like] -= 1
            if not self._in_channel[like]:
                del self._in_channel[like]
            if call.block is not None:
                call.block.release()
            call.submission.done(answer)
        while self._waiting and (room := self._room()):
            waiting = self._waiting.take() if room > self._kept_cells else self._waiting.take_unlike()
            if waiting is None:
                break
            try:
                self._send(waiting)
            except EngineError as error:
                waiting.submission.done(error)
            finally:
                self._waiting.sent(waiting)

    def _answer(self, call: RemoteCall) -> OutputMemory | Exception:
        failure = self._link.end(call.sequence)
        if failure is None:
            if self._is_traced:  # if the device has answered, the times may not be there yet
                call.stages = self._link.times(call.sequence, waits=False)
            if (output := call.submission.request.output) is not None:
                return output
            return self._cells.read(*call.output)
        status, text, retry_after_ms, reason = failure
        if status == 400:
            return RequestRefusedError(text)
        if status == 404:
            return ModelUnloadedError(text)
        if status == 499:
            return call.error or ExecutorClosedError(text)
        if reason == REASON_CODES["queue_full"]:
            full = TooManyRequestsError if status == 429 else QueueFullError
            return full(text, math.ceil(retry_after_ms / 1000))
        if reason == REASON_CODES["not_ready"] and not retry_after_ms:
            return NotReadyError(text)
        return _ERRORS.get(reason, StepFailedError)(text)
