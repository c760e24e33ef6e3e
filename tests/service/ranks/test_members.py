"""Which ranks can go on without others, and what they are sent."""

import random
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from expertd.service.moe.placement import Placement
from expertd.service.ranks import survivors
from expertd.service.ranks.group import RankGroup
from expertd.service.ranks.inbox import Inbox
from expertd.service.ranks.members import MEET, MeetCommand, meet_bytes
from expertd.service.ranks.moves import NO_STEP
from expertd.service.ranks.placements import PlacementStore
from expertd.service.ranks.rank import Rank
from tests.service.apps import tiny_settings


def test_a_command_to_meet_arrives_as_it_was_sent() -> None:
    for _ in range(50):
        members = sorted(random.sample(range(64), random.randint(1, 64)))
        command = MeetCommand(random.randrange(2**63), members)
        packed = command.packed()
        assert packed.startswith(MEET)
        assert packed.startswith(NO_STEP)
        assert len(packed) <= meet_bytes(64)
        assert MeetCommand.unpacked(packed) == command


@dataclass
class FakeRank:
    """A rank that leaves its steps when asked, if `leaves`."""

    number: int
    digest: str
    is_gone: bool = False
    leaves: bool = True
    left: str | None = None
    ended: bool = False
    said: list[Any] = field(default_factory=list)

    def why_gone(self) -> str | None:
        return "gone" if self.is_gone or self.ended else None

    def send(self, *message: Any) -> None:
        self.said += message


class FakeInbox:
    def take(self, ranks: list[FakeRank], seconds: float) -> None:
        for rank in ranks:
            if "leave" in rank.said and rank.leaves:
                rank.left = rank.digest


@pytest.fixture
def store() -> PlacementStore:
    """Four experts on three ranks: 0 1 2, 3 0 1, 2 3."""
    placement = {"policy": "static", "replicas": 4}
    return PlacementStore(tiny_settings(ranks=3, on_rank_loss="shrink", placement=placement))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "_LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(survivors, "_GONE_SECONDS", 0.05)
    monkeypatch.setattr(survivors, "end_ranks", _end)


def _end(ranks: list[FakeRank]) -> None:
    for rank in ranks:
        rank.ended = True


def left_of(ranks: list[FakeRank], store: PlacementStore, failed: set[int] | None = None) -> list[int]:
    group = RankGroup(1, cast(list[Rank], ranks), Inbox(), 60.0)
    group.failed = failed or set()
    left = survivors.survivors_of(group, cast(Inbox, FakeInbox()), store)
    return [rank.number for rank in left]


def ranks_of(store: PlacementStore) -> list[FakeRank]:
    return [FakeRank(number, store.digest()) for number in range(3)]


def test_placements_say_which_ranks_hold_every_expert(store: PlacementStore) -> None:
    assert [store.are_held_by(ranks) for ranks in ([0, 1, 2], [0, 1], [0, 2], [1, 2])] == [True] * 4
    assert not any(store.are_held_by([rank]) for rank in range(3))


def test_ranks_go_on_without_those_that_are_gone_or_have_failed(store: PlacementStore) -> None:
    for lost in range(3):
        ranks = ranks_of(store)
        ranks[lost].is_gone = True
        assert left_of(ranks, store) == [other for other in range(3) if other != lost]
        assert [rank.ended for rank in ranks] == [rank.is_gone for rank in ranks]
        ranks = ranks_of(store)
        assert left_of(ranks, store, {lost}) == [other for other in range(3) if other != lost]
        assert ranks[lost].ended


def test_all_start_again_if_nobody_knows_which_rank_is_lost(store: PlacementStore) -> None:
    ranks = ranks_of(store)
    assert left_of(ranks, store) == []
    assert not any(rank.said for rank in ranks)


def test_a_rank_that_does_not_leave_its_step_is_lost_too(store: PlacementStore) -> None:
    ranks = ranks_of(store)
    ranks[0].is_gone, ranks[1].leaves = True, False
    assert left_of(ranks, store) == []
    assert [rank.ended for rank in ranks] == [True, True, False]


def test_all_start_again_if_ranks_switched_differently(store: PlacementStore) -> None:
    """One rank had gone over to another placement when the others lost it."""
    ranks = ranks_of(store)
    moved = Placement(np.array([[0, 1, 2, 3, 0, 1, 3, 2]]), 4, 3)
    before = store.digest()
    store.set(0, 0, moved)
    assert store.digest() != before
    ranks[0].is_gone, ranks[1].digest = True, store.digest()
    assert left_of(ranks, store) == []
    ranks = ranks_of(store)
    ranks[0].is_gone = True
    assert left_of(ranks, store) == [1, 2]


@dataclass
class RecordedRank(FakeRank):
    """Another rank joins its group while it is asked."""

    group: RankGroup | None = None
    recorded: str | None = None
    answer: list[Any] | None = None

    def send(self, *message: Any, descriptors: Any = ()) -> None:
        assert self.group is not None
        self.recorded, self.answer = "", ["", {}]
        if len(self.group.ranks) == 2:
            self.group.ranks = cast(list[Rank], [*self.group.ranks, RecordedRank(2, "")])


@pytest.mark.parametrize("files", [{}, {0: 10, 1: 11}])
def test_a_rank_that_comes_back_is_not_waited_for_by_those_who_did_not_ask_it(files: dict[int, int]) -> None:
    ranks = [RecordedRank(number, "") for number in range(2)]
    group = RankGroup(1, cast(list[Rank], ranks), Inbox(), 60.0)
    for rank in ranks:
        rank.group = group
    assert group.record(files, "record", "begin") == {0: "", 1: ""}
    group.ranks = cast(list[Rank], ranks)
    assert group.ask("partitions", {}) == {0: ["", {}], 1: ["", {}]}
    assert len(group.ranks) == 3
    assert group.lost is None
