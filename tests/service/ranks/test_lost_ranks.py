"""A rank that is killed or stopped under traffic: nothing is lost, wrong or hung, and the ranks come back."""

import asyncio
import mmap
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from expertd.service.engine.errors import DeviceLostError, RequestRefusedError
from expertd.service.memory import Mapped
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.setup import MAX_SENT
from tests.service.apps import Serving, error_of, hidden_request, output_of, rows, tiny_settings
from tests.service.ranks.servers import close, output_for, rank_processes, serving_ranks, watch_steps
from tests.service.ranks.steps import LIMITS
from tests.service.ranks.traffic import traffic_to
from tests.service.waiting import until

HOW = {signal.SIGKILL: "ended by SIGKILL", signal.SIGSTOP: "was stopped"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "losses"),
    [
        (2, [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]),
        (4, [(2, signal.SIGKILL)]),
    ],
)
async def test_a_lost_rank_costs_no_request_its_answer(
    ranks: int, losses: list[tuple[int, signal.Signals]]
) -> None:
    """One loss after another, each of ranks that have come back from the one before."""
    async with serving_ranks(tiny_settings(ranks=ranks)) as server, asyncio.timeout(60):
        for count, (rank, number) in enumerate(losses, 1):
            async with traffic_to(server) as traffic:
                before = rank_processes()
                os.kill(before[rank], number)
                await until(lambda: server.app.engine.why_not_ready() is not None)
                ready = await server.http.get("/v2/health/ready")
                assert f"rank {rank}: its process {HOW[number]}" in error_of(ready, 503)
                assert (await server.http.get("/v2/health/live")).status_code == 200
                await traffic.flows_again()
            assert traffic.wrong == []
            assert traffic.refused > 0
            assert not set(before) & set(rank_processes()), "the whole group is new"
            assert server.metric("rank_starts_total", rank="0") == 1 + count
            assert server.metric("step_failures_total", model="tiny") == 0


def supervisor_of(server: Serving) -> Supervisor:
    """Which shares memory with the ranks."""
    loaded = server.app.engine.loaded
    assert loaded is not None
    supervisor = getattr(loaded.register, "__self__", None)
    assert isinstance(supervisor, Supervisor)
    return supervisor


@pytest.mark.slow
async def test_memory_that_its_caller_took_away_does_not_keep_ranks_from_coming_back() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(60):
        ranks, sizes = supervisor_of(server), (8192, 4096)
        files = [os.memfd_create("caller") for _ in sizes]
        maps, forget = [], []
        for descriptor, size in zip(files, sizes, strict=True):
            os.ftruncate(descriptor, size)
            maps.append(np.frombuffer(mmap.mmap(descriptor, size), np.uint8))
            forget.append(ranks.register_file(Mapped(maps[-1].ctypes.data, size, descriptor)))
            assert ranks.regions.place(maps[-1].ctypes.data + 16, size - 16).offset == 16
        os.ftruncate(files[0], 0)
        os.kill(rank_processes()[1], signal.SIGKILL)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        await until(lambda: server.app.engine.why_not_ready() is None, seconds=30)
        with pytest.raises(RequestRefusedError, match=r"started again \(mmap length .*\): share it anew$"):
            ranks.regions.place(maps[0].ctypes.data, 1)
        assert ranks.regions.place(maps[1].ctypes.data, 1).offset == 0, "the other caller's"
        assert len(await output_for(server, rows(3))) == 3
        for each in forget:
            each()
        with pytest.raises(ValueError, match="expected memory that the ranks share"):
            ranks.regions.place(maps[1].ctypes.data, 1)


@pytest.mark.slow
async def test_a_rank_is_lost_with_as_many_steps_as_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = list[int]()

    def kill(count: int) -> None:
        if count == MAX_SENT and not killed:
            killed.append(rank_processes()[1])
            os.kill(killed[0], signal.SIGKILL)

    async with serving_ranks(tiny_settings(LIMITS, ranks=2)) as server:
        values = rows(1000)
        expected = await output_for(server, values)
        watch_steps(monkeypatch, kill)
        answers = await asyncio.gather(*[server.infer(*hidden_request(values)) for _ in range(12)])
        assert killed
        assert 503 in {answer.status_code for answer in answers} <= {200, 503}
        assert all(close(output_of(answer), expected) for answer in answers if answer.status_code == 200)
        await until(lambda: server.app.engine.why_not_ready() is None, seconds=30)
        assert close(await output_for(server, values), expected)


@pytest.mark.slow
async def test_ranks_come_back_to_many_regions() -> None:
    """More than their sockets have room for messages about."""
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(90):
        ranks, descriptor = supervisor_of(server), os.memfd_create("callers")
        os.ftruncate(descriptor, 4096)
        addresses = range(1 << 50, (1 << 50) + 1000 * 4096, 4096)
        forget = [ranks.register_file(Mapped(address, 4096, descriptor)) for address in addresses]
        os.kill(rank_processes()[0], signal.SIGKILL)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        with pytest.raises(DeviceLostError):
            ranks.register_file(Mapped(1 << 40, 4096, descriptor))
        await until(lambda: server.app.engine.why_not_ready() is None, seconds=60)
        assert all(ranks.regions.place(address, 4096).offset == 0 for address in addresses)
        for each in forget:
            each()
        os.close(descriptor)


@pytest.mark.slow
async def test_memory_that_ranks_cannot_map_is_refused_and_all_else_is_closed_when_it_is_forgotten() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(60):
        ranks, descriptor = supervisor_of(server), os.memfd_create("caller")
        os.ftruncate(descriptor, 4096)
        before = len(ranks.regions.all())
        with pytest.raises(RuntimeError, match=r"^mmap length is greater than file size \(rank 0\)$"):
            ranks.register_file(Mapped(1 << 50, 8192, descriptor))
        assert len(ranks.regions.all()) == before
        for _ in range(20):
            forget = ranks.register_file(Mapped(1 << 50, 4096, descriptor))
            assert all("memfd:caller" in maps_of(process) for process in rank_processes())
            forget()
            assert not any("memfd:caller" in maps_of(process) for process in rank_processes())
        os.close(descriptor)


def maps_of(process: int) -> str:
    """What a process has mapped."""
    return Path(f"/proc/{process}/maps").read_text()
