"""The processes that own channels for callers on other machines, and carry their requests over NIXL."""

import asyncio
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from expertd.service.channels.channel import ServerChannel
from expertd.service.channels.hub import ChannelHub, Entry
from expertd.service.channels.listener import hand_over, shut_down
from expertd.service.channels.opening import NixlMemory
from expertd.service.engine.errors import ChannelLimitError, ChannelRefusedError

logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_END_SECONDS = 5.0  # before a process that does not end is killed
_RETRY_SECONDS = 1
_MAX_BYTES = 1 << 20


class Relays:
    """One process for each channel: with UCX, whoever reaches an agent can write to its process's memory.

    A process owns its channel as a caller on this machine would, and so its memory is all that it shares
    with the server. All methods belong to the event loop.
    """

    def __init__(self, hub: ChannelHub) -> None:
        self._hub = hub
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, entry: Entry) -> dict[str, Any]:
        """Start the process that owns a channel that was just opened; how the caller's end reaches it.

        Raises ChannelRefusedError if it cannot reach the caller's end, ChannelLimitError if it does not
        start. The channel is closed then.
        """
        channel, memory = entry.channel, entry.opening.memory
        assert isinstance(channel, ServerChannel)
        assert isinstance(memory, NixlMemory)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                process = await asyncio.to_thread(_started, theirs)
            assert entry.token is not None
            if self._hub.claim(entry.token, process.pid, partial(shut_down, ours)) is None:
                raise ChannelRefusedError(f"channel {channel.id}: expected an open one, got a closed one")
            hand_over(ours, channel)
            peer = {"byte_size": memory.byte_size, "address": memory.address, "metadata": memory.metadata}
            question = json.dumps({"geometry": channel.geometry.shown(), "nixl": peer}).encode() + b"\n"
            await asyncio.get_running_loop().sock_sendall(ours, question)
            async with asyncio.timeout(_START_SECONDS):
                answer = await _answer(ours)
            if "error" in answer:
                raise ChannelRefusedError(answer["error"])
        except BaseException as error:
            self._hub.close(channel, f"its process for NIXL did not start: {error}")
            ours.close()
            if process is not None:
                self._spawn(_ended(process))
            if isinstance(error, OSError | ValueError):  # TimeoutError among them
                text = f"channels.nixl: expected a process for the channel, got {error or 'none in time'}"
                raise ChannelLimitError(text, _RETRY_SECONDS) from error
            raise
        logger.info(
            "channel %s of %s carried over NIXL by process %d", channel.id, channel.served, process.pid
        )
        self._spawn(self._own(channel, ours, process))
        return answer

    async def stop(self) -> None:
        """Wait for the processes of channels that are closed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _own(
        self, channel: ServerChannel, ours: socket.socket, process: "subprocess.Popen[bytes]"
    ) -> None:
        """Close a channel when its process has ended, and the other way round."""
        why = f"process {process.pid} has closed it"
        with ours:
            try:
                if text := await asyncio.get_running_loop().sock_recv(ours, _MAX_BYTES):
                    why = json.loads(text)["error"]
            except (KeyError, OSError, TypeError, ValueError) as error:
                why = f"its connection failed: {error}"
            finally:
                self._hub.close(channel, why)
        await _ended(process)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _started(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "expertd_client.nixl", "server", str(theirs.fileno())]
    # In a group of its own: Ctrl-C is for the server, which lets requests end.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), process_group=0)


async def _answer(connection: socket.socket) -> dict[str, Any]:
    """What the process says first. Raises OSError, ValueError."""
    text = b""
    while not text.endswith(b"\n") and len(text) <= _MAX_BYTES:
        part = await asyncio.get_running_loop().sock_recv(connection, _MAX_BYTES)
        if not part:
            raise ConnectionError("one that has ended")
        text += part
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError("one that says nothing")
    return answer


async def _ended(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a process whose connection has ended."""
    try:
        await asyncio.to_thread(process.wait, _END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _END_SECONDS)
