"""HTTP for asyncio: calls wait in the event loop. Works with uvloop too."""

import asyncio
import math
import socket
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
from expertd_client.http.waits import READ, WRITE, Connect, Sleep, Wait, Waiting
from expertd_client.transport import TransportName

T = TypeVar("T")


class AsyncHttpTransport:
    """Calls over HTTP from one event loop, at most `max_connections` at a time."""

    name: TransportName = "http"

    def __init__(self, address: Address, max_connections: int, max_retries: int) -> None:
        self.address = address
        self._attempts = Attempts(address, max_retries)
        self._turns = asyncio.Semaphore(max_connections)

    async def infer(self, call: LayerCall, deadline: Deadline) -> None:
        """Have the layer's output written into the memory of `call.output`."""
        request = infer_request(self.address, call, deadline)
        await self._run(self._attempts.call(request, partial(read_output, call), deadline), deadline)

    async def infer_placed(self, call: LayerCall, placed: Placed, deadline: Deadline) -> None:
        """Have the layer's output written to its place in shared memory."""
        request = infer_request(self.address, call, deadline, placed)
        await self._run(self._attempts.call(request, partial(read_placed, call), deadline), deadline)

    async def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Any:
        """A call without tensors: the answer's JSON, or None."""
        request = control_request(self.address, method, path, body)
        return await self._run(self._attempts.call(request, read_json, deadline), deadline)

    def close(self) -> None:
        """Close idle connections now, and others once their calls are done."""
        self._attempts.pool.close()

    async def _run(self, call: Waiting[T], deadline: Deadline) -> T:
        if self._attempts.pool.closed:
            raise ExpertError("client: expected an open one, got a closed one")
        if self._turns.locked():
            await _within(deadline, self._turns.acquire())
        else:
            await self._turns.acquire()
        try:
            return await run(call, deadline)
        finally:
            self._turns.release()


async def run(call: Waiting[T], deadline: Deadline) -> T:
    """Wait in the event loop for whatever `call` waits for; its result."""
    try:
        wait = next(call)
        while True:
            try:
                given = await _give(wait, deadline)
            except BaseException as error:
                wait = call.throw(error)
            else:
                wait = call.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _give(wait: Wait | Connect | Sleep, deadline: Deadline) -> object:
    if isinstance(wait, Wait):
        return await _wait(wait, deadline)
    if isinstance(wait, Connect):
        return await _within(deadline, _connect(wait.address))
    await asyncio.sleep(min(wait.seconds, deadline.check()))
    return None


async def _wait(wait: Wait, deadline: Deadline) -> int:
    left = deadline.check()
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[int] = loop.create_future()
    sock = wait.connection.sock
    timer = None if math.isinf(left) else loop.call_later(left, _set, ready, 0)
    loop.add_reader(sock, _set, ready, READ)
    if wait.events & WRITE:
        loop.add_writer(sock, _set, ready, WRITE)
    try:
        events = await ready
    finally:
        loop.remove_reader(sock)
        if wait.events & WRITE:
            loop.remove_writer(sock)
        if timer is not None:
            timer.cancel()
    if not events:
        raise deadline.error()
    return events


def _set(ready: "asyncio.Future[int]", events: int) -> None:
    if not ready.done():
        ready.set_result(events)


async def _connect(address: Address) -> Connection:
    loop = asyncio.get_running_loop()
    error: Exception = OSError("no address")
    try:
        if address.path is not None:
            return await _connected(socket.AF_UNIX, address.path)
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        for family, _, _, _, place in found:
            try:
                return await _connected(family, place)
            except OSError as failed:
                error = failed
    except OSError as failed:
        error = failed
    raise ServerUnreachableError(f"server {address.url}: expected a connection, got {error}") from error


async def _connected(family: int, place: Any) -> Connection:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, place)
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


async def _within(deadline: Deadline, waiting: Any) -> Any:
    left = deadline.remaining()
    try:
        return await asyncio.wait_for(waiting, None if math.isinf(left) else left)
    except asyncio.TimeoutError:
        raise deadline.error() from None
