"""A raw transport that sends only as much as a test allows, and a record of what its owner is told."""

from expertd.service.http.paced_transport import PacedTransport


class Pipe:
    """A raw transport that sends `room` bytes, and holds the others."""

    def __init__(self) -> None:
        self.room = 1 << 40
        self.sent = b""
        self.held = b""
        self.is_aborted = self.is_closed = self.has_ended = False
        self.transport: PacedTransport

    def write(self, data: bytes) -> None:
        before = len(self.held)
        self.held += data
        self.move()
        if self.held and not before:
            self.transport.raw_paused()

    def move(self) -> None:
        moved, self.held = self.held[: self.room], self.held[self.room :]
        self.sent += moved
        self.room -= len(moved)

    def get_write_buffer_size(self) -> int:
        return len(self.held)

    def is_closing(self) -> bool:
        return self.is_aborted or self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write_eof(self) -> None:
        self.has_ended = True

    def abort(self) -> None:
        self.is_aborted = True


class Told:
    """The receiving side."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def writing_paused(self) -> None:
        self.said.append("paused")

    def writing_resumed(self) -> None:
        self.said.append("resumed")

    def read_on(self) -> None:
        raise AssertionError
