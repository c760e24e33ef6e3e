"""Partitions of ranks, with a fake device on each: replaced on all or on none. On CPUs, refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.loading import LoadedLayers
from expertd.service.ranks.partitions import RankPartitions, replace, shown
from tests.service.apps import error_of, rows, tiny_settings
from tests.service.http.routes.test_partitions import Device
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.servers import output_for, rank_processes, serving_ranks

NO_SMS = "partitions: expected a backend whose device has SMs to partition, got 'reference'"


class FakeRank:
    """A rank with a fake device, which may refuse sizes that others take."""

    def __init__(self, refuses: int | None = None) -> None:
        self.device = Device()
        self.prepared_with: list[dict[str, int]] = []
        self._refuses = refuses
        self.loaded = LoadedLayers("fake", "fake", {}, self.device, lambda: None, self._prepare)

    def asked(self, sizes: dict[str, int] | None) -> list[Any]:
        if sizes is not None and self._refuses in sizes.values():
            return [f"partitions: expected other sizes than {self._refuses}", shown(self.loaded)]
        return list(replace(self.loaded, sizes))

    def sizes(self) -> dict[str, int]:
        return {each.name: each.requested_sms for each in self.device.partitions}

    def _prepare(self, _: Callable[[], bool]) -> None:
        self.prepared_with.append(self.sizes())


class FakeGroup:
    """The part of a group that partitions use."""

    def __init__(self, *ranks: FakeRank) -> None:
        self.ranks = ranks
        self.why: str | None = None
        self.dies_at: int | None = None  # the number of a question

    def ask(self, word: str, sizes: dict[str, int] | None) -> dict[int, list[Any]]:
        assert word == "partitions"
        if sizes is None:
            held = [rank.sizes() for rank in self.ranks]
            assert held == held[:1] * len(held), "ranks prepare steps together"
        answers = {number: rank.asked(sizes) for number, rank in enumerate(self.ranks)}
        if self.dies_at == 0:
            raise DeviceLostError("rank 1: its process ended")
        self.dies_at = None if self.dies_at is None else self.dies_at - 1
        return answers

    def lose(self, why: str) -> None:
        self.why = why


def partitions_of(group: FakeGroup, kept: list[dict[str, int]]) -> RankPartitions:
    return RankPartitions(lambda: group, shown(group.ranks[0].loaded), kept.append)  # type: ignore[arg-type,return-value]


def test_all_ranks_get_the_same() -> None:
    group, kept = FakeGroup(FakeRank(), FakeRank()), list[dict[str, int]]()
    partitions = partitions_of(group, kept)
    assert (partitions.device_name, partitions.total_sms, partitions.granularity) == ("arithmetic", 132, 8)
    assert len(partitions.partitions) == 0
    changes: list[dict[str, int]] = [{"compute": 100, "communication": 20}, {"compute": 50}]
    for sizes in changes:
        granted = partitions.apply(sizes)
        assert {each.name: each.requested_sms for each in granted} == sizes
        assert all(each.num_sms % 8 == 0 for each in partitions.partitions)
        assert [rank.sizes() for rank in group.ranks] == [sizes, sizes]
        assert kept.pop() == sizes, "for ranks that start again"
    assert [rank.prepared_with for rank in group.ranks] == [changes] * 2


def test_a_rank_that_cannot_prepare_steps_ends() -> None:
    """It has no graphs then, and the others do."""

    def fail(_: Callable[[], bool]) -> None:
        raise MemoryError("no memory for a graph")

    with pytest.raises(MemoryError):
        replace(LoadedLayers("fake", "fake", {}, Device(), lambda: None, fail), None)


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_refuses_has_the_others_keep_theirs(refusing: int) -> None:
    ranks = [FakeRank(refuses=64 if number == refusing else None) for number in range(2)]
    group, kept = FakeGroup(*ranks), list[dict[str, int]]()
    partitions = partitions_of(group, kept)
    partitions.apply({"compute": 32})
    before = partitions.partitions
    with pytest.raises(ValueError, match=f"rank {refusing}: partitions: expected other sizes than 64"):
        partitions.apply({"compute": 64})
    assert [rank.sizes() for rank in ranks] == [{"compute": 32}] * 2
    assert partitions.partitions == before
    assert kept == [{"compute": 32}]
    assert group.why is None
    assert [rank.prepared_with for rank in ranks] == [[{"compute": 32}] * 2] * 2, (
        "also with the old ones again"
    )


def test_sizes_that_no_rank_takes_are_refused_in_the_devices_words() -> None:
    group, kept = FakeGroup(FakeRank(), FakeRank()), list[dict[str, int]]()
    with pytest.raises(ValueError, match=r"^partitions: expected at most 132 SMs, got 136$"):
        partitions_of(group, kept).apply({"compute": 136})
    assert kept == []
    assert [rank.prepared_with for rank in group.ranks] == [[], []]


def test_ranks_that_cannot_go_back_start_again() -> None:
    group, kept = FakeGroup(FakeRank(), FakeRank(refuses=64)), list[dict[str, int]]()
    partitions = partitions_of(group, kept)
    partitions.apply({"compute": 32})
    group.ranks[0]._refuses = 32
    with pytest.raises(DeviceLostError, match="expected other sizes than 32"):
        partitions.apply({"compute": 64})
    assert group.why == "partitions differ between ranks: partitions: expected other sizes than 32"
    assert kept == [{"compute": 32}], "which ranks that start again have"


def test_a_rank_that_is_lost_meanwhile_changes_nothing() -> None:
    group, kept = FakeGroup(FakeRank(), FakeRank()), list[dict[str, int]]()
    partitions = partitions_of(group, kept)
    group.dies_at = 0
    with pytest.raises(DeviceLostError):
        partitions.apply({"compute": 64})
    assert (partitions.partitions, kept) == ((), [])


@pytest.mark.slow
async def test_ranks_on_cpus_refuse_partitions(tmp_path: Path) -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server:
        refused = await server.http.put("/v1/partitions", json={"partitions": {"compute": 64}})
        assert error_of(refused, 409) == NO_SMS
        assert error_of(await server.http.get("/v1/partitions"), 409) == NO_SMS


@pytest.mark.slow
async def test_ranks_of_all_nodes_answer_between_steps(tmp_path: Path) -> None:
    """What each says on a CPU; the server does not ask it there."""
    settings = node_settings()
    with agent(settings, tmp_path):
        async with serving_ranks(settings) as server:
            ranks = rank_processes()
            loaded = server.app.engine.loaded
            assert loaded is not None
            runner: Any = loaded.runners["tiny"]
            group = runner._steps.supervisor.group()
            ask = server.app.engine.executor.between_steps
            assert await ask(lambda: group.ask("partitions", {"compute": 8})) == {
                0: [NO_SMS, []],
                1: [NO_SMS, []],
            }
            assert len(await output_for(server, rows(3))) == 3
            assert rank_processes() == ranks
