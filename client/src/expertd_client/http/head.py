"""The head of a response."""

from dataclasses import dataclass

from expertd_client.errors import InvalidAnswerError


@dataclass(slots=True)
class AnswerHead:
    """`json_length`: bytes of the body that are JSON, before its tensors; None: all of them."""

    status: int
    content_length: int = -1
    json_length: int | None = None
    retry_after: str | None = None
    closes: bool = False


def parse_head(data: bytes) -> AnswerHead:
    """Parse a status line and headers, without the blank line. Raises InvalidAnswerError."""
    line, *lines = data.split(b"\r\n")
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or len(code) != 3 or code < b"100":
        raise InvalidAnswerError(f"answer: expected HTTP/1.1 and a status, got {line!r:.100}")
    head = AnswerHead(int(code), closes=version == b"HTTP/1.0")
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise InvalidAnswerError(f"answer: expected a header, got {line!r:.100}")
        _read_header(head, name.lower(), value.strip())
    if head.content_length < 0 and head.status >= 200:
        raise InvalidAnswerError("answer: expected Content-Length, got none")
    if head.json_length is not None and head.json_length > head.content_length:
        raise InvalidAnswerError(
            f"Inference-Header-Content-Length: expected at most {head.content_length}, got {head.json_length}"
        )
    return head


def _read_header(head: AnswerHead, name: bytes, value: bytes) -> None:
    if name == b"content-length":
        length = _number(name, value)
        if head.content_length not in (-1, length):
            raise InvalidAnswerError(
                f"Content-Length: expected one value, got {head.content_length}, {length}"
            )
        head.content_length = length
    elif name == b"inference-header-content-length":
        head.json_length = _number(name, value)
    elif name == b"retry-after":
        head.retry_after = value.decode("latin-1")
    elif name == b"connection":
        head.closes = head.closes or b"close" in value.lower()
    elif name in (b"transfer-encoding", b"content-encoding") and value.lower() != b"identity":
        # Never asked for: a proxy's doing.
        raise InvalidAnswerError(f"{name.decode('latin-1')}: expected none, got {value!r:.100}")


def _number(name: bytes, value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise InvalidAnswerError(f"{name.decode('latin-1')}: expected a number of bytes, got {value!r:.100}")
    return int(value)
