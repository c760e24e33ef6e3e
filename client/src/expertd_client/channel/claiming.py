"""The connection that a channel lives as long as, and the memory that comes over it."""

import ctypes
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

DESCRIPTORS = 4  # control memory, data, the eventfd, the pipe of answers; no data if that is a GPU's
_MAP_FIXED = 0x10
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


def claim(opened: Any, deadline: Deadline, memory: mmap.mmap | None = None) -> Claimed:
    """Claim the channel that POST /v1/channels answered with.

    `memory`: of a channel that has ended, for the data of this one, which gets its bytes.

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
    try:
        connection.settimeout(seconds)
        descriptors = exchange(connection, path, token, (DESCRIPTORS - 1, DESCRIPTORS))
        return mapped(str(opened.get("id")), sizes, descriptors, connection, memory)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | ValueError):
            deadline.check()
            text = f"socket of channels {path}: expected a connection, got {error}"
            raise TransportUnavailableError(text) from error
        raise


def exchange(connection: socket.socket, path: str, token: bytes, counts: tuple[int, ...]) -> list[int]:
    """Connect, and send the token; the descriptors that come back, in a number that `counts` has.

    Raises OSError, TransportUnavailableError.
    """
    close_in_child(connection)
    connection.connect(path)
    connection.sendall(token)
    return receive(connection, f"socket of channels {path}", counts)


def receive(connection: socket.socket, name: str, counts: tuple[int, ...]) -> list[int]:
    """The descriptors that come with the greeting. Raises OSError, TransportUnavailableError."""
    numbers = array("i")
    space = socket.CMSG_SPACE(DESCRIPTORS * numbers.itemsize)
    # socket.recv_fds ignores its flags; without this one, the descriptors live on in programs that we start.
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    greeting, ancillary, _, _ = connection.recvmsg(len(GREETING), space, flags)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    descriptors = numbers.tolist()
    if greeting != GREETING or len(descriptors) not in counts:
        for descriptor in descriptors:
            os.close(descriptor)
        got = f"{greeting!r} and {len(descriptors)} descriptors"
        raise TransportUnavailableError(f"{name}: expected a claimed channel, got {got}")
    return descriptors


def mapped(
    channel_id: str,
    sizes: Mapping[str, int],
    descriptors: list[int],
    connection: socket.socket,
    memory: mmap.mmap | None,
) -> Claimed:
    """The channel whose descriptors have come over `connection`. Raises OSError, ValueError."""
    control, *data, bell, answers = descriptors
    try:
        control_map = mmap.mmap(control, sizes["control_bytes"])
        data_map = _in_place(data[0], sizes["data_bytes"], memory) if data else None
    except BaseException:
        os.close(bell)
        os.close(answers)
        raise
    finally:
        os.close(control)
        for descriptor in data:
            os.close(descriptor)
    connection.setblocking(False)
    return Claimed(channel_id, sizes["num_slots"], control_map, data_map, bell, answers, connection)


def _in_place(descriptor: int, num_bytes: int, memory: mmap.mmap | None) -> mmap.mmap:
    """A file mapped where `memory` is, whose arrays then are in it; None: at a new place."""
    if os.fstat(descriptor).st_size < num_bytes:
        raise ValueError(f"data: expected {num_bytes} bytes, got {os.fstat(descriptor).st_size}")
    if memory is None:
        memory = mmap.mmap(-1, num_bytes)  # not of the file, which it would keep
    elif len(memory) != num_bytes:
        raise ValueError(f"data_bytes: expected {len(memory)}, got {num_bytes}")
    else:
        done = 0
        while done < num_bytes:
            done += os.pwrite(descriptor, memoryview(memory)[done:], done)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if library.mmap(place, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != place:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory


_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def close_in_child(connection: socket.socket) -> None:
    """Have forked children close a connection: with theirs, the channel would outlive this process."""
    _connections.add(connection)


def _close_in_child() -> None:
    """Close what a fork has copied: it would keep channels open after the end of the parent."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
