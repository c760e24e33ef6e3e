"""What choices gave counts while the load is alike, and corrects what is expected of others."""

import pytest

from expertd.service.engine import lane_record
from expertd.service.engine.lane_choice import (
    JOINED,
    UNTRIED_JOINED,
    Choice,
    Factors,
    Given,
    Load,
    Point,
    calculated,
    expected,
)
from expertd.service.engine.lane_record import LaneRecord, Usual

LOAD = Load(132, 8, Point(64, 200e-6), Point(4096, 1e-3))
USUAL = Usual(64, 4096)
CHUNKS = Choice(0, 1024)
RATE = 4096 / 1e-3  # of prefill alone


def test_what_was_measured_counts_and_the_middle_of_the_last_looks_does() -> None:
    record, load = LaneRecord(), LOAD
    load = record.noted(CHUNKS, USUAL, Given(3e-3, 0.1 * RATE), load)
    assert expected(CHUNKS, load)[1:] == pytest.approx((3e-3, 0.1))
    for seconds, share in ((1e-3, 0.3), (2e-3, 0.2), (5.0, 0.001), (2e-3, 0.2)):
        load = record.noted(CHUNKS, USUAL, Given(seconds, share * RATE), load)
    assert expected(CHUNKS, load)[1:] == pytest.approx((2e-3, 0.2))


def test_others_of_the_same_kind_are_wrong_by_the_same_factor() -> None:
    record = LaneRecord()
    before = calculated(CHUNKS, LOAD)
    given = Given(4 * before.decode_seconds, 0.5 * before.prefill_share * RATE)
    load = record.noted(CHUNKS, USUAL, given, LOAD)
    assert load.of_joined == pytest.approx(Factors(4, 0.5))
    for other in (JOINED, Choice(0, 2048)):
        found, arithmetic = expected(other, load), calculated(other, LOAD)
        assert found.decode_seconds == pytest.approx(4 * arithmetic.decode_seconds)
        assert found.prefill_share == pytest.approx(0.5 * arithmetic.prefill_share)
    assert expected(Choice(48), load) == calculated(Choice(48), LOAD), "lanes have a factor of their own"
    load = record.noted(Choice(48), USUAL, Given(1.1e-3, 0.7 * RATE), load)
    assert expected(Choice(64), load).decode_seconds == pytest.approx(1.1e-3 * (48 / 64) ** 0.85)
    assert load.of_joined == pytest.approx(Factors(4, 0.5))


def test_it_counts_only_with_both_kinds_of_requests() -> None:
    load = LaneRecord().noted(JOINED, USUAL, Given(9e-3, 0.1 * RATE), LOAD)
    for alone in (load._replace(has_prefill=False), load._replace(has_decode=False)):
        assert expected(JOINED, alone) == calculated(JOINED, alone)


@pytest.mark.parametrize("other", [Usual(150, 4096), Usual(20, 4096), Usual(64, 1024)])
def test_another_load_forgets_it(other: Usual) -> None:
    record, load = LaneRecord(), LOAD
    for choice in (CHUNKS, Choice(48)):
        load = record.noted(choice, USUAL, Given(3e-3, RATE), load)
    load = record.noted(Choice(48), other, Given(1.0, RATE), load)
    assert set(load.given) == {CHUNKS, Choice(48)}, "it may be chance, once"
    assert load.given[Choice(48)].decode_seconds == 3e-3
    load = record.noted(Choice(48), other, Given(2e-3, RATE), load)
    assert load.given == {Choice(48): Given(2e-3, RATE)}
    assert load.of_joined.decode > 1, "the host is what it was"


def test_a_load_that_is_alike_or_seen_at_another_choice_forgets_nothing() -> None:
    record, load = LaneRecord(), LOAD
    load = record.noted(CHUNKS, USUAL, Given(3e-3, RATE), load)
    for usual in (Usual(20, 4096), Usual(39, 4096), Usual(10, 8000), Usual(11, 2100)) * 3:
        load = record.noted(Choice(48), usual, Given(1e-3, RATE), load)
    assert set(load.given) == {CHUNKS, Choice(48)}


def test_what_was_left_some_time_ago_is_forgotten_and_kept_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_record, "_KEPT_SAMPLES", 10)
    monkeypatch.setattr(lane_record, "_MOST_KEPT_SAMPLES", 30)
    record = LaneRecord()
    for kept in (10, 20, 30, 30):
        load = record.noted(CHUNKS, USUAL, Given(3e-3, RATE), LOAD)
        for sample in range(1, kept + 3):
            load = record.noted(Choice(48), USUAL, Given(1e-3, RATE), load)
            assert (CHUNKS in load.given) == (sample < kept)
    assert Choice(48) in load.given


def aged(record: LaneRecord, samples: int, usual: Usual = USUAL) -> Load:
    """What is known after this many samples of a split."""
    load = LOAD
    for _ in range(samples):
        load = record.noted(Choice(48), usual, Given(1e-3, RATE), load)
    return load


def test_a_choice_that_is_measured_for_long_is_forgotten_as_at_first_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_record, "_KEPT_SAMPLES", 30)
    monkeypatch.setattr(lane_record, "_WINDOW", 5)
    record = LaneRecord()
    for count in (1, 5):
        for _ in range(count):
            record.noted(CHUNKS, USUAL, Given(3e-3, RATE), LOAD)
        assert CHUNKS in aged(record, 29).given
        assert CHUNKS not in aged(record, 1).given


def test_another_load_is_kept_as_long_as_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_record, "_KEPT_SAMPLES", 10)
    record, other = LaneRecord(), Usual(10, 4096)
    record.noted(CHUNKS, USUAL, Given(3e-3, RATE), LOAD)
    assert CHUNKS not in aged(record, 12).given
    aged(record, 3, other)
    record.noted(CHUNKS, other, Given(3e-3, RATE), LOAD)
    assert CHUNKS in aged(record, 9, other).given
    assert CHUNKS not in aged(record, 1, other).given


def test_by_what_joined_choices_were_wrong_is_forgotten_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_record, "_KEPT_SAMPLES", 10)
    record = LaneRecord()
    given = Given(4 * calculated(CHUNKS, LOAD).decode_seconds, RATE)
    load = record.noted(CHUNKS, USUAL, given, LOAD)
    for sample in range(1, 12):
        assert load.of_joined.decode == pytest.approx(4 if sample <= 10 else UNTRIED_JOINED.decode)
        load = record.noted(Choice(48), USUAL, Given(1e-3, RATE), load)
    assert load.of_splits != Factors()
