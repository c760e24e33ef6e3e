"""A ModelInferRequest as an infer request's JSON header and binary tensors, which every check is made on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.wire import split_request, text_of
from expertd.service.http.protocol import ELEMENT_BYTES, INPUT_DATATYPES, OipError
from expertd.service.memory import Buffer
from expertd.service.sentences import shown

_ID = 3  # the number of that field
_MAX_KEPT_BYTES = 2048  # of a message without its tensors
_REGION = "shared_memory_region"
# Where a tensor's bytes are, as HTTP has it. Messages say that otherwise, but KServe's client repeats it.
_SIZE, _OUTPUTS = "binary_data_size", frozenset({"binary_data", "binary_data_output"})
_CONTENTS = {
    "FP32": ("fp32_contents", "<f4"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
}


@dataclass(frozen=True, slots=True)
class Translated:
    """A request as over HTTP: its JSON, and the bytes behind it."""

    model: str
    version: str
    header: bytes
    tensors: Sequence[Buffer]
    request_id: str | None  # the caller's own

    @property
    def num_bytes(self) -> int:
        """Of the whole body."""
        return len(self.header) + sum(len(tensor) for tensor in self.tensors)


class UntranslatedError(Exception):
    """A message that is no infer request to `model`; `refusal` says why (400, 413)."""

    def __init__(self, model: str, refusal: OipError) -> None:
        super().__init__(refusal.message)
        self.model = model
        self.refusal = refusal


class Parts(NamedTuple):
    """A serialized ModelInferRequest: its raw tensors, and the rest of it."""

    rest: bytes
    raw: list[memoryview]

    def translate(self) -> Translated:
        """The request as over HTTP. Raises UntranslatedError."""
        read = _kept if len(self.rest) <= _MAX_KEPT_BYTES else _read
        read_as = read(self.rest, tuple(map(len, self.raw)))
        return replace(read_as, tensors=self.raw) if self.raw else read_as


def parts_of(data: bytes, max_json_bytes: int) -> Parts:
    """Find the raw tensors in a message. Raises UntranslatedError, also if the rest is too large."""
    try:
        rest, raw = split_request(data)
    except ValueError as error:
        raise _unreadable(error) from error
    if len(rest) > max_json_bytes:
        text = f"expected at most {max_json_bytes} bytes beside raw_input_contents, got {len(rest)}"
        raise UntranslatedError("", OipError(413, f"request: {text}; send tensors as raw_input_contents"))
    return Parts(rest, raw)


def request_id(data: bytes) -> str:
    """The caller's id in a serialized ModelInferRequest; "" without one."""
    try:
        return text_of(data, _ID)  # a parser would take seconds for a message of millions of parameters
    except ValueError:
        return ""


def _read(rest: bytes, sizes: tuple[int, ...]) -> Translated:
    """The request in `rest`, whose raw tensors have these sizes; `tensors` are its typed contents."""
    try:
        message = CLASSES["ModelInferRequest"].FromString(rest)
    except DecodeError as error:
        raise _unreadable(error) from error
    try:
        header, tensors = _header(message, sizes)
    except OipError as error:
        error.request_id = message.id or None
        raise UntranslatedError(message.model_name, error) from error
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    version = message.model_version or MODEL_VERSION
    return Translated(message.model_name, version, text, tensors, message.id or None)


_kept = lru_cache(maxsize=256)(_read)  # callers repeat all but their tensors


def _unreadable(error: Exception) -> UntranslatedError:
    text = f"request: expected a ModelInferRequest, got another message ({error})"
    return UntranslatedError("", OipError(400, text))


