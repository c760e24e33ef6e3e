"""What an end tells the process of its own machine over their connection: JSON, one object a line."""

import json
import socket
from typing import Any

_MAX_BYTES = 1 << 20


def send_line(connection: socket.socket, value: object) -> None:
    """Raises OSError."""
    connection.sendall(json.dumps(value).encode() + b"\n")


def receive_line(connection: socket.socket) -> Any:
    """The other side sends nothing behind a line before it is answered. Raises OSError, ValueError."""
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("expected a line, got the end of the connection")
        text += part
        if len(text) > _MAX_BYTES:
            raise ValueError(f"expected a line of at most {_MAX_BYTES} bytes, got {len(text)}")
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {value!r:.200}")
    return value
