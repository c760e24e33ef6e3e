"""Parses an infer request and makes every check that does not depend on the values of its tensors."""

import json
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol.datatypes import ELEMENT_BYTES, FLOATS, numbers_to_bytes
from expertd.service.http.protocol.errors import OipError
from expertd.service.memory import Buffer
from expertd.service.moe.request import LayerRequest
from expertd.service.sentences import any_of, shown

INPUT_DATATYPES = {"hidden_states": FLOATS, "topk_ids": ("INT32", "INT64"), "topk_weights": ("FP32",)}
OUTPUT = "hidden_states"
# Parameters of the protocol that this server does not support: ignoring them would mislead.
_UNSUPPORTED = frozenset(
    {"priority", "sequence_id", "sequence_start", "sequence_end", "shared_memory_region", "classification"}
)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request with consistent types, shapes and sizes; the values of its routing are not checked."""

    id: str | None
    layer: LayerRequest
    binary_output: bool
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True)
class _Tensor:
    datatype: str
    shape: list[int]
    data: Buffer


def parse_request(body: bytes, header_length: int | None, spec: LayerSpec) -> InferRequest:
    """Parse `body`, whose first `header_length` bytes are JSON (None: all of it; 0: none).

    Binary tensors are views of `body`. Raises OipError (400).
    """
    if header_length == 0:
        return _parse_raw(body, spec)
    if header_length is not None and header_length > len(body):
        _refuse(
            f"Inference-Header-Content-Length: expected at most the body's {len(body)} bytes, "
            f"got {header_length}"
        )
    view = memoryview(body)
    end = len(body) if header_length is None else header_length
    header = _parse_json(view[:end])
    request_id = header.get("id")
    if request_id is not None and not isinstance(request_id, str):
        _refuse(f"id: expected a string, got {shown(request_id)}")
    try:
        return _parse_header(header, view[end:], request_id, spec)
    except OipError as error:
        error.request_id = request_id
        raise


def _parse_raw(body: bytes, spec: LayerSpec) -> InferRequest:
    row_bytes = spec.hidden_size * ELEMENT_BYTES[spec.datatype]
    if len(body) % row_bytes:
        _refuse(
            f"body: expected rows of {row_bytes} bytes ({spec.hidden_size} {spec.datatype} values), "
            f"without a JSON header, got {len(body)} bytes"
        )
    tensor = _Tensor(spec.datatype, [len(body) // row_bytes, spec.hidden_size], memoryview(body))
    layer = _layer_request({"hidden_states": tensor}, spec.datatype, spec)
    return InferRequest(None, layer, binary_output=True, timeout_seconds=None)


def _parse_json(text: memoryview) -> dict[str, Any]:
    try:
        header = _DECODER.decode(str(text, "utf-8"))
    except UnicodeDecodeError as error:
        raise OipError(400, f"request: expected JSON in UTF-8, got {error.reason}") from error
    except ValueError as error:
        raise OipError(400, f"request: expected JSON, got invalid JSON: {error}") from error
    except RecursionError as error:
        raise OipError(400, "request: expected JSON, got arrays nested too deeply") from error
    if not isinstance(header, dict):
        _refuse(f"request: expected a JSON object, got {shown(header)}")
    return header


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"request: expected finite numbers in JSON, got {name}; send the tensor in binary")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parse_header(
    header: dict[str, Any], binary: memoryview, request_id: str | None, spec: LayerSpec
) -> InferRequest:
    parameters = _parameters(header, "the request")
    tensors: dict[str, _Tensor] = {}
    offset = 0
    for entry in _objects(header, "inputs"):
        name = entry.get("name")
        if not isinstance(name, str) or name not in INPUT_DATATYPES:
            _refuse(f"name of an input: expected {any_of(INPUT_DATATYPES)}, got {shown(name)}")
        if name in tensors:
            _refuse(f"input {name}: expected once, got twice")
        tensors[name], offset = _parse_input(name, entry, binary, offset)
    if offset != len(binary):
        _refuse(
            f"binary_data_size of all inputs: expected a sum of {len(binary)}, the bytes after the JSON, "
            f"got {offset}"
        )
    if "hidden_states" not in tensors:
        _refuse(f"inputs: expected hidden_states, got {', '.join(tensors) or 'none'}")
    binary_output = _boolean(parameters, "binary_data_output", default=False)
    datatype = tensors["hidden_states"].datatype
    if outputs := _objects(header, "outputs", required=False):
        datatype, binary_output = _parse_outputs(outputs, datatype, binary_output)
    layer = _layer_request(tensors, datatype, spec)
    return InferRequest(request_id, layer, binary_output, _timeout(parameters))


def _parse_input(name: str, entry: dict[str, Any], binary: memoryview, offset: int) -> tuple[_Tensor, int]:
    where = f"input {name}"
    datatype = entry.get("datatype")
    if datatype not in INPUT_DATATYPES[name]:
        _refuse(f"datatype of {where}: expected {any_of(INPUT_DATATYPES[name])}, got {shown(datatype)}")
    shape = entry.get("shape")
    if not _is_shape(shape):
        _refuse(f"shape of {where}: expected two sizes of at least 0, [tokens, columns], got {shown(shape)}")
    size = _parameters(entry, where).get("binary_data_size")
    if size is None:
        if "data" not in entry:
            _refuse(f"{where}: expected data or the parameter binary_data_size, got neither")
        data = numbers_to_bytes(entry["data"], shape, datatype, f"data of {where}")
        return _Tensor(datatype, shape, data), offset
    if "data" in entry:
        _refuse(f"{where}: expected data or the parameter binary_data_size, got both")
    expected = shape[0] * shape[1] * ELEMENT_BYTES[datatype]
    if type(size) is not int or size != expected:
        _refuse(
            f"binary_data_size of {where}: expected {expected} for shape {shape} of {datatype}, "
            f"got {shown(size)}"
        )
    if offset + size > len(binary):
        _refuse(f"{where}: expected {size} bytes after the JSON, got {len(binary) - offset}")
    return _Tensor(datatype, shape, binary[offset : offset + size]), offset + size


def _parse_outputs(outputs: list[dict[str, Any]], datatype: str, binary: bool) -> tuple[str, bool]:
    if len(outputs) > 1 and all(entry.get("name") == OUTPUT for entry in outputs):
        _refuse(f"output {OUTPUT}: expected once, got {len(outputs)} times")
    for entry in outputs:
        if entry.get("name") != OUTPUT:
            _refuse(f"name of an output: expected {OUTPUT}, got {shown(entry.get('name'))}")
        parameters = _parameters(entry, f"output {OUTPUT}")
        binary = _boolean(parameters, "binary_data", default=binary)
        datatype = parameters.get("datatype", datatype)
        if datatype not in FLOATS:
            _refuse(f"datatype of output {OUTPUT}: expected {any_of(FLOATS)}, got {shown(datatype)}")
    return datatype, binary


def _layer_request(tensors: dict[str, _Tensor], output_datatype: str, spec: LayerSpec) -> LayerRequest:
    hidden_states = tensors["hidden_states"]
    num_tokens = hidden_states.shape[0]
    for name, tensor in tensors.items():
        expected = [num_tokens, spec.hidden_size if name == "hidden_states" else spec.top_k]
        if tensor.shape != expected:
            _refuse(f"shape of input {name}: expected {expected}, got {tensor.shape}")
    if num_tokens > spec.max_request_tokens:
        text = f"request: expected at most {spec.max_request_tokens} tokens, got {num_tokens}"
        raise OipError(400, text, reason="too_many_tokens")
    ids, weights = tensors.get("topk_ids"), tensors.get("topk_weights")
    if (ids is None) != (weights is None):
        given = "topk_weights" if ids is None else "topk_ids"
        _refuse(f"inputs topk_ids and topk_weights: expected both or neither, got {given} alone")
    return LayerRequest(
        num_tokens=num_tokens,
        hidden_states=hidden_states.data,
        datatype=hidden_states.datatype,
        topk_ids=ids.data if ids else None,
        topk_ids_datatype=ids.datatype if ids else "INT32",
        topk_weights=weights.data if weights else None,
        output_datatype=output_datatype,
    )


def _is_shape(shape: object) -> TypeGuard[list[int]]:
    return (
        isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
    )


def _parameters(owner: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        _refuse(f"parameters of {where}: expected an object, got {shown(parameters)}")
    for name in _UNSUPPORTED & parameters.keys():
        if parameters[name]:
            got = shown(parameters[name])
            _refuse(f"parameter {name} of {where}: expected none (not supported), got {got}")
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
        _refuse(f"parameter timeout: expected a number of microseconds, got {shown(value)}")
    return value / 1e6 if value else None


def _refuse(message: str) -> NoReturn:
    raise OipError(400, message)
