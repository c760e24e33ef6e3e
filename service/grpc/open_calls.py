"""The calls that are open, in all and of each address. Their limits are those of connections over HTTP."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from expertd.service.http.places import address_of
from expertd.service.http.protocol import OipError
from expertd.service.settings.parts import Limits


class OpenCalls:
    """Counts calls; gRPC does not tell whose connections are open."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open = 0
        self._of: Counter[str] = Counter()

    @contextmanager
    def one(self, peer: str) -> Iterator[OipError | None]:
        """Count a call of `peer`, as gRPC names it; why it is refused, or None."""
        address = _address(peer)
        self._open += 1
        self._of[address] += 1
        try:
            yield self._refusal(address)
        finally:
            self._open -= 1
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]

    def _refusal(self, address: str) -> OipError | None:
        limits = self._limits
        if self._open > limits.max_connections:
            text = f"limits.max_connections: expected at most {limits.max_connections} open calls, got more"
        elif self._of[address] > (most := limits.max_connections_per_address):
            text = f"limits.max_connections_per_address: expected at most {most} open calls, got more"
        else:
            return None
        return OipError(503, text, headers={"Retry-After": "1"})


def client_of(peer: str) -> str:
    """The address and port in `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    return unquote(peer.partition(":")[2])


def _address(peer: str) -> str:
    host = client_of(peer).rpartition(":")[0].strip("[]")
    return address_of((host,))
