"""The socket that a server listens on: an address and port, or a path."""

import errno
import ipaddress
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from expertd.service.channels.listener import ChannelListener
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import AUTO
from expertd.service.settings.sources import runtime_directory
from expertd.service.util.files import UnwritableError, temporary_directory, temporary_folder
from expertd.service.util.socket_files import SocketFile, listen_at

_BACKLOG = 2048


class BindError(Exception):
    """The server cannot listen where the settings say, or for channels; the text says why."""


class NoChannelsError(Exception):
    """There is no place for a socket of channels, which the settings leave to the server."""


class Listener:
    """A listening socket; `address` is how clients name it, `port` its port (0: it has a path)."""

    def __init__(
        self, sock: socket.socket, address: str, file: SocketFile | None = None, port: int = 0
    ) -> None:
        self.socket = sock
        self.address = address
        self.port = port
        self._file = file
        sock.set_inheritable(False)

    def remove(self) -> None:
        """Remove the socket's file, if it has one."""
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Listen no more."""
        self.remove()
        self.socket.close()


def listen(settings: Settings) -> Listener:
    """Listen on `uds`, or else on `host` and `port`, beyond loopback only as allowed. Raises BindError."""
    if settings.uds is not None:
        return listen_on_path(settings.uds, "uds")
    check_exposure(settings)
    listener = _listen_on_port(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls.is_on else "http"
    return Listener(listener, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", port=port)


def check_exposure(settings: Settings) -> None:
    """Raise BindError if the settings do not allow to listen on `host`."""
    if settings.keys is None and not settings.insecure and is_exposed(settings.host):
        raise BindError(
            f"host: expected a loopback address without keys, got {settings.host}; give callers keys "
            "(--keys), or set insecure: true (--insecure) if only trusted hosts reach it"
        )


def is_exposed(host: str) -> bool:
    """Whether listening on `host` exposes the server beyond this machine."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False  # listening on the address will fail with a better message
    return not all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _listen_on_port(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except socket.gaierror as error:
        raise BindError(f"host: expected a name or address, got {host!a:.80}: {error.strerror}") from error
    except OSError as error:
        # asyncio and socket wrap the message; the error number gives the plain one.
        known = error.errno in errno.errorcode
        reason = os.strerror(error.errno or 0) if known else error.strerror
        if error.errno == errno.EADDRNOTAVAIL:
            text = f"host: expected an address of this machine, got {host}: {reason}"
        elif error.errno == errno.EACCES:
            text = f"port: expected one that this user may open, got {port}: {reason}"
        else:
            text = f"port: expected a free address, got {host}:{port}: {reason}"
        raise BindError(text) from error


def listen_on_path(path: Path, setting: str) -> Listener:
    """Listen at `path`, which `setting` is the reason for; see `listen_at`. Raises BindError."""
    try:
        made, file = listen_at(path, _BACKLOG)
    except OSError as error:
        raise BindError(f"{setting}: {error}") from error
    return Listener(made, f"unix:{path}", file)


def has_channels(settings: Settings) -> bool:
    """Whether the settings want a socket for channels: `auto` does where only this machine can connect."""
    path = settings.channels.socket
    return path is not None and (path != AUTO or (settings.uds is None and not is_exposed(settings.host)))


def listen_for_channels(settings: Settings, port: int) -> ChannelListener | None:
    """Listen for the owners of channels of the server on `port`; None: it has no channels.

    Raises BindError if that is not possible where the settings say, NoChannelsError if nowhere for `auto`.
    """
    path, group = settings.channels.socket, settings.channels.group
    if path is None or not has_channels(settings):
        return None
    try:
        if path != AUTO:
            return ChannelListener(path, group)
        name = f"expertd-{os.geteuid()}-{port}.sock"
        if (folder := runtime_directory()) is not None:
            with suppress(OSError):
                return ChannelListener(folder / name, group)
        return ChannelListener(temporary_directory("channels.socket") / name, group)
    except OSError as error:
        if path != AUTO or group is not None:
            raise BindError(str(error)) from error
        raise NoChannelsError(f"{error}; callers on this machine take HTTP") from error


@contextmanager
def engine_socket() -> Iterator[tuple[Path, Listener]]:
    """Listen for HTTP processes, in a folder that only this user may enter, until the block ends.

    Raises BindError.
    """
    with ExitStack() as stack:
        try:
            path = stack.enter_context(temporary_folder("http_workers")) / "engine"
        except UnwritableError as error:
            raise BindError(str(error)) from error
        listener = listen_on_path(path, "http_workers")
        stack.callback(listener.close)
        yield path, listener


def allow_files(count: int) -> int:
    """Raise the limit on open files to `count`, or as far as possible; returns how many are missing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return 0
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return count - allowed
