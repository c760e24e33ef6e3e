"""One snapshot for all viewers, none for none, and never more than the latest for those who read slowly."""

import asyncio
from collections.abc import AsyncIterator, Collection

import pytest

from expertd.service.http import feed as feed_module
from expertd.service.http.feed import Feed
from expertd.service.http.protocol import OipError
from tests.service.waiting import until


class Snapshots:
    """Numbers of the snapshots made, and the models asked for each time."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    def take(self, models: Collection[str]) -> dict[str, bytes]:
        self.asked.append(set(models))
        return {model: f"{model} {len(self.asked)}".encode() for model in models}


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> Snapshots:
    monkeypatch.setattr(feed_module, "SECONDS", 0.02)
    return Snapshots()


async def test_viewers_share_a_snapshot(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 3)
    viewers = [feed.open(model) for model in ("a", "a", "b")]
    seen = await asyncio.gather(*(_all(viewer.events(2)) for viewer in viewers))
    assert seen == [[b"a 1", b"a 2"], [b"a 1", b"a 2"], [b"b 1", b"b 2"]]
    assert snapshots.asked[0] == {"a", "b"}


async def test_nothing_is_computed_while_nobody_looks(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 1)
    await asyncio.sleep(0.1)
    assert snapshots.asked == []
    for _ in range(2):
        viewer = feed.open("a")
        assert [event async for event in viewer.events(1)]
        feed.leave(viewer)
        made = len(snapshots.asked)
        await asyncio.sleep(0.1)
        assert len(snapshots.asked) <= made + 1, "one may have been under way"


async def test_a_slow_viewer_gets_the_latest(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 1)
    events = feed.open("a").events(None)
    await until(lambda: len(snapshots.asked) >= 4)
    await asyncio.sleep(0.01)
    event = await anext(events)
    assert int(event.split()[1]) >= 3


async def test_streams_end_when_the_feed_is_closed(snapshots: Snapshots) -> None:
    feed = Feed(snapshots.take, 2)
    reading = asyncio.create_task(_all(feed.open("a").events(None)))
    await until(lambda: len(snapshots.asked) > 2)
    feed.close()
    assert await asyncio.wait_for(reading, 5)
    with pytest.raises(OipError, match="the server is shutting down"):
        feed.open("a")


async def test_a_stream_ends_after_its_time(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_LIFE_SECONDS", 0.1)
    feed = Feed(snapshots.take, 1)
    assert await asyncio.wait_for(_all(feed.open("a").events(None)), 5)


async def test_a_snapshot_that_fails_ends_the_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(models: Collection[str]) -> dict[str, bytes]:
        raise ValueError("no snapshot")

    feed = Feed(fail, 1)
    viewer = feed.open("a")
    assert await asyncio.wait_for(_all(viewer.events(None)), 5) == []
    feed.leave(viewer)
    assert "a snapshot for viewers failed" in caplog.text


async def _all(events: AsyncIterator[bytes]) -> list[bytes]:
    return [event async for event in events]
