"""The connections that are open, in all and of each address, and how many there may be."""

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any

from expertd.service.http.refused import RefusedError
from expertd.service.settings.parts import Limits


class CrowdedError(RefusedError):
    """Too many connections are open: `bound` is the limit of the setting `limits.{limit}`."""

    retry_after = 1

    def __init__(self, limit: str, bound: int, address: str = "") -> None:
        whose = "connections from one address" if address else "connections"
        super().__init__(503, f"{whose}: expected at most {bound}, got {bound + 1}")
        self.limit = limit
        of = f" from {address}" if address else ""
        self.warning = f"limits.{limit}: {bound} connections{of} are open, further ones are refused"


class Places:
    """Counts connections from `take` to `leave`, which calls `left`, also for refused ones."""

    def __init__(self, limits: Limits) -> None:
        self.left: Callable[[], object] = lambda: None
        self._limits = limits
        self._open = 0
        self._of: Counter[str] = Counter()

    def take(self, peer: Any) -> tuple[str | None, CrowdedError | None]:
        """Count a connection from `peer`, a socket's address: what `leave` is to be given.

        Beyond a limit it is not counted, and the second value is why.
        """
        limits, address = self._limits, address_of(peer)
        if self._open >= limits.max_connections:
            return None, CrowdedError("max_connections", limits.max_connections)
        if address and self._of[address] >= limits.max_connections_per_address:
            bound = limits.max_connections_per_address
            return None, CrowdedError("max_connections_per_address", bound, address)
        self._open += 1
        if address:
            self._of[address] += 1
        return address, None

    def leave(self, address: str | None) -> None:
        """The connection is closed."""
        if address is not None:
            self._open -= 1
            if address:
                self._of[address] -= 1
                if not self._of[address]:
                    del self._of[address]
        self.left()


def address_of(peer: Any) -> str:
    """What counts as one address; empty for a Unix socket."""
    if not isinstance(peer, tuple):
        return ""
    text = str(peer[0])
    if ":" not in text:
        return text
    found = ip_address(text.partition("%")[0])
    assert isinstance(found, IPv6Address)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return found.exploded[:19]  # a host has all of its /64 network


def shown_peer(peer: Any) -> str:
    """A socket's address in a log line; "unix" for a Unix socket."""
    if not isinstance(peer, tuple):
        return "unix"
    host, port = peer[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
