"""The Unix socket at which callers claim channels; each connection is the life of one channel."""

import asyncio
import grp
import logging
import os
import re
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path

from expertd.service.channels.call_channel import CallChannel
from expertd.service.channels.channel import ServerChannel
from expertd.service.channels.hub import ChannelHub
from expertd.service.util.sentences import shown
from expertd.service.util.socket_files import SocketFile, listen_at
from expertd_client.channel.layout import GREETING, READY, TOKEN_BYTES

logger = logging.getLogger(__name__)

_BACKLOG = 128
_TOKEN_SECONDS = 10.0
_RELEASE_SECONDS = 5.0  # after which a device hangs
_MAX_STRANGERS = 64  # connections that have not sent a token
_CREDENTIALS = struct.Struct("iII")  # SO_PEERCRED: pid, uid, gid
_MAX_GROUPS = 2**32 - 1  # which itself means: do not change it
_RETRY_SECONDS = 0.1  # after an error such as too many open files


class ChannelListener:
    """Listens at `path` for the owners of channels; `group`: see `group_number`.

    Raises OSError, with a sentence, if that is not possible.
    """

    def __init__(self, path: Path, group: str | None = None) -> None:
        self.path = path
        self._strangers = 0
        self._file: SocketFile | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        number = group_number(group)
        try:
            self._socket, self._file = listen_at(path, _BACKLOG, number)
        except OSError as error:
            raise OSError(f"channels.socket: {error}") from error
        self._socket.setblocking(False)

    def start(self, hub: ChannelHub) -> None:
        """Accept the owners of the channels of `hub`, on the running event loop."""
        self._hub = hub
        hub.socket = self.path
        self._spawn(self._accept())

    async def stop(self) -> None:
        """Close every connection, and remove the socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.remove()

    def remove(self) -> None:
        """Listen no more, and remove the socket."""
        if self._file is not None:
            self._file.remove()
            self._socket.close()
            self._file = None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                logger.error("channels.socket: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if self._strangers >= _MAX_STRANGERS:
                connection.close()
            else:
                self._strangers += 1
                self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Hand a channel over to its owner, and close it when the owner is gone."""
        channel: ServerChannel | CallChannel | None = None
        why = "its owner broke the connection"
        with connection:
            pid, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            try:
                token = await self._token(connection)
                if not token:  # somebody looked whether a server listens
                    return
                channel = self._hub.claim(token, pid, partial(shut_down, connection))
                if channel is None:
                    logger.info("channels.socket: process %d of user %d sent an unknown token", pid, uid)
                    return
                hand_over(connection, channel)
                claimed = (channel.id, channel.served, pid, uid)
                logger.info("channel %s of %s claimed by process %d of user %d", *claimed)
                if isinstance(channel, CallChannel):
                    await channel.connect(await _descriptors(connection))
                    await asyncio.get_running_loop().sock_sendall(connection, READY)
                got = await asyncio.get_running_loop().sock_recv(connection, 1)
                why = "its owner sent more than the token" if got else f"process {pid} has closed it"
            except (OSError, RuntimeError, ValueError) as error:  # TimeoutError among them
                why = f"its connection failed: {error}"
            finally:
                if channel is not None:
                    self._hub.close(channel, why)
                if isinstance(channel, CallChannel):  # its caller may be told only then
                    with suppress(TimeoutError):
                        await asyncio.wait_for(channel.released.wait(), _RELEASE_SECONDS)

    async def _token(self, connection: socket.socket) -> bytes:
        """What the caller sends, up to the length of a token."""
        loop, token = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(_TOKEN_SECONDS):
                while len(token) < TOKEN_BYTES:
                    received = await loop.sock_recv(connection, TOKEN_BYTES - len(token))
                    if not received:
                        break
                    token += received
        finally:
            self._strangers -= 1
        return token


async def _descriptors(connection: socket.socket) -> list[int]:
    """What the caller of a channel of device calls sends: the memory for answers, and maybe that for calls.

    Raises OSError.
    """
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        async with asyncio.timeout(_TOKEN_SECONDS):
            await readable.wait()
    finally:
        loop.remove_reader(connection)
    return socket.recv_fds(connection, 1, 2)[1]


def hand_over(connection: socket.socket, channel: ServerChannel | CallChannel) -> None:
    """Send a claimed channel's descriptors to its owner. Raises OSError."""
    descriptors = channel.take_descriptors()
    try:
        socket.send_fds(connection, [GREETING], descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def shut_down(connection: socket.socket) -> None:
    """End the connection; the task that waits for its end closes it."""
    with suppress(OSError):  # the owner is gone already
        connection.shutdown(socket.SHUT_RDWR)


def group_number(group: str | None) -> int | None:
    """That of a group's name, or of its number as a text, which needs no name; None: that of no group.

    Raises OSError, with a sentence.
    """
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):  # a name with a null character is none
        if re.fullmatch("[0-9]{1,10}", group) and int(group) < _MAX_GROUPS:
            return int(group)
    got = shown(group)
    raise OSError(f"channels.group: expected the name of a group, or its number, got {got}")
