"""Content-Encoding of requests and responses: gzip and deflate, with a limit on the decompressed size."""

import zlib

from expertd.service.http.protocol.errors import OipError
from expertd.service.inference.limits import BodyLimit
from expertd.service.memory import Buffer
from expertd.service.util.sentences import shown

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_PIECE_BYTES = 64 * 1024
_MAX_MEMBERS = 4096  # 256 MiB in members of 64 KiB, as some tools write; each costs time even if it is empty
ENCODINGS = "gzip, deflate"
_FASTEST = 1  # tensors hardly shrink at any level


def decompress(body: Buffer, content_encoding: str, limit: BodyLimit) -> Buffer:
    """Decompress `body`. Its Content-Encoding may list one coding, besides identity.

    Raises OipError: 415 for another coding or several, 400 for invalid data, 413 as soon as it
    exceeds `limit`.
    """
    names = [name for item in content_encoding.split(",") if (name := item.strip().lower())]
    codings = [name for name in names if name != "identity"]
    if names and not codings:
        return bytes(body)  # its memory may be another request's soon
    if len(codings) != 1 or codings[0] not in _WINDOW_BITS:
        raise OipError(
            415,
            f"Content-Encoding: expected gzip, deflate or identity, got {shown(content_encoding)}",
            headers={"Accept-Encoding": ENCODINGS},
        )
    try:
        return _inflate(body, codings[0], limit)
    except zlib.error as error:
        raise OipError(400, f"body: expected {codings[0]} data, got {error}") from error


def _inflate(body: Buffer, coding: str, limit: BodyLimit) -> bytes:
    """Decompress all gzip members of `body` (RFC 1952, 2.2), or its single deflate stream."""
    chunks: list[bytes] = []
    room, start, members = limit.num_bytes, 0, 0
    while start < len(body) or not members:
        if members and coding == "deflate":
            raise OipError(400, "body: expected one whole deflate stream, got bytes after its end")
        if members == _MAX_MEMBERS:
            raise OipError(
                400, f"body: expected at most {_MAX_MEMBERS} gzip members, got at least {members + 1}"
            )
        decoder = zlib.decompressobj(_WINDOW_BITS[coding])
        # In pieces: zlib copies the bytes after the end of a member, and members may be tiny.
        while not decoder.eof:
            if start >= len(body):
                raise OipError(400, f"body: expected a whole {coding} stream, got a part of it")
            chunk = decoder.decompress(body[start : start + _PIECE_BYTES], room + 1)
            room -= len(chunk)
            limit.check(limit.num_bytes - room, decompressed=True)
            chunks.append(chunk)
            start += _PIECE_BYTES
        start = min(start, len(body)) - len(decoder.unused_data)
        members += 1
    return b"".join(chunks)


def requested_encoding(accept_encoding: str) -> str | None:
    """The response's encoding: gzip or deflate if Accept-Encoding is exactly that name, else None.

    HTTP libraries send every encoding they can decode, and compressing tensors costs far more time than it
    saves on a local network. So only a single name counts as a request for compression.
    """
    name = accept_encoding.strip().lower()
    return name if name in ("gzip", "deflate") else None


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether Accept-Encoding allows gzip, by name or else by `*`, with a weight above 0."""
    allowed: dict[str, bool] = {}
    for item in accept_encoding.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        allowed[name] = not any(part.startswith("q=") and not part[2:].strip("0.") for part in parameters)
    return allowed.get("gzip", allowed.get("*", False))


def compress(parts: list[bytes | memoryview], encoding: str) -> bytes:
    """The joined `parts`, compressed with `encoding` ("gzip" or "deflate")."""
    encoder = zlib.compressobj(_FASTEST, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return b"".join([*(encoder.compress(part) for part in parts), encoder.flush()])
