"""HTTP/2 as bytes, for what no gRPC client sends."""

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def settings(**changes: int) -> bytes:
    """The client's first bytes; `initial_window_size`: how much of each answer it receives unasked."""
    numbers = {"initial_window_size": 4}
    return PREFACE + frame(
        SETTINGS, 0, 0, b"".join(struct.pack(">HI", numbers[name], value) for name, value in changes.items())
    )


def unary(stream: int, path: bytes, message: bytes = b"") -> bytes:
    """A whole call."""
    data = struct.pack(">BI", 0, len(message)) + message
    return frame(HEADERS, END_HEADERS, stream, call(path)) + frame(DATA, END_STREAM, stream, data)


def window_update(stream: int, num_bytes: int) -> bytes:
    """Let the server send so many bytes of the answer."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes))


def call(path: bytes, authorization: bytes = b"none") -> bytes:
    """The header fields of a call in HPACK, as literals of at most 126 bytes."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"authorization", authorization),
    ]
    return b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in headers
    )
