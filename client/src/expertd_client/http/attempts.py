"""A call on a connection from the pool, sent again where that is safe and of use.

Every call may be sent twice: an answer depends on nothing but its request.
"""

from collections.abc import Callable
from typing import TypeVar

from expertd_client.address import Address
from expertd_client.deadline import Deadline
from expertd_client.errors import DeadlineError, ServerUnreachableError
from expertd_client.http.connection import Connection
from expertd_client.http.exchange import BrokenConnectionError, send_request
from expertd_client.http.head import AnswerHead
from expertd_client.http.pool import Pool
from expertd_client.http.waits import Connect
from expertd_client.retries import with_retries
from expertd_client.steps import Steps

T = TypeVar("T")
Request = Callable[[], list[memoryview]]
Reader = Callable[[Connection, AnswerHead], Steps[T]]


class Attempts:
    """Sends requests to one server, over connections that are kept."""

    def __init__(self, address: Address, max_retries: int, connect_seconds: float | None = None) -> None:
        self._address = address
        self._max_retries = max_retries
        self._connect_seconds = connect_seconds
        self._used: set[Connection] = set()
        self.pool = Pool()

    def break_off(self) -> None:
        """End the connections in use, from any thread."""
        for connection in list(self._used):
            connection.break_off()

    def call(self, request: Request, read: Reader[T], deadline: Deadline) -> Steps[T]:
        """The answer to the request that `request()` makes, as `read` returns it.

        A busy server is asked again after its Retry-After and a little, if the deadline allows that.
        """
        return with_retries(lambda: self._attempt(request, read, deadline), self._max_retries, deadline)

    def _attempt(self, request: Request, read: Reader[T], deadline: Deadline) -> Steps[T]:
        if (kept := self.pool.take()) is not None:
            try:
                return (yield from self._exchange(kept, request, read, deadline))
            except BrokenConnectionError as error:
                if error.answered:
                    raise self._unreachable(error) from error
        connection = yield from self._connected(deadline)
        try:
            return (yield from self._exchange(connection, request, read, deadline))
        except BrokenConnectionError as error:
            raise self._unreachable(error) from error

    def _connected(self, deadline: Deadline) -> Steps[Connection]:
        """A new connection, within the time for that, too."""
        if self._connect_seconds is None or deadline.remaining() <= self._connect_seconds:
            connection: Connection = yield Connect(self._address, deadline)
            return connection
        try:
            connection = yield Connect(self._address, Deadline(self._connect_seconds))
        except DeadlineError as error:
            text = f"expected one within {self._connect_seconds:g} s, got none"
            raise ServerUnreachableError(f"connection to {self._address.url}: {text}") from error
        return connection

    def _exchange(
        self, connection: Connection, request: Request, read: Reader[T], deadline: Deadline
    ) -> Steps[T]:
        connection.deadline = deadline
        self._used.add(connection)
        keep = False
        try:
            head, sent = yield from send_request(connection, request())
            try:
                answer = yield from read(connection, head)
            except ErrorAnswerError as refused:
                keep = sent and not head.closes
                raise refused.error from None
            keep = sent and not head.closes
            return answer
        finally:
            self._used.discard(connection)
            if keep:
                self.pool.put(connection)
            else:
                connection.close()

    def _unreachable(self, error: BrokenConnectionError) -> ServerUnreachableError:
        return ServerUnreachableError(f"connection to {self._address.url}: {error}")


class ErrorAnswerError(Exception):
    """A `read` raises it for an answer that is an error and was read to its end."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
