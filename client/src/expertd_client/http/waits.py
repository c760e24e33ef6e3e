"""What a call over HTTP waits for: connections, and what can be done with them. Works with uvloop too."""

import asyncio
import math
import select
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from expertd_client.address import Address
from expertd_client.deadline import Deadline
from expertd_client.errors import ServerUnreachableError
from expertd_client.http.connection import Connection, open_socket, with_tls
from expertd_client.steps import settle, settled

READ = select.POLLIN
WRITE = select.POLLOUT

_MAX_POLL_SECONDS = 1e6  # poll() takes a C int of milliseconds


@dataclass(slots=True)
class Ready:
    """Until the connection can be read or (`events` has both bits) written; gives the bits that hold.

    Raises DeadlineError.
    """

    connection: Connection
    events: int

    def in_thread(self) -> int:
        """As Wait.in_thread."""
        connection = self.connection
        while True:
            # What has come in time may be read later, by a caller that was busy.
            left = connection.deadline.remaining() if self.events == READ else connection.deadline.check()
            if events := connection.poll(self.events, 1e3 * min(max(0.0, left), _MAX_POLL_SECONDS)):
                return events
            connection.deadline.check()

    async def in_loop(self) -> int:
        """As Wait.in_loop."""
        sock, deadline = self.connection.sock, self.connection.deadline
        left = deadline.check()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[int] = loop.create_future()
        loop.add_reader(sock, settle, ready, READ)
        if self.events & WRITE:
            loop.add_writer(sock, settle, ready, WRITE)
        try:
            events = await settled(ready, left, 0)
        finally:
            loop.remove_reader(sock)
            if self.events & WRITE:
                loop.remove_writer(sock)
        if not events:
            raise deadline.error()
        return events

    def is_over(self) -> bool:
        """As Wait.is_over; sending is work, also if the other side is slow."""
        return bool(
            self.events & WRITE or self.connection.poll(READ, 0) or self.connection.deadline.remaining() <= 0
        )


@dataclass(slots=True)
class Connect:
    """Until there is a new connection, which it gives. Raises ServerUnreachableError, DeadlineError."""

    address: Address
    deadline: Deadline

    def in_thread(self) -> Connection:
        """As Wait.in_thread."""
        address = self.address
        error = OSError("no address")
        try:
            if address.path is not None:
                return self._connected(socket.AF_UNIX, address.path)
            for family, _, _, _, place in socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM
            ):
                try:
                    return self._connected(family, place)
                except OSError as failed:
                    self.deadline.check()
                    error = failed
        except OSError as failed:
            self.deadline.check()
            error = failed
        raise self._unreachable(error) from error

    async def in_loop(self) -> Connection:
        """As Wait.in_loop."""
        left = self.deadline.check()
        connecting = asyncio.ensure_future(self._first())
        try:  # asyncio.wait_for drops a cancellation at the moment of the connection, before Python 3.12
            done, _ = await asyncio.wait({connecting}, timeout=None if math.isinf(left) else left)
            if done:
                return connecting.result()
        except BaseException:
            _give_up(connecting)
            raise
        _give_up(connecting)
        raise self.deadline.error()

    def is_over(self) -> bool:
        """As Wait.is_over: connecting is work."""
        return True

    async def _first(self) -> Connection:
        """A connection to the first of the host's addresses that has one."""
        address, loop = self.address, asyncio.get_running_loop()
        error = OSError("no address")
        try:
            if address.path is not None:
                return await _connected(socket.AF_UNIX, address.path, address)
            found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            for family, _, _, _, place in found:
                try:
                    return await _connected(family, place, address)
                except OSError as failed:
                    error = failed
        except OSError as failed:
            error = failed
        raise self._unreachable(error) from error

    def _connected(self, family: int, place: Any) -> Connection:
        sock = open_socket(family)
        try:
            self._limit(sock)
            sock.connect(place)
            if self.address.tls is not None:
                sock = secure = with_tls(sock, self.address.tls, self.address.host)
                self._limit(secure)
                secure.do_handshake()
        except BaseException:
            sock.close()
            raise
        return Connection(sock)

    def _limit(self, sock: socket.socket) -> None:
        left = self.deadline.check()
        sock.settimeout(None if math.isinf(left) else left)

    def _unreachable(self, error: OSError) -> ServerUnreachableError:
        return ServerUnreachableError(f"server {self.address.url}: expected a connection, got {error}")


def _give_up(connecting: "asyncio.Future[Connection]") -> None:
    def close(ended: "asyncio.Future[Connection]") -> None:
        if not ended.cancelled() and ended.exception() is None:
            ended.result().close()

    connecting.cancel()
    connecting.add_done_callback(close)


async def _connected(family: int, place: Any, address: Address) -> Connection:
    sock = open_socket(family)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, place)
        if address.tls is not None:
            sock = secure = with_tls(sock, address.tls, address.host)
            await _shake_hands(secure)
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock.do_handshake()
            return
        except ssl.SSLWantReadError:
            add, remove = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            add, remove = loop.add_writer, loop.remove_writer
        ready: asyncio.Future[int] = loop.create_future()
        add(sock, settle, ready, READ)
        try:
            await ready
        finally:
            remove(sock)
