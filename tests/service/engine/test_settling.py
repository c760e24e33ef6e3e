"""Which samples count: by the part of each with prefill, and by changes."""

import pytest

from expertd.service.engine.settling import Settling

SAMPLE_SECONDS = 0.5


def counted(settling: Settling, parts: list[float]) -> list[bool]:
    return [settling.counts(SAMPLE_SECONDS, part) for part in parts]


def test_the_second_after_prefill_has_come_does_not_count() -> None:
    """Nor does the sample in which it comes, however early or late in it."""
    for first in (0.1, 0.5, 1.0):
        settling = Settling()
        assert counted(settling, [0.0, first, *[1.0] * 5]) == [True, False, False, False, True, True, True]


def test_prefill_that_was_away_for_a_moment_counts() -> None:
    settling = Settling()
    counted(settling, [1.0] * 4)
    assert all(counted(settling, [0.0, 0.0, 0.0, 1.0, 0.05, 0.3, 1.0]))


def test_prefill_that_was_away_for_longer_has_to_settle_again() -> None:
    settling = Settling()
    counted(settling, [1.0] * 4)
    assert counted(settling, [0.0] * 4 + [1.0] * 4) == [True] * 4 + [False] * 3 + [True]


def test_a_request_before_the_load_does_not_use_up_its_second() -> None:
    settling = Settling()
    assert counted(settling, [0.12, 0.0, 0.0, *[1.0] * 4]) == [False] * 5 + [True] * 2
    assert counted(settling, [*[0.0] * 60, 0.12, *[0.0] * 60, *[1.0] * 4])[-4:] == [False] * 3 + [True]


@pytest.mark.parametrize("present", [1, 2, 3])
@pytest.mark.parametrize("absent", [1, 2, 3, 4, 8])
def test_bursts_are_measured(present: int, absent: int) -> None:
    """Each as short as what does not count, or hardly longer."""
    settling = Settling()
    parts = ([1.0] * present + [0.0] * absent) * 6
    found = counted(settling, parts)
    assert sum(counts for part, counts in zip(parts, found, strict=True) if part) >= 2 * present
    assert any(counts for part, counts in zip(parts, found, strict=True) if not part)


def test_the_second_after_a_change_does_not_count_nor_its_own_time() -> None:
    settling = Settling()
    counted(settling, [1.0] * 4)
    settling.changed(0.7)
    assert settling.is_on
    assert not settling.counts(1.2, 1.0), "which has the change in it"
    assert counted(settling, [1.0] * 3) == [False, True, True]
    assert not settling.is_on
