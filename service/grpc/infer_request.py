"""A ModelInferRequest as an infer request: its head, and its raw tensors as the body."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from expertd.service.engine.spec import MODEL_VERSION, LayerSpec
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.statuses import Refusal, refusal_of
from expertd.service.grpc.wire import split_request, texts_of, with_outputs
from expertd.service.inference.body import Received
from expertd.service.inference.errors import RequestError
from expertd.service.inference.head import InferHead
from expertd.service.inference.limits import BodyLimit
from expertd.service.inference.plan import RequestPlan, any_body
from expertd.service.inference.regions import NewUses
from expertd.service.inference.request import GivenInput, GivenOutput, InferRequest, infer_request, refuse
from expertd.service.inference.tensors import ELEMENT_BYTES, INPUT_DATATYPES, OUTPUT
from expertd.service.inference.threads import INLINE_BYTES, Where
from expertd.service.inference.versions import check_client
from expertd.service.memory import Arena, Buffer, Span, host_view
from expertd.service.moe.request import OutputMemory
from expertd.service.settings.parts import Limits
from expertd.service.tracing.context import Headers
from expertd.service.util.sentences import shown

_MODEL, _VERSION, _ID = 1, 2, 3  # the numbers of those fields
_REGION = "shared_memory_region"
# Where a tensor's bytes are, as HTTP has it. Messages say that otherwise, but KServe's client repeats it.
_SIZE, _OUTPUTS = "binary_data_size", frozenset({"binary_data", "binary_data_output"})
_CONTENTS = {
    "FP32": ("fp32_contents", "<f4"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
}


class MessageHead(InferHead):
    """A serialized ModelInferRequest without its raw tensors, which have these `sizes` in the body.

    Raises RequestError for what is no message.
    """

    __slots__ = ("_plan", "_rest", "_sizes")

    def __init__(self, rest: bytes, sizes: tuple[int, ...], headers: Headers) -> None:
        try:
            # A parser would take seconds for a message of millions of parameters.
            model, version, request_id = texts_of(rest, (_MODEL, _VERSION, _ID))
        except ValueError as error:
            raise _unreadable(error) from error
        super().__init__(model, version or MODEL_VERSION, headers, request_id or None)
        self._rest, self._sizes = rest, sizes
        self._plan: RequestPlan | None = None  # of all messages with this head

    def read(self, limits: Limits) -> None:
        check_client(self.headers)
        if (size := len(self._rest)) > limits.max_json_bytes:
            text = f"expected at most {limits.max_json_bytes} bytes beside raw_input_contents, got {size}"
            text = f"request: {text}; send tensors as raw_input_contents"
            raise RequestError(text, reason="body_too_large")
        self.limit = BodyLimit(limits.max_body_bytes)
        self.tensor_bytes = sum(self._sizes)
        self.has_large_text = size > INLINE_BYTES
        self.limit.check(self.tensor_bytes)

    def find(self, content: Buffer | Span) -> RequestPlan | None:
        return self._plan

    def where_to_parse(self, received: Received) -> Where:
        return Where.JSON_THREAD if self.has_large_text else Where.EVENT_LOOP

    def parse(
        self, received: Received, spec: LayerSpec, arena: Arena | None, new_uses: NewUses
    ) -> RequestPlan:
        try:
            message = CLASSES["ModelInferRequest"].FromString(self._rest)
        except DecodeError as error:
            raise _unreadable(error) from error
        body = any_body(received.content)
        plan = RequestPlan(_request(message, self._sizes, body, spec, new_uses), body.num_bytes)
        if plan.is_worth_keeping:
            self._plan = plan
        if not plan.uses_body:
            received.release()
        return plan

    def kept_answer(self, plan: RequestPlan, output: OutputMemory) -> bytes | None:
        return None if plan.answer_head is None else with_outputs(plan.answer_head, [host_view(output)])

    def where_to_answer(self, plan: RequestPlan, spec: LayerSpec) -> Where:
        return Where.EVENT_LOOP

    def answer(
        self, plan: RequestPlan, output: OutputMemory, spec: LayerSpec, pause: Callable[[], object]
    ) -> bytes:
        """A serialized ModelInferResponse."""
        response = CLASSES["ModelInferResponse"](
            model_name=spec.name, model_version=MODEL_VERSION, id=plan.request.id or ""
        )
        shape = [plan.num_tokens, spec.hidden_size]
        entry = response.outputs.add(name=OUTPUT, datatype=plan.output_datatype, shape=shape)
        regions = plan.request.regions
        if regions is not None and (place := regions.output_place) is not None:
            entry.parameters[_REGION].string_param = place.name
            entry.parameters["shared_memory_offset"].int64_param = place.offset
            entry.parameters["shared_memory_byte_size"].int64_param = place.num_bytes
            message: bytes = response.SerializeToString()
            return message
        plan.answer_head = response.SerializeToString()
        return with_outputs(plan.answer_head, [host_view(output)])

    def refusal(self, error: RequestError, status: int) -> Refusal:
        return refusal_of(error, status)


def split(data: bytes) -> tuple[bytes, list[memoryview]]:
    """A serialized ModelInferRequest without its raw tensors, and these. Raises RequestError."""
    try:
        return split_request(data)
    except ValueError as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> RequestError:
    return RequestError(f"request: expected a ModelInferRequest, got another message ({error})")


def own_id(data: bytes) -> str:
    """The caller's id in a serialized ModelInferRequest; "" without one."""
    try:
        return texts_of(data, (_ID,))[0]
    except ValueError:
        return ""


