"""What the processes of a server share, and what each has a share of."""

import os

from expertd.service.engine.queue_counts import Backlog
from expertd.service.http.worker_setup import SharedCounts, shares
from tests.service.apps import tiny_settings

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
