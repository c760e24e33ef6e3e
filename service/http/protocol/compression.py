"""Content-Encoding of requests and responses: gzip and deflate, with a limit on what a body may grow to."""

import zlib

from expertd.service.http.protocol.errors import OipError
from expertd.service.sentences import shown

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
ENCODINGS = "gzip, deflate"
_FASTEST = 1  # tensors hardly shrink: a higher level buys time spent, not bytes saved


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """`body` decoded by the Content-Encoding `encoding`.

    Raises OipError: 415 for another encoding, 400 for bytes that are not of it, 413 past `limit` bytes.
    """
    name = encoding.strip().lower()
    if name == "identity":
        return body
    if name not in _WINDOW_BITS:
        raise OipError(
            415,
            f"Content-Encoding: expected gzip, deflate or identity, got {shown(encoding)}",
            headers={"Accept-Encoding": ENCODINGS},
        )
    decoder = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        decoded = decoder.decompress(body, limit + 1)
    except zlib.error as error:
        raise OipError(400, f"body: expected {name} data, got {error}") from error
    if len(decoded) > limit:
        raise OipError(413, f"body: expected at most {limit} bytes when decompressed, got more")
    if not decoder.eof or decoder.unused_data:
        got = "bytes after its end" if decoder.eof else "a part of it"
        raise OipError(400, f"body: expected one whole {name} stream, got {got}")
    return decoded


def asked_encoding(accept_encoding: str) -> str | None:
    """The encoding to answer in: gzip or deflate where the caller names exactly that one, else None.

    HTTP libraries list all they can decode with every request; only a caller that names a single one is
    taken to want tensors compressed, for it costs far more time than it saves on a local network.
    """
    name = accept_encoding.strip().lower()
    return name if name in ("gzip", "deflate") else None


def compress(parts: list[bytes | memoryview], encoding: str) -> bytes:
    """The joined `parts`, encoded as `encoding` ("gzip" or "deflate")."""
    encoder = zlib.compressobj(_FASTEST, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return b"".join([*(encoder.compress(part) for part in parts), encoder.flush()])
