"""When an expert-parallel layer overlaps communication with GEMMs, and in which order it does."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.kernels.overlap import Overlap, OverlapMode, PartitionStream, overlaps, parts, sizes
from expertd.kernels.partitions import Supply, plan


@pytest.mark.parametrize(
    ("mode", "counts", "hidden_size", "expected"),
    [
        ("auto", [4096] * 4, 7168, True),
        ("auto", [0, 0, 0, 4096], 7168, True),  # the largest number of tokens decides, on all ranks
        ("auto", [4095] * 4, 7168, False),
        ("auto", [4096] * 2, 7168, False),
        ("auto", [4096] * 8, 2048, False),  # a single part
        ("always", [1, 0], 2176, True),
        ("always", [4096] * 8, 2048, False),
        ("never", [4096] * 8, 7168, False),
    ],
)
def test_large_steps_of_many_ranks_overlap(
    mode: OverlapMode, counts: list[int], hidden_size: int, expected: bool
) -> None:
    assert overlaps(mode, counts, hidden_size) is expected


@pytest.mark.parametrize("n", [128, 2048, 2176, 4096, 7168])
def test_parts_cover_all_columns_once(n: int) -> None:
    assert [column for part in parts(n) for column in part] == list(range(n))
    # The GEMM's tiles begin at multiples of 256.
    assert all(part.start % 256 == 0 and 0 < len(part) <= 2048 for part in parts(n))


@pytest.mark.parametrize(
    ("communication_sms", "expected"),
    [(1, (8, 124)), (30, (32, 100)), (40, (40, 92)), (120, (120, 12))],
)
def test_lanes_have_whole_groups_of_sms_and_leave_none(
    communication_sms: int, expected: tuple[int, int]
) -> None:
    supply = Supply(total_sms=132, unit_sms=8, units=16, spare_sms=4)
    wanted = sizes(communication_sms, supply)
    assert (wanted["communication"], wanted["gemms"]) == expected
    granted = {share.partition.name: share.partition.num_sms for share in plan(wanted, supply)}
    assert granted == wanted


def test_spare_sms_that_cannot_join_a_lane_are_left_out() -> None:
    supply = Supply(total_sms=132, unit_sms=8, units=16, spare_sms=0)
    assert sizes(40, supply) == {"communication": 40, "gemms": 88}
    assert len(plan(sizes(40, supply), supply)) == 2


def test_no_sms_for_gemms() -> None:
    supply = Supply(total_sms=132, unit_sms=8, units=16, spare_sms=4)
    with pytest.raises(ValueError, match=r"communication_sms: expected at most 120 on this GPU, got 121"):
        sizes(121, supply)


class Streams:
    """Streams that note what is launched on them, and after what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current = self.stream("here")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.entered)

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.log.append((name, "waits for", other.name))
        )

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def part(self, what: str) -> Any:
        def launch(columns: range, num_sms: int | None) -> None:
            self.log.append((self.current.name, what, str(columns.start), str(num_sms)))

        return launch


def test_a_part_is_combined_while_the_next_one_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    overlap = Overlap(
        PartitionStream(streams.stream("gemms"), 100), PartitionStream(streams.stream("communication"), 32)
    )
    overlap.run(5000, streams.part("multiply"), streams.part("combine"))
    assert streams.log == [
        ("here", "multiply", "0", "None"),
        ("gemms", "waits for", "here"),
        ("communication", "waits for", "here"),
        ("communication", "waits for", "gemms"),
        ("gemms", "multiply", "2048", "100"),
        ("communication", "combine", "0", "32"),
        ("communication", "waits for", "gemms"),
        ("gemms", "multiply", "4096", "100"),
        ("communication", "combine", "2048", "32"),
        ("here", "waits for", "gemms"),
        ("here", "waits for", "communication"),
        ("here", "combine", "4096", "None"),
    ]


def test_a_failed_launch_leaves_no_lane_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    overlap = Overlap(
        PartitionStream(streams.stream("gemms"), 100), PartitionStream(streams.stream("communication"), 32)
    )

    def fails(columns: range, num_sms: int | None) -> None:
        raise RuntimeError("launch")

    with pytest.raises(RuntimeError, match="launch"):
        overlap.run(5000, streams.part("multiply"), fails)
    assert streams.log[-2:] == [("here", "waits for", "gemms"), ("here", "waits for", "communication")]
