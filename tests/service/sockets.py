"""Raw HTTP: sends given bytes, and parses the responses."""

import json
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass

INFER = "/v2/models/tiny/infer"


@dataclass(frozen=True)
class Answer:
    """One response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """The text of an error, after checking its format."""
        assert self.headers["content-type"] == "application/json"
        body = json.loads(self.body)
        assert list(body) == ["error"]
        return str(body["error"])


def head(line: str, *headers: str, host: str | None = "x") -> bytes:
    """A request's head: its line, Host, other headers, blank line."""
    lines = [line, *([f"Host: {host}"] if host is not None else []), *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def infer(body: bytes, length: int, *headers: str) -> bytes:
    """A whole infer request to the model "tiny"."""
    more = (f"Content-Length: {len(body)}", f"Inference-Header-Content-Length: {length}", *headers)
    return head(f"POST {INFER} HTTP/1.1", *more) + body


def answers(data: bytes) -> list[Answer]:
    """All responses in `data`, which must end with the last one."""
    found = []
    while data:
        top, _, data = data.partition(b"\r\n\r\n")
        line, *lines = top.decode("latin-1").split("\r\n")
        headers = dict(header.lower().split(": ", 1) for header in lines)
        length = int(headers.get("content-length", 0))
        assert len(data) >= length, "the last response is complete"
        found.append(Answer(int(line.split(" ")[1]), headers, data[:length]))
        data = data[length:]
    return found


def free_port() -> int:
    """One that nobody uses at present; below those that the system gives to whoever asks for any."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """A connection to the loopback interface; `receive_buffer`: bytes of it that the system holds, about."""
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    try:
        sock.connect(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock


def read_to_end(sock: socket.socket) -> list[Answer]:
    """Every response until the server closes the connection."""
    data = bytearray()  # adding to bytes would copy all of them, for every 16 KiB of TLS
    while received := sock.recv(1 << 20):
        data += received
    return answers(bytes(data))


def read_answer(sock: socket.socket) -> Answer:
    """The next response; the connection stays open."""
    data = bytearray()

    def receive() -> None:
        received = sock.recv(1 << 20)
        assert received, f"expected a response, got {len(data)} bytes: {bytes(data[:1000])!r}"
        data.extend(received)

    while (end := data.find(b"\r\n\r\n")) < 0:
        receive()
    lines = bytes(data[:end]).lower().split(b"\r\n")
    length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    while len(data) < end + 4 + length:
        receive()
    (answer,) = answers(bytes(data))
    return answer


def ask(port: int, data: bytes) -> list[Answer]:
    """Send `data` on a new connection, and read until the server closes it."""
    with connect(port) as sock:
        sock.sendall(data)
        return read_to_end(sock)
