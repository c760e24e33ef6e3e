"""Parses an infer request and makes every check that does not depend on the values of its tensors."""

from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import DEFAULT_PRIORITY, LAST_PRIORITY
from expertd.service.http.protocol.datatypes import ELEMENT_BYTES, FLOATS, FP8S, numbers_to_bytes
from expertd.service.http.protocol.errors import OipError
from expertd.service.http.protocol.json_text import json_of
from expertd.service.http.protocol.layer_request import (
    SCALE,
    Output,
    Tensor,
    check_json_output,
    check_shape,
    check_shapes,
    layer_request,
)
from expertd.service.http.protocol.places import (
    BYTE_SIZE,
    OFFSET,
    REGION,
    NewUses,
    no_regions,
    place_of,
    uses_of,
)
from expertd.service.memory import Buffer, RegionUses, Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.sentences import any_of, shown

INPUT_DATATYPES = {
    "hidden_states": (*FLOATS, *FP8S),
    SCALE: ("FP32",),
    "topk_ids": ("INT32", "INT64"),
    "topk_weights": ("FP32",),
}
OUTPUT = "hidden_states"
_MAX_OBJECTS = 1000
_LONG_SECONDS = 1.0  # a timeout that hardly ever passes during a step: the output is written in place
# Parameters of the protocol that this server does not support: ignoring them would mislead.
_UNSUPPORTED = frozenset({"sequence_id", "sequence_start", "sequence_end", "classification"})
# Where a parameter belongs: elsewhere it would be ignored, as unknown ones are, and the answer be another.
_PLACES = {
    **dict.fromkeys(("timeout", "priority", "binary_data_output"), "the request"),
    **dict.fromkeys((REGION, BYTE_SIZE, OFFSET), "a tensor"),
    "binary_data_size": "an input",
    **dict.fromkeys(("binary_data", "datatype"), "an output"),
}
_MISPLACED = {
    owner: frozenset(name for name, place in _PLACES.items() if place not in places)
    for owner, *places in (
        ("request", "the request"),
        ("input", "a tensor", "an input"),
        ("output", "a tensor", "an output"),
    )
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request with consistent types, shapes and sizes; the values of its routing are not checked.

    regions: what holds the shared memory that it names, for the receiver to load, store and release.
    """

    id: str | None
    layer: LayerRequest
    binary_output: bool
    timeout_seconds: float | None
    priority: int = DEFAULT_PRIORITY
    regions: RegionUses | None = None

    @property
    def json_output(self) -> bool:
        """Whether the response holds the output as JSON numbers."""
        return not self.binary_output and (self.regions is None or self.regions.output_place is None)


def parse_request(
    body: Buffer | Span, header_length: int | None, spec: LayerSpec, new_uses: NewUses = no_regions
) -> InferRequest:
    """Parse `body`, whose first `header_length` bytes are JSON (None: all of it; 0: none).

    Binary tensors are views of `body`, or parts of the span. Raises OipError (400; 413 for a large output
    as JSON; 503 without memory to copy a region to).
    """
    if header_length == 0:
        return _parse_raw(body, spec)
    view = host_view(body)
    if header_length is not None and header_length > len(view):
        _refuse(
            f"Inference-Header-Content-Length: expected at most the body's {len(view)} bytes, "
            f"got {header_length}"
        )
    end = len(view) if header_length is None else header_length
    header = _parse_json(view[:end], 3 * spec.max_request_tokens)
    request_id = header.get("id")
    if request_id is not None and not isinstance(request_id, str):
        _refuse(f"id: expected a string, got {shown(request_id)}")
    try:
        return _parse_header(header, _part(body, end, len(view) - end), request_id, spec, new_uses)
    except OipError as error:
        error.request_id = request_id
        raise


def _parse_raw(body: Buffer | Span, spec: LayerSpec) -> InferRequest:
    row_bytes = spec.hidden_size * ELEMENT_BYTES[spec.datatype]
    size = len(host_view(body))
    if size % row_bytes:
        _refuse(
            f"body: expected rows of {row_bytes} bytes ({spec.hidden_size} {spec.datatype} values), "
            f"without a JSON header, got {size} bytes"
        )
    tensor = Tensor(spec.datatype, [size // row_bytes, spec.hidden_size], _part(body, 0, size))
    tensors = {"hidden_states": tensor}
    check_shapes(tensors, spec)
    layer = layer_request(tensors, Output(spec.datatype, True), spec, None)
    return InferRequest(None, layer, binary_output=True, timeout_seconds=None)


def _parse_json(data: memoryview, max_rows: int) -> dict[str, Any]:
    text = bytes(data)
    # Empty ones cost the most time a byte. A request needs about ten objects, and a list for each row.
    for mark, most in (("{", _MAX_OBJECTS), ("[", _MAX_OBJECTS + max_rows)):
        if (count := text.count(mark.encode())) > most:
            _refuse(f"request: expected JSON with at most {most} {mark}, got {count}")
    header = json_of(text, "request", "; send the tensor in binary")
    if not isinstance(header, dict):
        _refuse(f"request: expected a JSON object, got {shown(header)}")
    return header


def _parse_header(
    header: dict[str, Any],
    binary: Buffer | Span,
    request_id: str | None,
    spec: LayerSpec,
    new_uses: NewUses,
) -> InferRequest:
    parameters = _parameters(header, "the request", "request")
    tensors: dict[str, Tensor] = {}
    num_tokens: int | None = None
    offset, size = 0, len(host_view(binary))
    for entry in _objects(header, "inputs"):
        name = entry.get("name")
        if not isinstance(name, str) or name not in INPUT_DATATYPES:
            _refuse(f"name of an input: expected {any_of(INPUT_DATATYPES)}, got {shown(name)}")
        if name in tensors:
            _refuse(f"input {name}: expected once, got twice")
        shape = _shape(name, entry)
        num_tokens = shape[0] if name == "hidden_states" else num_tokens
        if num_tokens is not None:  # before the data, whose size follows from the shape
            check_shape(name, shape, num_tokens, spec)
        tensors[name], offset = _parse_input(name, shape, entry, binary, offset)
    if offset != size:
        _refuse(
            f"binary_data_size of all inputs: expected a sum of {size}, the bytes after the JSON, "
            f"got {offset}"
        )
    if "hidden_states" not in tensors:
        _refuse(f"inputs: expected hidden_states, got {', '.join(tensors) or 'none'}")
    datatype = tensors["hidden_states"].datatype
    datatype = spec.datatype if datatype in FP8S else datatype
    output = Output(datatype, _boolean(parameters, "binary_data_output", False))
    if outputs := _objects(header, "outputs", required=False):
        output = _parse_outputs(outputs, output)
    timeout, priority = _timeout(parameters), _priority(parameters)
    check_shapes(tensors, spec)
    check_json_output(output, tensors["hidden_states"].shape[0], spec)
    uses = uses_of([*(tensor.data for tensor in tensors.values()), output.place], new_uses)
    try:
        layer = layer_request(tensors, output, spec, uses, timeout is not None and timeout < _LONG_SECONDS)
    except BaseException:
        if uses is not None:
            uses.release()
        raise
    return InferRequest(request_id, layer, output.binary, timeout, priority, uses)


def _shape(name: str, entry: dict[str, Any]) -> list[int]:
    shape = entry.get("shape")
    if not _is_shape(shape):
        _refuse(
            f"shape of input {name}: expected two sizes of 0 to 2^31 - 1, [tokens, columns], "
            f"got {shown(shape)}"
        )
    return shape


def _parse_input(
    name: str, shape: list[int], entry: dict[str, Any], binary: Buffer | Span, offset: int
) -> tuple[Tensor, int]:
    where = f"input {name}"
    datatype = entry.get("datatype")
    if datatype not in INPUT_DATATYPES[name]:
        _refuse(f"datatype of {where}: expected {any_of(INPUT_DATATYPES[name])}, got {shown(datatype)}")
    parameters = _parameters(entry, where, "input")
    size, place = parameters.get("binary_data_size"), place_of(parameters, where)
    expected = shape[0] * shape[1] * ELEMENT_BYTES[datatype]
    if place is not None:
        if size is not None or "data" in entry:
            got = "binary_data_size" if size is not None else "data"
            _refuse(f"{where}: expected shared_memory_region alone, got {got} too")
        if place.num_bytes != expected:
            _refuse_size("shared_memory_byte_size", where, expected, shape, datatype, place.num_bytes)
        return Tensor(datatype, shape, place), offset
    if size is None:
        if "data" not in entry:
            _refuse(f"{where}: expected data or the parameter binary_data_size, got neither")
        if datatype in FP8S:
            _refuse(f"{where}: expected the parameter binary_data_size with {datatype}, got data")
        data = numbers_to_bytes(entry["data"], shape, datatype, f"data of {where}")
        return Tensor(datatype, shape, data), offset
    if "data" in entry:
        _refuse(f"{where}: expected data or the parameter binary_data_size, got both")
    if type(size) is not int or size != expected:
        _refuse_size("binary_data_size", where, expected, shape, datatype, size)
    if (rest := len(host_view(binary)) - offset) < size:
        _refuse(f"{where}: expected {size} bytes after the JSON, got {rest}")
    return Tensor(datatype, shape, _part(binary, offset, size)), offset + size


def _part(body: Buffer | Span, offset: int, num_bytes: int) -> Buffer | Span:
    """A part of the body: a view of bytes, or a span of a span."""
    if isinstance(body, Span):
        return body.part(offset, num_bytes)
    return memoryview(body)[offset : offset + num_bytes]


def _refuse_size(name: str, where: str, expected: int, shape: list[int], datatype: str, got: object) -> None:
    _refuse(f"{name} of {where}: expected {expected} for shape {shape} of {datatype}, got {shown(got)}")


def _parse_outputs(outputs: list[dict[str, Any]], output: Output) -> Output:
    if len(outputs) > 1 and all(entry.get("name") == OUTPUT for entry in outputs):
        _refuse(f"output {OUTPUT}: expected once, got {len(outputs)} times")
    for entry in outputs:
        if entry.get("name") != OUTPUT:
            _refuse(f"name of an output: expected {OUTPUT}, got {shown(entry.get('name'))}")
        parameters = _parameters(entry, f"output {OUTPUT}", "output")
        binary = _boolean(parameters, "binary_data", output.binary)
        datatype = parameters.get("datatype", output.datatype)
        if datatype not in FLOATS:
            _refuse(f"datatype of output {OUTPUT}: expected {any_of(FLOATS)}, got {shown(datatype)}")
        output = Output(datatype, binary, place_of(parameters, f"output {OUTPUT}"))
    return output


def _is_shape(shape: object) -> TypeGuard[list[int]]:
    return (
        isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
    )


def _parameters(entry: dict[str, Any], where: str, owner: str) -> dict[str, Any]:
    """The parameters of the request or of a tensor; those that nobody knows are ignored, as in Triton."""
    parameters = entry.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        _refuse(f"parameters of {where}: expected an object, got {shown(parameters)}")
    for name in _UNSUPPORTED & parameters.keys():
        if parameters[name]:
            got = shown(parameters[name])
            _refuse(f"parameter {name} of {where}: expected none (not supported), got {got}")
    for name, value in parameters.items():
        if name in _MISPLACED[owner]:
            _refuse(f"parameter {name} of {where}: expected it at {_PLACES[name]}, got {shown(value)} here")
    return parameters


def _objects(header: dict[str, Any], key: str, required: bool = True) -> list[dict[str, Any]]:
    entries = header.get(key)
    if entries is None and not required:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        _refuse(f"{key}: expected an array of objects, got {shown(entries)}")
    return entries


def _boolean(parameters: dict[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        _refuse(f"parameter {name}: expected true or false, got {shown(value)}")
    return value


def _timeout(parameters: dict[str, Any]) -> float | None:
    """The request's `timeout` in seconds (microseconds on the wire); None if it is 0 or absent."""
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value < 2**63:
        expected = "an integer of microseconds from 0 (none) to 2^63 - 1"
        _refuse(f"parameter timeout: expected {expected}, got {shown(value)}")
    return value / 1e6 if value else None


def _priority(parameters: dict[str, Any]) -> int:
    """The request's `priority`, 1 to 255; the default one if it is 0 or absent."""
    value = parameters.get("priority", 0)
    if type(value) is not int or not 0 <= value <= LAST_PRIORITY:
        _refuse(f"parameter priority: expected an integer from 0 to {LAST_PRIORITY}, got {shown(value)}")
    return value or DEFAULT_PRIORITY


def _refuse(message: str) -> NoReturn:
    raise OipError(400, message)
