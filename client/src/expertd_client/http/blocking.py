"""HTTP for threads: each call waits in its own."""

import math
import socket
import threading
import time
from functools import partial
from typing import Any, TypeVar

from expertd_client.address import Address
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, ServerUnreachableError
from expertd_client.http.answers import read_json, read_output, read_placed
from expertd_client.http.attempts import Attempts
from expertd_client.http.connection import Connection
from expertd_client.http.requests import Placed, control_request, infer_request
from expertd_client.http.waits import Connect, Sleep, Wait, Waiting
from expertd_client.transport import TransportName

T = TypeVar("T")
_MAX_POLL_SECONDS = 1e6  # poll() takes a C int of milliseconds


class HttpTransport:
    """Calls over HTTP, at most `max_connections` at a time: further ones wait for their turn."""

    name: TransportName = "http"

    def __init__(self, address: Address, max_connections: int, max_retries: int) -> None:
        self.address = address
        self._attempts = Attempts(address, max_retries)
        self._turns = threading.Semaphore(max_connections)

    def infer(self, call: LayerCall, deadline: Deadline) -> None:
        """Have the layer's output written into the memory of `call.output`."""
        request = infer_request(self.address, call, deadline)
        self._run(self._attempts.call(request, partial(read_output, call), deadline), deadline)

    def infer_placed(self, call: LayerCall, placed: Placed, deadline: Deadline) -> None:
        """Have the layer's output written to its place in shared memory."""
        request = infer_request(self.address, call, deadline, placed)
        self._run(self._attempts.call(request, partial(read_placed, call), deadline), deadline)

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Any:
        """A call without tensors: the answer's JSON, or None."""
        request = control_request(self.address, method, path, body)
        return self._run(self._attempts.call(request, read_json, deadline), deadline)

    def close(self) -> None:
        """Close idle connections now, and others once their calls are done."""
        self._attempts.pool.close()

    def _run(self, call: Waiting[T], deadline: Deadline) -> T:
        if self._attempts.pool.closed:
            raise ExpertError("client: expected an open one, got a closed one")
        left = deadline.check()
        if not self._turns.acquire(timeout=None if math.isinf(left) else left):
            raise deadline.error()
        try:
            return run(call, deadline)
        finally:
            self._turns.release()


def run(call: Waiting[T], deadline: Deadline) -> T:
    """Wait in this thread for whatever `call` waits for; its result."""
    try:
        wait = next(call)
        while True:
            try:
                given = _give(wait, deadline)
            except BaseException as error:
                wait = call.throw(error)
            else:
                wait = call.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _give(wait: Wait | Connect | Sleep, deadline: Deadline) -> object:
    if isinstance(wait, Wait):
        return _wait(wait, deadline)
    if isinstance(wait, Connect):
        return _connect(wait.address, deadline)
    time.sleep(min(wait.seconds, deadline.check()))
    return None


def _wait(wait: Wait, deadline: Deadline) -> int:
    while True:
        left = deadline.check()
        milliseconds = 1e3 * min(left, _MAX_POLL_SECONDS)
        if events := wait.connection.poll(wait.events, milliseconds):
            return events


def _connect(address: Address, deadline: Deadline) -> Connection:
    left = deadline.check()
    timeout = None if math.isinf(left) else left
    try:
        if address.path is None:
            return Connection(socket.create_connection((address.host, address.port), timeout))
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(address.path)
        except BaseException:
            sock.close()
            raise
        return Connection(sock)
    except OSError as error:
        deadline.check()
        raise ServerUnreachableError(f"server {address.url}: expected a connection, got {error}") from error
