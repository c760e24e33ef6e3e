"""Where ranks meet: the store of the front end, and each machine's own address on the way to it.

Imports torch only to open a store.
"""

import fcntl
import logging
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from expertd.service.settings.model import Settings
from expertd.service.settings.rendezvous import host_and_port

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Rendezvous:
    """How a rank finds the others.

    host, port  of the store
    address     of this machine, at which it takes connections of other ranks
    interface   the network interface with this address
    """

    host: str
    port: int
    address: str
    interface: str

    def store(self, prefix: str, timeout_seconds: float = 300.0) -> "Store":
        """A client of the store, with names that begin with `prefix`. Raises RuntimeError."""
        import torch.distributed as dist

        client = dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
        return dist.PrefixStore(prefix, client)  # type: ignore[attr-defined]


def on_this_machine(port: int) -> Rendezvous:
    """For ranks of one node: no connections from other machines."""
    return Rendezvous(LOOPBACK, port, LOOPBACK, "lo")


def between_nodes(settings: Settings) -> Rendezvous:
    """For ranks of several nodes.

    Raises ValueError (name, expected, got) without a way there, and if the server is to listen there itself.
    """
    assert settings.rendezvous is not None
    name, port = host_and_port(settings.rendezvous)
    try:
        host = socket.gethostbyname(name)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((host, port))  # sends nothing
            address: str = route.getsockname()[0]
    except OSError as error:
        expected = "a host that this machine can reach"
        raise ValueError(f"rendezvous: expected {expected}, got {settings.rendezvous} ({error})") from error
    if settings.node_rank == 0 and settings.uds is None and settings.port == port:
        _check_apart(settings, host)
    return Rendezvous(host, port, address, _interface_of(address))


def _check_apart(settings: Settings, host: str) -> None:
    """Raise ValueError if the server listens at `host`, too; its port is that of the rendezvous."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return  # an IPv6 address, which the store does not use, or none: then the server says so
    if {str(info[4][0]) for info in found} & {host, "0.0.0.0"}:
        expected = f"another port than the server's own, {settings.host}:{settings.port}"
        raise ValueError(f"rendezvous: expected {expected}, got {settings.rendezvous}")


def check_exposure(settings: Settings) -> None:
    """Raise ValueError if the settings do not allow nodes to meet beyond loopback."""
    if settings.rendezvous is None or settings.keys is not None or settings.insecure:
        return
    name, _ = host_and_port(settings.rendezvous)
    try:
        host = socket.gethostbyname(name)
    except OSError:
        host = name  # of another node, which may not have started
    if not _is_loopback(host):
        raise ValueError(
            f"rendezvous: expected a loopback address without keys, got {settings.rendezvous}; nodes do not "
            "authenticate connections: keep them in a network of their own, and set insecure: true "
            "(--insecure)"
        )


def exposure(rendezvous: Rendezvous) -> str | None:
    """A warning if other machines can reach the ranks, else None."""
    if _is_loopback(rendezvous.host) and _is_loopback(rendezvous.address):
        return None
    return (
        f"rendezvous {rendezvous.host}:{rendezvous.port} and the ranks' connections at {rendezvous.address} "
        "have no authentication or encryption: anyone who can reach them can read and change tokens and "
        "outputs; keep the nodes in a network of their own, or restrict access with a firewall"
    )


def listen(host: str, port: int) -> socket.socket:
    """A socket for the store, which would listen on every address by itself. Raises ValueError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a server that has just ended
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        expected = "a free port on an address of node 0"
        raise ValueError(f"rendezvous: expected {expected}, got {host}:{port} ({error.strerror})") from error
    listener.listen()
    return listener


def listen_for_ranks(settings: Settings) -> tuple[Rendezvous, socket.socket]:
    """Where the ranks meet, and a socket there for the store. Raises ValueError."""
    if settings.nnodes > 1:
        rendezvous = between_nodes(settings)
        if (warning := exposure(rendezvous)) is not None:
            logger.warning(warning)
        return rendezvous, listen(rendezvous.host, rendezvous.port)
    listener = listen(LOOPBACK, 0)
    return on_this_machine(listener.getsockname()[1]), listener


def open_store(rendezvous: Rendezvous, listener: socket.socket) -> "Store":
    """A store that outlives the ranks, rank 0 too; its server ends with it. Raises RuntimeError."""
    import torch.distributed as dist

    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        rendezvous.host,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
        master_listen_fd=listener.detach(),
    )
    return store


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _interface_of(address: str) -> str:
    if _is_loopback(address):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # without an IPv4 address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    raise ValueError(f"rendezvous: expected a network interface with address {address}, got none")