def _request(
    message: Any, sizes: tuple[int, ...], body: Span, spec: LayerSpec, new_uses: NewUses
) -> InferRequest:
    outputs = [
        GivenOutput(entry.name, _parameters(entry, f"output {shown(entry.name)}"))
        for entry in message.outputs
    ]
    parameters = _parameters(message, "the request")
    inputs = _inputs(message, sizes, body)
    return infer_request(message.id or None, parameters, inputs, outputs, spec, new_uses, binary_output=True)


def _inputs(message: Any, sizes: tuple[int, ...], body: Span) -> Iterator[GivenInput]:
    given = [(entry, _parameters(entry, _where(entry.name))) for entry in message.inputs]
    num_here = sum(_REGION not in parameters for _, parameters in given)
    if sizes and len(sizes) != num_here:
        text = f"expected {num_here}, one for each input with data, got {len(sizes)}"
        refuse(f"raw_input_contents: {text}")
    raw, position = iter(sizes), 0
    for entry, parameters in given:
        told_size = parameters.pop(_SIZE, None)
        part: Span | None = None
        if sizes and _REGION not in parameters:
            size = next(raw)
            part, position = body.part(position, size), position + size
        source = "contents" if entry.contents.ListFields() else None
        data = partial(_data, entry.contents, part, told_size)
        yield GivenInput(entry.name, entry.datatype, list(entry.shape), parameters, source, data)


def _data(
    contents: Any, raw: Span | None, told_size: object, where: str, shape: list[int], datatype: str
) -> Buffer | Span:
    """A raw tensor, or typed contents as bytes. Raises RequestError."""
    given = [field.name for field, _ in contents.ListFields()]  # those that are not empty
    expected = shape[0] * shape[1] * ELEMENT_BYTES[datatype]
    if raw is not None:
        if given:
            refuse(f"{where}: expected contents or raw_input_contents, got both")
        if told_size not in (None, raw.num_bytes):
            text = f"expected {raw.num_bytes}, the bytes of its raw_input_contents, got {shown(told_size)}"
            refuse(f"parameter {_SIZE} of {where}: {text}")
        _check_bytes("raw_input_contents", where, expected, shape, datatype, raw.num_bytes)
        return raw
    if told_size is not None:
        refuse(f"{where}: expected raw_input_contents, got parameter {_SIZE} without them")
    if datatype not in _CONTENTS:
        text = f"expected raw_input_contents for {datatype}, which has no typed contents, got none"
        refuse(f"{where}: {text}")
    name, dtype = _CONTENTS[datatype]
    if given not in ([], [name]):
        others = ", ".join(other for other in given if other != name)
        refuse(f"contents of {where}: expected only {name} for {datatype}, got {others}")
    data = np.array(getattr(contents, name), dtype).tobytes()
    _check_bytes("contents", where, expected, shape, datatype, len(data))
    return data


def _check_bytes(field: str, where: str, expected: int, shape: list[int], datatype: str, got: int) -> None:
    if got != expected:
        refuse(f"{field} of {where}: expected {expected} bytes for shape {shape} of {datatype}, got {got}")


def _where(name: str) -> str:
    return f"input {name if name in INPUT_DATATYPES else shown(name)}"


def _parameters(message: Any, where: str) -> dict[str, Any]:
    """Parameters as in JSON. Raises RequestError if they ask for outputs in another form than raw."""
    found = {}
    for name, value in message.parameters.items():
        if (choice := value.WhichOneof("parameter_choice")) is None:
            continue  # absent, as null is over HTTP
        found[name] = getattr(value, choice)
        if name in _OUTPUTS and found.pop(name) is not True:
            text = "expected true or none over gRPC, where outputs are always raw_output_contents"
            refuse(f"parameter {name} of {where}: {text}")
    return found
