"""One request and its response on one connection."""

from expertd_client.errors import InvalidAnswerError
from expertd_client.http.connection import Connection
from expertd_client.http.head import AnswerHead, parse_head
from expertd_client.http.waits import READ, WRITE, Ready
from expertd_client.steps import Steps


class BrokenConnectionError(Exception):
    """The connection broke; `answered` if a part of the answer had come."""

    def __init__(self, reason: str, answered: bool) -> None:
        super().__init__(reason)
        self.answered = answered


def send_request(connection: Connection, parts: list[memoryview]) -> Steps[tuple[AnswerHead, bool]]:
    """Send `parts`, and receive the response's head, also if it comes earlier than all is sent.

    Also returns whether all was sent: the connection is of no further use if not.
    """
    unsent = [part for part in parts if len(part)]
    while True:
        unsent = yield from _send(connection, unsent)
        head = yield from _receive_head(connection)
        if head.status >= 200:
            return head, not unsent
        if head.status == 101:
            raise InvalidAnswerError("status: expected an answer, got 101")


def receive_bytes(connection: Connection, count: int) -> Steps[bytes]:
    """The next `count` bytes, which are few."""
    into = memoryview(bytearray(count))
    yield from receive_into(connection, into)
    return bytes(into)


def receive_into(connection: Connection, into: memoryview) -> Steps[None]:
    """The next bytes, straight into the memory that they are for."""
    done = connection.take(into)
    while done < len(into):
        if not (count := (yield from _receive(connection, into[done:], answered=True))):
            raise BrokenConnectionError(
                f"body: expected {len(into)} bytes, got {done} before it was closed", True
            )
        done += count


def _send(connection: Connection, parts: list[memoryview]) -> Steps[list[memoryview]]:
    """Send until all is sent or something can be read; what is not sent."""
    while parts:
        try:
            count = connection.send(parts)
        except BlockingIOError:
            if (yield Ready(connection, READ | WRITE)) & READ and connection.has_answer():
                return parts  # refused before it was read, or closed: which of them the answer says
            continue
        except OSError:
            return parts  # the server has closed it, maybe after an answer
        while parts and count >= len(parts[0]):
            count -= len(parts[0])
            parts = parts[1:]
        if count:
            parts = [parts[0][count:], *parts[1:]]
    return parts


def _receive_head(connection: Connection) -> Steps[AnswerHead]:
    searched = connection.start
    while (end := connection.buffer.find(b"\r\n\r\n", searched, connection.end)) < 0:
        searched = max(0, connection.end - connection.start - 3)
        room = connection.make_room()
        if not len(room):
            raise InvalidAnswerError(
                f"answer: expected headers of at most {len(connection.view)} bytes, got more"
            )
        if not connection.end:
            yield Ready(connection, READ)  # it cannot be there yet: saves a system call that would fail
        if not (count := (yield from _receive(connection, room, answered=connection.end > 0))):
            raise BrokenConnectionError(
                "expected an answer, got none before it was closed", connection.end > 0
            )
        connection.end += count
    head = parse_head(bytes(connection.view[connection.start : end]))
    connection.start = end + 4
    return head


def _receive(connection: Connection, into: memoryview, answered: bool) -> Steps[int]:
    while True:
        try:
            return connection.receive(into)
        except BlockingIOError:
            yield Ready(connection, READ)
        except OSError as error:
            raise BrokenConnectionError(str(error), answered) from error
