"""Calls over HTTP."""

from functools import partial
from typing import Any, TypeVar

from expertd_client.address import Address
from expertd_client.calls import LayerCall
from expertd_client.channel.link import ChannelClient
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError
from expertd_client.http.answers import read_json, read_output
from expertd_client.http.attempts import Attempts, Reader, Request
from expertd_client.http.requests import control_request, infer_request
from expertd_client.semaphore import Semaphore
from expertd_client.steps import Steps, as_work
from expertd_client.transport import TransportName

T = TypeVar("T")


class HttpTransport:
    """Calls over HTTP, at most `max_connections` at a time: further ones wait."""

    name: TransportName = "http"

    def __init__(
        self, address: Address, max_connections: int, max_retries: int, connect_seconds: float | None = None
    ) -> None:
        self.address = address
        self._attempts = Attempts(address, max_retries, connect_seconds)
        self._semaphore = Semaphore(max_connections)

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have the layer's output written into the memory of `call.output`."""
        request = infer_request(self.address, call, deadline)
        return self._call(request, partial(read_output, call), deadline)

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
        """A call without tensors, with `body` as JSON: the answer's JSON, or None."""
        return as_work(self._call(control_request(self.address, method, path, body), read_json, deadline))

    def channel_opened(self, opened: Any, link: ChannelClient) -> None:
        """See `Asker.channel_opened`: nobody asks whether the server hangs."""

    def break_off(self) -> None:
        """End the connections of calls, from any thread: they raise ServerUnreachableError."""
        self._attempts.break_off()

    def close(self) -> Steps[None]:
        """Close idle connections now, and others once their calls are done."""
        self._attempts.pool.close()
        yield from ()

    def _call(self, request: Request, read: Reader[T], deadline: Deadline) -> Steps[T]:
        if self._attempts.pool.closed:
            raise ExpertError("client: expected an open one, got a closed one")
        deadline.check()
        yield from self._semaphore.acquire(deadline)
        try:
            return (yield from self._attempts.call(request, read, deadline))
        finally:
            self._semaphore.release()