def _header(message: Any, sizes: tuple[int, ...]) -> tuple[dict[str, Any], list[Buffer]]:
    parameters = _parameters(message, "the request")
    header: dict[str, Any] = {"parameters": {**parameters, "binary_data_output": True}}
    if message.id:
        header["id"] = message.id
    inputs = [_Input(entry) for entry in message.inputs]
    here = [each for each in inputs if not each.is_elsewhere]
    if sizes and len(sizes) != len(here):
        text = f"expected {len(here)}, one for each input with data, got {len(sizes)}"
        raise OipError(400, f"raw_input_contents: {text}")
    for each, size in zip(here, sizes, strict=False):
        each.set_raw(size)
    tensors: list[Buffer] = [] if sizes else [each.contents() for each in here]
    header["inputs"] = [each.entry for each in inputs]
    header["outputs"] = [
        {"name": entry.name, "parameters": _parameters(entry, f"output {shown(entry.name)}")}
        for entry in message.outputs
    ]
    return header, tensors


class _Input:
    """One input; `entry` is its JSON, `is_elsewhere` says that it lies in shared memory."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self._where = f"input {message.name if message.name in INPUT_DATATYPES else shown(message.name)}"
        parameters = _parameters(message, self._where)
        self._told_size = parameters.pop(_SIZE, None)
        self.is_elsewhere = _REGION in parameters
        self._contents = [field.name for field, _ in message.contents.ListFields()]  # that are not empty
        if self.is_elsewhere and self._contents:
            raise OipError(400, f"{self._where}: expected {_REGION} alone, got contents too")
        self.entry: dict[str, Any] = {
            "name": message.name,
            "datatype": message.datatype,
            "shape": list(message.shape),
            "parameters": parameters,
        }

    def set_raw(self, size: int) -> None:
        """Have the input's data in a raw tensor of `size` bytes. Raises OipError (400)."""
        if self._contents:
            raise OipError(400, f"{self._where}: expected contents or raw_input_contents, got both")
        if self._told_size not in (None, size):
            text = f"expected {size}, the bytes of its raw_input_contents, got {shown(self._told_size)}"
            raise OipError(400, f"parameter {_SIZE} of {self._where}: {text}")
        self._set_size("raw_input_contents", size)

    def contents(self) -> bytes:
        """The typed contents, as bytes. Raises OipError (400)."""
        if self._told_size is not None:
            text = f"expected raw_input_contents, got parameter {_SIZE} without them"
            raise OipError(400, f"{self._where}: {text}")
        datatype, contents = self._message.datatype, self._message.contents
        if datatype in ELEMENT_BYTES and datatype not in _CONTENTS:
            text = f"expected raw_input_contents for {datatype}, which has no typed contents, got none"
            raise OipError(400, f"{self._where}: {text}")
        name, dtype = _CONTENTS.get(datatype, ("", "<f4"))  # that an unknown one is refused comes later
        if name and self._contents not in ([], [name]):
            others = ", ".join(other for other in self._contents if other != name)
            text = f"expected only {name} for {datatype}, got {others}"
            raise OipError(400, f"contents of {self._where}: {text}")
        data = np.array(getattr(contents, name), dtype).tobytes() if name else b""
        self._set_size("contents", len(data))
        return data

    def _set_size(self, field: str, size: int) -> None:
        datatype, shape = self.entry["datatype"], self.entry["shape"]
        self.entry["parameters"][_SIZE] = size
        if datatype not in ELEMENT_BYTES or len(shape) != 2 or min(shape) < 0:
            return  # refused for that
        expected = shape[0] * shape[1] * ELEMENT_BYTES[datatype]
        if size != expected:
            text = f"expected {expected} bytes for shape {shape} of {datatype}, got {size}"
            raise OipError(400, f"{field} of {self._where}: {text}")


def _parameters(message: Any, where: str) -> dict[str, Any]:
    """Parameters as in JSON. Raises OipError (400) if they ask for outputs in another form than raw."""
    found = {}
    for name, value in message.parameters.items():
        if (choice := value.WhichOneof("parameter_choice")) is None:
            continue  # absent, as null is over HTTP
        found[name] = getattr(value, choice)
        if name in _OUTPUTS and found.pop(name) is not True:
            text = "expected true or none over gRPC, where outputs are always raw_output_contents"
            raise OipError(400, f"parameter {name} of {where}: {text}")
    return found
