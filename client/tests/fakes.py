"""Servers that do to a client what real ones seldom do."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """A request as it came: its line, headers (lower case), JSON and tensors."""

    line: str
    headers: dict[str, str]
    json: Any
    tensors: bytes


class Peer:
    """A client's connection, as a server sees it; `number` counts connections from 0."""

    def __init__(self, sock: socket.socket, number: int, requests: list[Request]) -> None:
        self.sock = sock
        self.number = number
        self._requests = requests
        self._received = b""

    def head(self) -> tuple[str, dict[str, str]]:
        """Receive a request's line and headers only."""
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        return line, dict(header.lower().split(": ", 1) for header in lines)

    def request(self) -> Request:
        """Receive a whole request."""
        line, headers = self.head()
        length = int(headers.get("content-length", 0))
        while len(self._received) < length:
            self._receive()
        body, self._received = self._received[:length], self._received[length:]
        split = int(headers.get("inference-header-content-length", length))
        request = Request(line, headers, json.loads(body[:split]) if split else None, body[split:])
        self._requests.append(request)
        return request

    def skip(self, count: int) -> None:
        """Receive `count` bytes of a body and forget them."""
        self.sock.settimeout(60)
        count -= len(self._received)
        self._received = b""
        while count > 0:
            count -= len(self.sock.recv(1 << 20))

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def close(self) -> None:
        """Close at once, before the handler returns."""
        self.sock.shutdown(socket.SHUT_RDWR)

    def is_closed_by_client(self) -> bool:
        """Wait for the client's next bytes, or for its end of the connection: whether that is it."""
        self.sock.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            return not self.sock.recv(1)
        return True

    def _receive(self) -> None:
        received = self.sock.recv(1 << 20)
        if not received:
            raise EOFError
        self._received += received


Handler = Callable[[Peer], None]


class FakeServer:
    """Listens on loopback, or on a Unix socket, and gives each connection to `handler` in a thread."""

    def __init__(self, handler: Handler, path: Path | None) -> None:
        self.requests: list[Request] = []
        self.errors: list[BaseException] = []
        self.num_connections = 0
        self._handler = handler
        self._threads: list[threading.Thread] = []
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen()
            self.url = f"unix:{path}"
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def stop(self) -> None:
        """Accept no more, and wait for all handlers."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a handler still waits for its client"

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            peer = Peer(sock, self.num_connections, self.requests)
            self.num_connections += 1
            thread = threading.Thread(target=self._handle, args=(peer,))
            self._threads.append(thread)
            thread.start()

    def _handle(self, peer: Peer) -> None:
        try:
            self._handler(peer)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            pass  # the client has left
        except BaseException as error:
            self.errors.append(error)
        finally:
            peer.sock.close()


@contextmanager
def fake_server(handler: Handler, path: Path | None = None) -> Iterator[FakeServer]:
    """A server for a block. Close clients within the block: it waits for the handlers."""
    server = FakeServer(handler, path)
    try:
        yield server
    finally:
        server.stop()
    assert server.errors == []


def echo(request: Request) -> bytes:
    """The answer of a layer that computes the identity."""
    entry = request.json["inputs"][0]
    size = entry["parameters"]["binary_data_size"]
    return output(entry["shape"], entry["datatype"], request.tensors[:size])


def output(shape: list[int], datatype: str, data: bytes, *headers: str, **changes: Any) -> bytes:
    """A binary answer; `changes` replace keys of its output's JSON."""
    entry = {"name": "hidden_states", "shape": shape, "datatype": datatype, **changes}
    text = json.dumps({"model_name": "m", "outputs": [entry]}).encode()
    length = f"Inference-Header-Content-Length: {len(text)}"
    return answer(200, text + data, length, *headers)


def answer(status: int, body: bytes = b"", *headers: str) -> bytes:
    """An HTTP response."""
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def refusal(status: int, text: str, *headers: str) -> bytes:
    """An error in the protocol's form."""
    return answer(status, json.dumps({"error": text}).encode(), *headers)


def echoing(peer: Peer) -> None:
    """Answer every request of a connection with its hidden states."""
    while True:
        peer.send(echo(peer.request()))


def answering(*answers: bytes) -> Handler:
    """Gives these answers in turn, and then echoes."""
    numbers = count()

    def handle(peer: Peer) -> None:
        while True:
            request = peer.request()
            number = next(numbers)
            peer.send(answers[number] if number < len(answers) else echo(request))

    return handle
