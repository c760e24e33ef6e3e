"""What viewers of a server see: one snapshot a second for all of them, and none while nobody looks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping

from expertd.service.http.protocol import OipError

logger = logging.getLogger(__name__)

SECONDS = 1.0  # between two snapshots
# A stream ends after as long, so that a viewer's key is checked again when it opens the next one.
_LIFE_SECONDS = 300.0
_RETRY_AFTER = 5

TakeSnapshot = Callable[[Collection[str]], Mapping[str, bytes]]
"""Makes a snapshot on any thread: for each of these models, the event for those who look at it."""


class Feed:
    """Hands each viewer the latest snapshot; one that reads slowly misses those in between.

    For the event loop.
    """

    def __init__(self, take: TakeSnapshot, max_viewers: int) -> None:
        self._take, self._max_viewers = take, max_viewers
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def open(self, model: str) -> "Viewer":
        """A viewer of the server, and of `model`'s experts. Raises OipError (503) if there are too many."""
        if self._is_closed:
            raise OipError(503, "the server is shutting down", reason="shutting_down")
        if len(self._viewers) >= self._max_viewers:
            expected = f"at most {self._max_viewers} streams (page.max_viewers)"
            raise OipError(503, f"viewers: expected {expected}, got one more", retry_after=_RETRY_AFTER)
        viewer = Viewer(model)
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return viewer

    def leave(self, viewer: "Viewer") -> None:
        """End a viewer; nothing is computed after the last one."""
        self._viewers.discard(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End every stream, for good."""
        self._is_closed = True
        for viewer in list(self._viewers):
            viewer.put(b"")

    async def _run(self) -> None:
        while True:
            try:
                events = await asyncio.to_thread(self._take, {viewer.model for viewer in self._viewers})
            except Exception:
                logger.exception("a snapshot for viewers failed: their streams end")
                events = dict.fromkeys((viewer.model for viewer in self._viewers), b"")
            for viewer in self._viewers:
                if (event := events.get(viewer.model)) is not None:  # else it came meanwhile
                    viewer.put(event)
            await asyncio.sleep(SECONDS)


class Viewer:
    """Holds the latest event; b"" is the end."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._event: bytes | None = None
        self._changed = asyncio.Event()

    def put(self, event: bytes) -> None:
        """Replace the event, unless it is the end."""
        if self._event != b"":
            self._event = event
            self._changed.set()

    async def events(self, max_events: int | None) -> AsyncIterator[bytes]:
        """Events until the end, or until `max_events` were sent, or as long as a stream lives."""
        loop = asyncio.get_running_loop()
        end, sent = loop.time() + _LIFE_SECONDS, 0
        while sent != max_events and loop.time() < end and (event := await self._next()):
            yield event
            sent += 1

    async def _next(self) -> bytes:
        await self._changed.wait()
        self._changed.clear()
        event, self._event = self._event, None
        assert event is not None
        return event
