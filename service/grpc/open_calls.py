"""The calls that are open, in all and of each address. Their limits are those of connections over HTTP."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote

from expertd.service.http.connection_limits import address_of
from expertd.service.http.protocol import OipError
from expertd.service.settings.parts import Limits

_ALL = ""  # in place of an address


class OpenCalls:
    """Counts calls; gRPC does not tell whose connections are open."""

    def __init__(self, limits: Limits) -> None:
        self._limits = {
            "max_connections": limits.max_connections,
            "max_connections_per_address": limits.max_connections_per_address,
        }
        self._unanswered: Counter[str] = Counter()
        self._unsent: Counter[str] = Counter()  # with those whose answer waits for its client to read
        self._all_sent = asyncio.Event()
        self._all_sent.set()

    @contextmanager
    def one(self, context: Any, is_sent: bool = True) -> Iterator[OipError | None]:
        """Count a call until it is answered and, beyond that, its answer until it is sent.

        is_sent  False: nobody waits for it to be sent
        Gives why the call is refused, or None.
        """
        address = _address(context.peer())
        _count(self._unanswered, address, 1)
        if is_sent:
            _count(self._unsent, address, 1)
            self._all_sent.clear()
            context.add_done_callback(lambda _: self._sent(address))
        try:
            yield self._refusal(address)
        finally:
            _count(self._unanswered, address, -1)

    async def sent(self, seconds: float) -> int:
        """Wait until all answers are sent, for `seconds` at most; how many calls are left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._unsent:  # another call may have come since
                    await self._all_sent.wait()
        return self._unsent[_ALL]

    def _sent(self, address: str) -> None:
        _count(self._unsent, address, -1)
        if not self._unsent:
            self._all_sent.set()

    def _refusal(self, address: str) -> OipError | None:
        for (name, limit), place in zip(self._limits.items(), (_ALL, address), strict=True):
            if self._unanswered[place] > limit:
                text = f"limits.{name}: expected at most {limit} open calls, got more"
            # Twice: a caller may have read its answer, and send its next call, before gRPC says so.
            elif self._unsent[place] > 2 * limit:
                expected = f"expected at most {2 * limit}, twice limits.{name}, got more"
                text = f"open calls and unread answers: {expected}"
            else:
                continue
            return OipError(503, text, retry_after=1)
        return None


def client_of(peer: str) -> str:
    """The address and port in `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    return unquote(peer.partition(":")[2])


def _address(peer: str) -> str:
    host = client_of(peer).rpartition(":")[0].strip("[]")
    return address_of((host,))


def _count(calls: Counter[str], address: str, change: int) -> None:
    for place in (_ALL, address):
        calls[place] += change
        if not calls[place]:
            del calls[place]
