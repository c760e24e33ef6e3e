"""Connections are spread over the processes that share a socket; what else they share."""

import asyncio
import math
import os
import socket

import pytest

from expertd.service.engine.queue_counts import Backlog
from expertd.service.http.accepting import Acceptor
from expertd.service.http.worker_setup import SharedCounts, shares
from tests.service.apps import tiny_settings
from tests.service.virtual_time import VirtualTimeLoop, in_virtual_time
from tests.service.waiting import until


def listener() -> socket.socket:
    made = socket.create_server(("127.0.0.1", 0))
    made.setblocking(False)
    return made


def counts_of(*values: float) -> "memoryview[float]":
    counts = memoryview(bytearray(8 * len(values))).cast("d")
    for index, value in enumerate(values):
        counts[index] = value
    return counts


@in_virtual_time
async def test_every_acceptor_gets_its_share() -> None:
    loop, counts = asyncio.get_running_loop(), counts_of(math.inf, math.inf, math.inf)
    assert isinstance(loop, VirtualTimeLoop)
    accepted: list[list[socket.socket]] = [[], [], []]
    with listener() as shared:
        others = [socket.socket(fileno=socket.dup(shared.fileno())) for _ in range(3)]
        acceptors = [
            Acceptor(other, counts, index, accepted[index].append) for index, other in enumerate(others)
        ]
        for acceptor in acceptors[:2]:
            acceptor.start()
        clients = [socket.create_connection(shared.getsockname()) for _ in range(12)]
        await until(lambda: sum(map(len, accepted)) == 12)
        assert [len(each) for each in accepted] == [6, 6, 0], "the third does not run"
        acceptors[2].start()
        clients += [socket.create_connection(shared.getsockname()) for _ in range(6)]
        await until(lambda: sum(map(len, accepted)) == 18)
        assert [len(each) for each in accepted] == [6, 6, 6]
        assert accepted[0][0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for _ in range(3):
            acceptors[1].closed()
        assert list(counts) == [6, 3, 6]
        clients += [socket.create_connection(shared.getsockname()) for _ in range(3)]
        await asyncio.sleep(0)  # The first two wait since the third one accepted, and now that waits, too.
        loop.now += 0.25  # The machine pauses: the patience of all of them has ended.
        await until(lambda: len(accepted[1]) == 9)
        for acceptor in acceptors:
            acceptor.stop()
        for each in (*others, *clients, *accepted[0], *accepted[1], *accepted[2]):
            each.close()


async def test_a_process_that_hangs_is_not_waited_for_for_long() -> None:
    accepted: list[socket.socket] = []
    with listener() as shared:
        acceptor = Acceptor(shared, counts_of(0, 0), 1, accepted.append)
        acceptor.start()
        acceptor._counts[1] = 5  # more than the other one, which never accepts
        with socket.create_connection(shared.getsockname()):
            await until(lambda: len(accepted) == 1)
            acceptor.stop()
            accepted[0].close()


async def test_an_error_is_logged_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accepted: list[socket.socket] = []
    failures = [OSError(24, "Too many open files")]

    class Flaky(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return super().accept()

    with listener() as made, Flaky(fileno=made.detach()) as shared:
        acceptor = Acceptor(shared, counts_of(0), 0, accepted.append)
        acceptor.start()
        with socket.create_connection(shared.getsockname()):
            await until(lambda: len(accepted) == 1)
            assert "accepting a connection failed: [Errno 24] Too many open files" in caplog.text
            acceptor.stop()
            accepted[0].close()
            await asyncio.sleep(0)


PROCESSES, MODELS = 3, 2


def test_no_count_is_in_the_place_of_another() -> None:
    descriptor = os.memfd_create("counts")
    try:
        ours, theirs = (SharedCounts(descriptor, PROCESSES, MODELS) for _ in range(2))
    finally:
        os.close(descriptor)

    def parts(counts: SharedCounts) -> "list[memoryview[float]]":
        parts_of = counts.buffered, counts.requests, counts.keys
        return [counts.connections, *(part(index) for index in range(PROCESSES) for part in parts_of)]

    for value, part in enumerate(parts(ours), 1):
        for place in range(len(part)):
            part[place] += value
    rows = None, *range(PROCESSES)
    for number, row in enumerate(rows):
        for model in range(MODELS):
            for lane in range(2):
                ours.queues(row).set(model, lane, Backlog(10**number, 2 * 10**number, lane, 2 * lane))
    for value, part in enumerate(parts(theirs), 1):
        assert set(part) == {value}
    for lane in range(2):
        assert theirs.queues(1).total(1, lane) == Backlog(1111, 2222, lane, 2 * lane)
    assert theirs.queues(None).elsewhere(0)[:2] == (2220, 4440), "on both lanes"
    ours.queues(1).clear()
    assert theirs.queues(2).total(0, 0) == Backlog(1011, 2022)


def test_a_process_has_its_share_of_connections_and_memory_and_the_whole_queue() -> None:
    limits = {"max_connections": 10, "max_buffered_bytes": 90_000_000, "max_queue_requests": 7}
    given = tiny_settings(limits, http_workers=3)
    share = shares(given).limits
    assert (share.max_connections, share.max_buffered_bytes) == (4, 30_000_000)
    assert (share.max_queue_requests, share.max_queue_tokens) == (7, given.limits.max_queue_tokens)
