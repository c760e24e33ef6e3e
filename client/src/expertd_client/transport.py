"""The ways to a server, and which of them a client takes."""

import logging
import threading
from typing import Any, Literal, Protocol

from expertd_client.address import Address
from expertd_client.calls import LayerCall
from expertd_client.channel.link import ChannelClient
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, InvalidRequestError, TransportUnavailableError
from expertd_client.nixl.installed import has_rdma
from expertd_client.steps import Steps

logger = logging.getLogger("expertd_client")

TransportName = Literal["auto", "channel", "nixl", "http"]

ORDER = ("channel", "nixl", "http")
"""The first needs the server on this machine, the second one NIXL on both."""

_MAX_REPORTS = 100


class NotThisCallError(Exception):
    """The transport works with this server, but not for this call, which HTTP may answer; nothing was sent.

    `error` is what a caller gets who wants no other transport.
    """

    def __init__(self, error: ExpertError) -> None:
        super().__init__(str(error))
        self.error = error


class Asker(Protocol):
    """Calls over HTTP, which other transports need too."""

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
        """A call without tensors, with `body` as JSON: the answer's JSON, or None."""

    def channel_opened(self, opened: Any, link: ChannelClient) -> None:
        """The channel that a request has `opened` is in use, in memory that comes from its server."""


class Transport(Protocol):
    """A way to a server, used by several threads, or by tasks of one event loop, at once."""

    @property
    def name(self) -> TransportName:
        """One of ORDER."""

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have the layer's output written into the memory of `call.output`.

        Raises ExpertError; TransportUnavailableError and NotThisCallError only if nothing was sent, so that
        another one can be taken for the same call.
        """

    def close(self) -> Steps[None]:
        """Free what it holds; calls in progress end as they would."""


class Choice:
    """The transport in use; with `auto`, the fastest that can work.

    That is a channel if the server is on this machine; NIXL if it is elsewhere, and this machine has RDMA:
    over TCP, small requests are faster over HTTP. If it raises TransportUnavailableError when it is used,
    `auto` takes HTTP.
    """

    def __init__(
        self, wanted: str, address: Address, channel: Transport, nixl: Transport, http: Transport
    ) -> None:
        if wanted != "auto" and wanted not in ORDER:
            raise InvalidRequestError(f"transport: expected auto, {', '.join(ORDER)}, got {wanted!r}")
        self._is_free = wanted == "auto"
        self._is_closed = False
        self._reported: set[str] = set()
        self._url = address.url
        self._lock = threading.Lock()
        self._http = http
        transports = {"channel": channel, "nixl": nixl, "http": http}
        fastest = "channel" if address.is_local else "nixl" if has_rdma() else "http"
        self._take(transports[fastest if wanted == "auto" else wanted])

    def fall_back(self, failed: Transport, error: TransportUnavailableError) -> Steps[None]:
        """Take HTTP after `failed`, with a warning; raises `error` if that is not wanted, or has failed."""
        with self._lock:
            if self._is_closed:
                raise ExpertError("client: expected an open one, got a closed one")
            if self.current is not failed:
                return  # another thread has done it
            if not self._is_free or failed is self._http:
                raise error
            logger.warning("transport %s: %s; taking %s", failed.name, error, self._http.name)
            self._take(self._http)
        yield from failed.close()

    def pass_over(self, unfit: Transport, reason: NotThisCallError) -> None:
        """Take HTTP for one call, with a warning the first time; raises its error if `unfit` is wanted."""
        if not self._is_free:
            raise reason.error
        text = str(reason)
        name = text.partition(":")[0]  # the figures after it may differ from call to call
        if name not in self._reported and len(self._reported) < _MAX_REPORTS:
            self._reported.add(name)
            logger.warning("transport %s: %s; taking http for this call", unfit.name, text)

    def close(self) -> Steps[None]:
        """Close the transport in use; calls that find it closed do not take the next."""
        with self._lock:
            self._is_closed = True
        yield from self.current.close()

    def _take(self, transport: Transport) -> None:
        self.current = transport
        logger.info("transport %s: server %s", transport.name, self._url)
