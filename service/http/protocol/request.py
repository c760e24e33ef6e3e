"""Reads an infer request from a body: JSON, perhaps with binary tensors behind it, or one binary tensor."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol.datatypes import numbers_to_bytes
from expertd.service.http.protocol.errors import oip_error
from expertd.service.http.protocol.json_text import json_of
from expertd.service.inference.errors import RequestError
from expertd.service.inference.regions import NewUses, no_regions
from expertd.service.inference.request import (
    GivenInput,
    GivenOutput,
    InferRequest,
    check_size,
    infer_request,
    refuse,
)
from expertd.service.inference.tensors import (
    ELEMENT_BYTES,
    FP8S,
    InputTensor,
    OutputTensor,
    check_shapes,
    layer_request,
)
from expertd.service.memory import Buffer, Span, host_view
from expertd.service.util.sentences import shown

_MAX_OBJECTS = 1000
_SIZE = "binary_data_size"


def parse_request(
    body: Buffer | Span, header_length: int | None, spec: LayerSpec, new_uses: NewUses = no_regions
) -> InferRequest:
    """Parse `body`, whose first `header_length` bytes are JSON (None: all of it; 0: none).

    Binary tensors are views of `body`, or parts of the span. Raises OipError (400; 413 for a large output
    as JSON; 503 without memory to copy a region to).
    """
    request_id: str | None = None
    try:
        if header_length == 0:
            return _parse_raw(body, spec)
        view = host_view(body)
        if header_length is not None and header_length > len(view):
            expected = f"at most the body's {len(view)} bytes"
            refuse(f"Inference-Header-Content-Length: expected {expected}, got {header_length}")
        end = len(view) if header_length is None else header_length
        header = _parse_json(view[:end], 3 * spec.max_request_tokens)
        given_id = header.get("id")
        if given_id is not None and not isinstance(given_id, str):
            refuse(f"id: expected a string, got {shown(given_id)}")
        request_id = given_id
        outputs = [GivenOutput(entry.get("name"), entry.get("parameters")) for entry in _outputs(header)]
        inputs = _inputs(header, _Binary(body, end, len(view)))
        return infer_request(request_id, header.get("parameters"), inputs, outputs, spec, new_uses)
    except RequestError as error:
        refusal = oip_error(error)
        refusal.request_id = request_id
        raise refusal from error.__cause__


def _parse_raw(body: Buffer | Span, spec: LayerSpec) -> InferRequest:
    row_bytes = spec.hidden_size * ELEMENT_BYTES[spec.datatype]
    size = len(host_view(body))
    if size % row_bytes:
        refuse(
            f"body: expected rows of {row_bytes} bytes ({spec.hidden_size} {spec.datatype} values), "
            f"without a JSON header, got {size} bytes"
        )
    data = _Binary(body, 0, size).take(size)
    tensors = {"hidden_states": InputTensor(spec.datatype, [size // row_bytes, spec.hidden_size], data)}
    check_shapes(tensors, spec)
    layer = layer_request(tensors, OutputTensor(spec.datatype, True), spec, None)
    return InferRequest(None, layer, binary_output=True, timeout_seconds=None)


def _parse_json(data: memoryview, max_rows: int) -> dict[str, Any]:
    text = bytes(data)
    # Empty ones cost the most time a byte. A request needs about ten objects, and a list for each row.
    for mark, limit in (("{", _MAX_OBJECTS), ("[", _MAX_OBJECTS + max_rows)):
        if (count := text.count(mark.encode())) > limit:
            refuse(f"request: expected JSON with at most {limit} {mark}, got {count}")
    header = json_of(text, "request", "; send the tensor in binary")
    if not isinstance(header, dict):
        refuse(f"request: expected a JSON object, got {shown(header)}")
    return header


class _Binary:
    """The bytes of `body` from `start` to `end`: views of bytes, or spans of a span."""

    def __init__(self, body: Buffer | Span, start: int, end: int) -> None:
        self._body, self._start, self._position, self._end = body, start, start, end

    def take(self, num_bytes: int) -> Buffer | Span:
        """The next ones."""
        start, self._position = self._position, self._position + num_bytes
        if isinstance(self._body, Span):
            return self._body.part(start, num_bytes)
        return memoryview(self._body)[start : self._position]

    @property
    def left(self) -> int:
        return self._end - self._position

    def check_end(self) -> None:
        """Refuse the request unless all were taken."""
        size, got = self._end - self._start, self._position - self._start
        if got != size:
            expected = f"a sum of {size}, the bytes after the JSON"
            refuse(f"{_SIZE} of all inputs: expected {expected}, got {got}")


def _inputs(header: dict[str, Any], binary: _Binary) -> Iterator[GivenInput]:
    for entry in _objects(header.get("inputs"), "inputs"):
        parameters = entry.get("parameters")
        size = parameters.get(_SIZE) if isinstance(parameters, dict) else None
        source = _SIZE if size is not None else "data" if "data" in entry else None
        data = partial(_data, entry, size, binary)
        yield GivenInput(
            entry.get("name"), entry.get("datatype"), entry.get("shape"), parameters, source, data
        )
    binary.check_end()


def _outputs(header: dict[str, Any]) -> list[dict[str, Any]]:
    outputs = header.get("outputs")
    return [] if outputs is None else _objects(outputs, "outputs")


def _data(
    entry: dict[str, Any], size: object, binary: _Binary, where: str, shape: list[int], datatype: str
) -> Buffer | Span:
    if size is None:
        if "data" not in entry:
            refuse(f"{where}: expected data or the parameter {_SIZE}, got neither")
        if datatype in FP8S:
            refuse(f"{where}: expected the parameter {_SIZE} with {datatype}, got data")
        return numbers_to_bytes(entry["data"], shape, datatype, f"data of {where}")
    if "data" in entry:
        refuse(f"{where}: expected data or the parameter {_SIZE}, got both")
    num_bytes = check_size(_SIZE, where, shape, datatype, size)
    if binary.left < num_bytes:
        refuse(f"{where}: expected {num_bytes} bytes after the JSON, got {binary.left}")
    return binary.take(num_bytes)


def _objects(entries: object, key: str) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        refuse(f"{key}: expected an array of objects, got {shown(entries)}")
    return entries
