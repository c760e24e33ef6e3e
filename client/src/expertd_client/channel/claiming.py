"""The connection that a channel lives as long as, and the memory that comes over it."""

import mmap
import os
import socket
import weakref
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from expertd_client.channel.layout import GREETING, VERSION
from expertd_client.deadline import Deadline
from expertd_client.errors import TransportUnavailableError

_DESCRIPTORS = 4
_SECONDS = 10.0  # after which the server gives an unclaimed channel up


@dataclass(slots=True)
class Claimed:
    """A channel that belongs to this process; `data` is None for memory of a GPU."""

    id: str
    num_slots: int
    control: mmap.mmap
    data: mmap.mmap | None
    bell: int
    answers: int
    connection: socket.socket


def claim(opened: Any, deadline: Deadline) -> Claimed:
    """Claim the channel that POST /v1/channels answered with.

    Raises TransportUnavailableError if its socket cannot be reached from here, or speaks another version;
    DeadlineError.
    """
    try:
        version, path, token = opened["version"], str(opened["socket"]), bytes.fromhex(opened["token"])
        geometry = opened["geometry"]
        sizes = {name: int(geometry[name]) for name in ("num_slots", "control_bytes", "data_bytes")}
    except (KeyError, TypeError, ValueError) as error:
        raise TransportUnavailableError(f"answer: expected a channel, got {opened!r:.200}") from error
    if version != VERSION:
        raise TransportUnavailableError(f"version of channels: expected {VERSION}, got {version!r}")
    seconds = min(_SECONDS, deadline.check())
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _connections.add(connection)
    try:
        connection.settimeout(seconds)
        descriptors = _exchange(connection, path, token)
        return _mapped(opened, sizes, descriptors, connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | ValueError):
            deadline.check()
            text = f"socket of channels {path}: expected a connection, got {error}"
            raise TransportUnavailableError(text) from error
        raise


def _exchange(connection: socket.socket, path: str, token: bytes) -> list[int]:
    """Send the token; the descriptors that come back."""
    connection.connect(path)
    connection.sendall(token)
    numbers = array("i")
    space = socket.CMSG_SPACE(_DESCRIPTORS * numbers.itemsize)
    # socket.recv_fds ignores its flags; without this one, the descriptors live on in programs that we start.
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    greeting, ancillary, _, _ = connection.recvmsg(len(GREETING), space, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    descriptors = numbers.tolist()
    if greeting != GREETING or len(descriptors) not in (_DESCRIPTORS - 1, _DESCRIPTORS):
        for descriptor in descriptors:
            os.close(descriptor)
        got = f"{greeting!r} and {len(descriptors)} descriptors"
        raise TransportUnavailableError(f"socket of channels {path}: expected a claimed channel, got {got}")
    return descriptors


def _mapped(
    opened: Mapping[str, Any], sizes: Mapping[str, int], descriptors: list[int], connection: socket.socket
) -> Claimed:
    control, *data, bell, answers = descriptors
    try:
        control_map = mmap.mmap(control, sizes["control_bytes"])
        data_map = mmap.mmap(data[0], sizes["data_bytes"]) if data else None
    except BaseException:
        os.close(bell)
        os.close(answers)
        raise
    finally:
        os.close(control)
        for descriptor in data:
            os.close(descriptor)
    connection.setblocking(False)
    return Claimed(
        str(opened.get("id")), sizes["num_slots"], control_map, data_map, bell, answers, connection
    )


_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close what a fork has copied: it would keep channels open after the end of the parent."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
