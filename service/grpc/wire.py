"""Tensors of protocol buffers on the wire: found in requests and added to responses without a parser.

Its messages are copied once or twice by a parser. A request's raw tensors are most of its bytes, so they are
cut out here, as views, and a response's are appended to the message without them.
"""

from collections.abc import Iterator, Sequence

from expertd.service.memory import Buffer

_RAW_INPUTS = 7  # raw_input_contents of ModelInferRequest
_RAW_OUTPUTS = 6  # raw_output_contents of ModelInferResponse
_BYTES = 2  # the wire type of strings, bytes and messages
_FIXED = {1: 8, 5: 4}
_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1024  # of a request; there is one for each tensor and parameter, and other calls wait meanwhile


def split_request(data: bytes) -> tuple[bytes, list[memoryview]]:
    """A ModelInferRequest without its raw tensors, and these. Raises ValueError if it is invalid."""
    view = memoryview(data)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    for key, start, content, end in _fields(data):
        if key == _key(_RAW_INPUTS):
            raw.append(view[content:end])
        else:
            rest.append(view[start:end])
    return b"".join(rest), raw


def texts_of(data: bytes, fields: Sequence[int]) -> list[str]:
    """Strings of a message; "" for those that it has not. Raises ValueError if the message is invalid."""
    found = {_key(field): b"" for field in fields}
    for key, _, content, end in _fields(data):
        if key in found:
            found[key] = data[content:end]
    return [text.decode() for text in found.values()]


def with_outputs(message: bytes, outputs: Sequence[Buffer]) -> bytes:
    """A serialized ModelInferResponse with `outputs` as its raw tensors."""
    parts: list[Buffer] = [message]
    for output in outputs:
        parts += [tag(_RAW_OUTPUTS, memoryview(output).nbytes), output]
    return b"".join(parts)


def tag(field: int, num_bytes: int) -> bytes:
    """What precedes the `num_bytes` of a field of bytes, or of a message."""
    return bytes([_key(field)]) + _varint_of(num_bytes)


def _fields(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Each field's key, and where it starts, its content starts, and it ends. Raises ValueError."""
    position = 0
    for _ in range(_MAX_FIELDS):
        if position == len(data):
            return
        start = position
        key, position = _varint(data, position)
        kind = key & 7
        size = 0
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind == 0:
            _, position = _varint(data, position)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"a field of wire type {kind}")
        end = position + size
        if end > len(data):
            raise ValueError("a field that is cut off")
        yield key, start, position, end
        position = end
    if position < len(data):
        raise ValueError(f"at least {_MAX_FIELDS + 1} fields, expected at most {_MAX_FIELDS}")


def _key(field: int) -> int:
    return field << 3 | _BYTES


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            raise ValueError("a number that is cut off")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("a number of more than 10 bytes")


def _varint_of(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)
