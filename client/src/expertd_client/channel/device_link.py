"""The connection of a channel of device calls, and its memories' descriptors; nothing of it needs a GPU."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from expertd_client.channel.claiming import exchange
from expertd_client.channel.layout import READY, VERSION
from expertd_client.deadline import Deadline
from expertd_client.errors import (
    ExpertError,
    InvalidRequestError,
    ServerUnreachableError,
    TransportUnavailableError,
)
from expertd_client.retries import with_retries
from expertd_client.steps import Steps, run

logger = logging.getLogger("expertd_client")


@dataclass(frozen=True, slots=True)
class CallSizes:
    """As the server says it; see its docs/internals/channels.md."""

    num_slots: int
    max_tokens: int
    hidden_size: int
    top_k: int
    data_bytes: int
    header_bytes: int
    rows_offset: int
    slot_bytes: int
    topk_ids_offset: int
    topk_weights_offset: int
    answer_bytes: int
    output_bytes: int


class DeviceLink:
    """A thread finds another server when the present one has gone, and hands it both memories' descriptors.

    ask      has a server open a channel; what it answers
    share    allocates memory for answers, by its size in bytes; it has a `descriptor`
    answers  what `share` has made
    calls    the descriptor of the server's memory for calls
    """

    def __init__(
        self, ask: Callable[[Deadline], Any], share: Callable[[int], Any], deadline: Deadline
    ) -> None:
        self._ask, self._deadline = ask, deadline
        path, token, self.geometry = _read(ask(deadline))
        self.answers = share(self.geometry.answer_bytes)
        self._descriptors = [self.answers.descriptor()]
        try:
            self._connection, self.calls = _claim(path, token, self._descriptors, deadline)
        except BaseException:
            os.close(self._descriptors[0])
            raise
        self._descriptors.append(self.calls)
        self.is_closed = False
        self._thread: threading.Thread | None = None

    def start(self, has_failed: Callable[[], bool]) -> None:
        """Watch the connection, until it `has_failed` for good or is closed."""
        self._thread = threading.Thread(
            target=self._watch, args=(has_failed,), name="expertd-device-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the connection, and let go of the descriptors."""
        self.is_closed = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is not None:
            self._thread.join()
        self._connection.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _watch(self, has_failed: Callable[[], bool]) -> None:
        """Without CUDA: a call may be waiting, and so the driver."""
        while not self.is_closed:
            with suppress(OSError):
                while self._connection.recv(1):
                    pass
            if self.is_closed or has_failed():
                return
            self._connection.close()
            try:
                self._connection = self._reconnect()
            except ExpertError as error:
                logger.error("channel: calls get no answers any more: %s", error)
                return

    def _reconnect(self) -> socket.socket:
        deadline = Deadline(self._deadline.seconds, self._deadline.retry_seconds)
        lost = ServerUnreachableError("channel: the server has closed it")
        return run(with_retries(lambda: self._again(deadline), 0, deadline, lost))

    def _again(self, deadline: Deadline) -> Steps[socket.socket]:
        """A connection to a server that has both memories."""
        if self.is_closed:
            raise InvalidRequestError("channel: expected an open one, got it closed")
        # Once, so that `close` does not wait for repetitions.
        path, token, geometry = _read(self._ask(deadline.once()))
        if geometry != self.geometry:
            raise InvalidRequestError(f"channel: expected {self.geometry}, as before, got {geometry}")
        try:
            connection, descriptor = _claim(path, token, self._descriptors, deadline)
        except TransportUnavailableError as error:
            raise ServerUnreachableError(str(error)) from error
        os.close(descriptor)
        return connection
        yield  # as Steps


def _read(opened: Any) -> tuple[str, bytes, CallSizes]:
    """Socket, token and sizes of what the server has answered. Raises TransportUnavailableError."""
    try:
        version, told = opened["version"], opened["geometry"]
        sizes = CallSizes(**{name: int(told[name]) for name in CallSizes.__slots__})
        path, token = str(opened["socket"]), bytes.fromhex(opened["token"])
    except (KeyError, TypeError, ValueError) as error:
        raise TransportUnavailableError(f"answer: expected a channel, got {opened!r:.200}") from error
    if version != VERSION:
        raise TransportUnavailableError(f"version of channels: expected {VERSION}, got {version!r}")
    return path, token, sizes


def _claim(
    path: str, token: bytes, descriptors: Sequence[int], deadline: Deadline
) -> tuple[socket.socket, int]:
    """The connection that the channel lives as long as, and the descriptor of the server's memory for calls.

    descriptors  of the memory for answers, and of that for calls, if there is one already
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(deadline.check())
        (descriptor,) = exchange(connection, path, token, (1,))
        try:
            socket.send_fds(connection, [b"\0"], descriptors)
            if connection.recv(1) != READY:
                text = "channel: expected a server that answers calls, got it closed"
                raise TransportUnavailableError(text)
        except BaseException:
            os.close(descriptor)
            raise
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and not isinstance(error, ExpertError):
            text = f"socket of channels {path}: expected a connection, got {error}"
            raise TransportUnavailableError(text) from error
        raise
    return connection, descriptor
