"""The connections that are open, in all and from each address, and how many there may be."""

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any

from expertd.service.http.responses import RefusedError
from expertd.service.settings.parts import Limits

MAX_REFUSED = 256
"""How many connections beyond the limits are answered with 503 at a time; further ones are aborted."""


class CrowdedError(RefusedError):
    """Too many connections are open: `bound` is the limit of the setting `limits.{limit}`."""

    retry_after = 1

    def __init__(self, limit: str, bound: int, address: str = "") -> None:
        whose = "connections from one address" if address else "connections"
        super().__init__(503, f"{whose}: expected at most {bound}, got {bound + 1}")
        self.limit = limit
        of = f" from {address}" if address else ""
        self.warning = f"limits.{limit}: {bound} connections{of} are open, further ones are refused"


class ConnectionLimits:
    """Counts connections, and calls `closed` for each one that was admitted or refused, once it is closed."""

    def __init__(self, limits: Limits) -> None:
        self.closed: Callable[[], object] = lambda: None
        self.num_refused = 0  # and not closed
        self._limits = limits
        self._num_open = 0
        self._of: Counter[str] = Counter()

    def admit(self, peer: Any) -> "Admission":
        """Count a connection from `peer`, a socket's address."""
        limits, address = self._limits, address_of(peer)
        refusal = None
        if self._num_open >= limits.max_connections:
            refusal = CrowdedError("max_connections", limits.max_connections)
        elif address and self._of[address] >= limits.max_connections_per_address:
            bound = limits.max_connections_per_address
            refusal = CrowdedError("max_connections_per_address", bound, address)
        self.count(address, refusal, 1)
        return Admission(self, address, refusal)

    def count(self, address: str, refusal: CrowdedError | None, change: int) -> None:
        """One connection more (1), or one less (-1)."""
        if refusal is not None:
            self.num_refused += change
            return
        self._num_open += change
        if address:
            self._of[address] += change
            if not self._of[address]:
                del self._of[address]


class Admission:
    """A connection that is counted until `release`; `refusal` says why it has to be closed, if it has to."""

    __slots__ = ("_address", "_limits", "refusal")

    def __init__(self, limits: ConnectionLimits, address: str, refusal: CrowdedError | None) -> None:
        self._limits = limits
        self._address = address
        self.refusal = refusal

    def release(self) -> None:
        """The connection is closed."""
        self._limits.count(self._address, self.refusal, -1)
        self._limits.closed()


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
