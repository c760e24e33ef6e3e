"""Reads the request lines of one channel: everything in them is checked before it is used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from expertd.service.channels.geometry import Geometry
from expertd.service.engine.refusals import Reason
from expertd.service.engine.steps import DEFAULT_PRIORITY, LAST_PRIORITY
from expertd.service.memory import Span, host_view
from expertd.service.moe.request import FP8, LayerRequest, Signal, row_bytes
from expertd_client.channel.layout import ALIGNMENT, CODES, FP8_CODE, ON_STREAM, REQUEST, ROUTED

_MAX_LINES = 256  # that are kept
_OUTPUTS = {code: name for name, code in CODES.items()}
_INPUTS = {**_OUTPUTS, FP8_CODE: FP8}


class ChannelRequestError(Exception):
    """The request cannot be computed; the text is one sentence for the caller."""

    def __init__(self, text: str, reason: Reason = "invalid_request") -> None:
        super().__init__(text)
        self.reason: Reason = reason


class ChannelModel(NamedTuple):
    """A model of a channel; routed: whether routing is accepted, takes_fp8: whether FP8 is."""

    name: str
    hidden_size: int
    top_k: int
    validate: Callable[[LayerRequest], None]
    routed: bool
    takes_fp8: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A valid request line: the places of the tensors, inside the region and aligned."""

    model: ChannelModel
    num_tokens: int
    timeout_us: int
    priority: int
    datatype: str
    output_datatype: str
    hidden_states: Span
    output: Span
    topk_ids: Span | None  # both or neither
    topk_weights: Span | None


class RequestReader:
    """Turns request lines into requests on the channel's region.

    In host memory, routing is copied before it is checked, because the caller can change the region at any
    time. In a GPU's memory it is not checked: an id that names no expert adds nothing.
    """

    def __init__(self, geometry: Geometry, region: Span, models: Sequence[ChannelModel]) -> None:
        self._geometry = geometry
        self._region = region
        self._models = models  # in the order of their numbers in request lines
        self._lines: dict[bytes, Line] = {}  # because they repeat

    def line(self, data: bytes) -> Line:
        """Parse a request line without its sequence. Raises InvalidRequestError."""
        line = self._lines.get(data)
        if line is None:
            line = self._parse(data)
            if len(self._lines) >= _MAX_LINES:
                self._lines.clear()
            self._lines[data] = line
        return line

    def _parse(self, data: bytes) -> Line:
        num_tokens, code, output_code, flags, timeout_us, *offsets, priority, number = REQUEST.unpack(data)
        geometry = self._geometry
        if num_tokens > geometry.max_tokens:
            text = f"num_tokens: expected at most {geometry.max_tokens}, got {num_tokens}"
            raise ChannelRequestError(text, "too_many_tokens")
        if code not in _INPUTS:
            _refuse(f"datatype: expected 1, 2, 3 or 4, got {code}")
        if output_code not in _OUTPUTS:
            _refuse(f"output_datatype: expected 1, 2 or 3, got {output_code}")
        if flags & ~(ROUTED | ON_STREAM):
            _refuse(f"flags: expected 0 to 3, got {flags}")
        routed = bool(flags & ROUTED)
        if priority > LAST_PRIORITY:
            _refuse(f"priority: expected at most {LAST_PRIORITY}, got {priority}")
        if number >= len(self._models):
            _refuse(f"model: expected a number below {len(self._models)}, got {number}")
        model = self._models[number]
        if routed and not model.routed:
            _refuse("flags: expected no routing (a masked layout needs it in host memory), got 1")
        datatype, output_datatype = _INPUTS[code], _OUTPUTS[output_code]
        if datatype == FP8 and not model.takes_fp8:
            _refuse("datatype: expected 1, 2 or 3 (the model takes no FP8), got 4")
        routing = num_tokens * model.top_k * 4
        ids = weights = None
        num_bytes, output_bytes = (
            num_tokens * row_bytes(each, model.hidden_size) for each in (datatype, output_datatype)
        )
        hidden_states = self._part("hidden_states", offsets[0], num_bytes)
        output = self._part("output", offsets[3], output_bytes)
        if routed:
            ids = self._part("topk_ids", offsets[1], routing)
            weights = self._part("topk_weights", offsets[2], routing)
        for name, part in (("hidden_states", hidden_states), ("topk_ids", ids), ("topk_weights", weights)):
            if part is not None and _overlap(part, output):
                _refuse(f"output: expected a place apart from {name}, got one that overlaps it")
        datatypes = (datatype, output_datatype)
        priority = priority or DEFAULT_PRIORITY
        return Line(model, num_tokens, timeout_us, priority, *datatypes, hidden_states, output, ids, weights)

    def request(self, line: Line, signal: Signal) -> LayerRequest:
        """The request of `line`, which announces its output. Raises InvalidRequestError: invalid routing."""
        ids: Span | bytes | None = line.topk_ids
        weights: Span | bytes | None = line.topk_weights
        if line.topk_ids is not None and line.topk_weights is not None and self._region.view is not None:
            ids, weights = bytes(host_view(line.topk_ids)), bytes(host_view(line.topk_weights))
        request = LayerRequest(
            line.num_tokens,
            line.hidden_states,
            line.datatype,
            ids,
            "INT32",
            weights,
            line.output_datatype,
            line.output,
            signal,
        )
        if ids is not None:
            try:
                line.model.validate(request)
            except ValueError as error:
                raise ChannelRequestError(str(error)) from error
        return request

    def _part(self, name: str, offset: int, num_bytes: int) -> Span:
        if offset % ALIGNMENT:
            _refuse(f"{name}: expected an offset that is a multiple of {ALIGNMENT}, got {offset}")
        if offset + num_bytes > self._region.num_bytes:
            _refuse(
                f"{name}: expected {num_bytes} bytes inside the region of {self._region.num_bytes}, "
                f"got the offset {offset}"
            )
        return self._region.part(offset, num_bytes)


def _overlap(one: Span, other: Span) -> bool:
    return one.address < other.address + other.num_bytes and other.address < one.address + one.num_bytes


def _refuse(text: str) -> NoReturn:
    raise ChannelRequestError(text)
