"""Ranks that fail, hang or are lost under traffic: no request is lost, wrong or hung, and they come back.

KILLING_SECONDS says for how long they are lost at random: 5 by default, 60 for a change to ranks.
"""

import asyncio
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from expertd.service.engine.errors import DeviceLostError, RequestRefusedError
from expertd.service.memory import Arena, Mapped, Span
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.setup import MAX_SENT
from tests.service.apps import HIDDEN, Serving, error_of, hidden_request, output_of, rows, tiny_settings
from tests.service.channels.servers import answer_of, claimed
from tests.service.ranks.hanging import allow_hanging, hang
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.servers import close, output_for, rank_processes, serving_ranks, watch_steps
from tests.service.ranks.steps import LIMITS
from tests.service.ranks.traffic import Traffic, traffic_to
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes


async def step_with_room_for(num_rows: int, server: Serving) -> None:
    """Run a step of 4 tokens whose output has memory of `num_rows` only: the ranks with other rows fail."""
    loaded = server.app.engine.loaded
    assert loaded is not None
    arena = Arena(1 << 16, loaded.register)
    size = 4 * HIDDEN * num_rows
    block = arena.take(1 << 16)
    assert block is not None
    output = Span(block.span.address + (1 << 16) - size, size)
    request = LayerRequest(4, rows(4).tobytes(), "FP32", None, "INT32", None, "FP32", output)
    runner = loaded.runners["tiny"]
    try:
        await asyncio.to_thread(lambda: runner.begin([request]).finish())
    finally:
        await asyncio.to_thread(arena.close)


async def test_a_step_that_fails_on_one_rank_alone_starts_all_again_and_on_all_ranks_none() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(240):
        ranks = rank_processes()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="ValueError: span: expected a part of 65536 bytes"):
                await step_with_room_for(1, server)
            assert len(await output_for(server, rows(3))) == 3
        assert rank_processes() == ranks
        with pytest.raises(DeviceLostError, match="the step failed on some ranks alone: ValueError: span"):
            await step_with_room_for(3, server)
        await until(lambda: server.app.engine.why_not_ready() is None)
        assert len(await output_for(server, rows(3))) == 3
        assert not set(ranks) & set(rank_processes())


async def test_a_channel_is_told_to_try_again_and_outlives_the_ranks(tmp_path: Path) -> None:
    settings = tiny_settings(ranks=2, channels={"socket": str(tmp_path / "channels")})
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        peer = await claimed(server)
        values = rows(5)
        expected = await asyncio.to_thread(peer.infer, values)
        os.kill(rank_processes()[0], signal.SIGKILL)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        answer = await answer_of(peer, 5)
        assert (answer.status, answer.retry_after) == (503, 1.0)
        assert "rank 0: its process ended by SIGKILL" in answer.error
        await until(lambda: server.app.engine.why_not_ready() is None)
        assert (await asyncio.to_thread(peer.infer, values) == expected).all()
        peer.close()


HOW = {signal.SIGKILL: "ended by SIGKILL", signal.SIGSTOP: "was stopped"}


@pytest.mark.parametrize(
    ("ranks", "losses"),
    [
        (2, [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]),
        pytest.param(4, [(2, signal.SIGKILL)], marks=pytest.mark.thorough),
    ],
)
async def test_a_lost_rank_costs_no_request_its_answer(
    ranks: int, losses: list[tuple[int, signal.Signals]]
) -> None:
    """One loss after another, each of ranks that have come back from the one before."""
    async with serving_ranks(tiny_settings(ranks=ranks)) as server, asyncio.timeout(240):
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


async def test_memory_that_its_caller_took_away_does_not_keep_ranks_from_coming_back() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(240):
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
        await until(lambda: server.app.engine.why_not_ready() is None)
        with pytest.raises(RequestRefusedError, match=r"started again \(mmap length .*\): share it anew$"):
            ranks.regions.place(maps[0].ctypes.data, 1)
        assert ranks.regions.place(maps[1].ctypes.data, 1).offset == 0, "the other caller's"
        assert len(await output_for(server, rows(3))) == 3
        for each in forget:
            each()
        with pytest.raises(ValueError, match="expected memory that the ranks share"):
            ranks.regions.place(maps[1].ctypes.data, 1)


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
        await until(lambda: server.app.engine.why_not_ready() is None)
        assert close(await output_for(server, values), expected)


@pytest.mark.thorough
async def test_ranks_map_regions_until_they_are_forgotten_and_come_back_to_many() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(240):
        ranks, descriptor = supervisor_of(server), os.memfd_create("caller")
        os.ftruncate(descriptor, 4096)
        before = len(ranks.regions.all())
        with pytest.raises(RuntimeError, match=r"^mmap length is greater than file size \(rank 0\)$"):
            ranks.register_file(Mapped(1 << 50, 8192, descriptor))
        assert len(ranks.regions.all()) == before
        for _ in range(20):
            forget_one = ranks.register_file(Mapped(1 << 50, 4096, descriptor))
            assert all("memfd:caller" in maps_of(process) for process in rank_processes())
            forget_one()
            assert not any("memfd:caller" in maps_of(process) for process in rank_processes())
        # More than the ranks' sockets have room for messages about.
        addresses = range(1 << 50, (1 << 50) + 1000 * 4096, 4096)
        forget = [ranks.register_file(Mapped(address, 4096, descriptor)) for address in addresses]
        os.kill(rank_processes()[0], signal.SIGKILL)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        with pytest.raises(DeviceLostError):
            ranks.register_file(Mapped(1 << 40, 4096, descriptor))
        await until(lambda: server.app.engine.why_not_ready() is None)
        assert all(ranks.regions.place(address, 4096).offset == 0 for address in addresses)
        for each in forget:
            each()
        os.close(descriptor)


def maps_of(process: int) -> str:
    """What a process has mapped."""
    return Path(f"/proc/{process}/maps").read_text()


async def test_a_rank_that_hangs_costs_no_request_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_hanging(tmp_path, monkeypatch)
    settings = tiny_settings(ranks=2, step_timeout_seconds=4)
    async with serving_ranks(settings) as server, asyncio.timeout(240):
        values = rows(4)
        expected = await output_for(server, values)
        for rank in range(2):
            ranks = rank_processes()
            hang(ranks[rank])
            await check_that_callers_are_told(server, values)
            await until(lambda: server.app.engine.why_not_ready() is None)
            assert (await output_for(server, values) == expected).all()
            assert not set(ranks) & set(rank_processes()), "the whole group is new"


async def check_that_callers_are_told(server: Serving, values: NDArray[np.float32]) -> None:
    """The one whose step hangs, and one in the queue that does not wait for that."""
    in_step = asyncio.create_task(server.infer(*hidden_request(values)))
    executor = server.app.engine.executor
    await until(lambda: executor.unanswered == 1 and executor.waiting("tiny") == (0, 0))
    impatient = await server.infer(*hidden_request(values, parameters={"timeout": 50_000}))
    assert "timeout" in error_of(impatient, 503)
    assert not in_step.done(), "its own deadline is earlier"
    refused = await in_step
    assert "a rank hangs: expected the end of a step within 4 s" in error_of(refused, 503)
    assert refused.headers["retry-after"] == "1"


_SECONDS = float(os.environ.get("KILLING_SECONDS", "5"))


async def lose_at_random(processes: Callable[[], list[int]]) -> int:
    """Kill or stop one process after another, also while they start; the number of signals."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    until, count = time.monotonic() + _SECONDS, 0
    while time.monotonic() < until:
        await asyncio.sleep(generator.choice([generator.uniform(0.0, 0.5), generator.uniform(2.0, 6.0)]))
        if running := processes():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(generator.choice(running), generator.choice([signal.SIGKILL, signal.SIGSTOP]))
                count += 1
    return count


def check_traffic(traffic: Traffic, losses: int) -> None:
    """Nothing lost: every caller has an answer to each request, else the test could not end."""
    print(f"signals {losses}, right {traffic.right}, refused {traffic.refused}")
    assert losses > 0
    assert traffic.refused > 0
    assert traffic.wrong == []


@pytest.mark.thorough
@pytest.mark.timeout(300 + 2 * _SECONDS)
async def test_losses_on_one_node() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, traffic_to(server) as traffic:
        losses = await lose_at_random(rank_processes)
        await traffic.flows_again()
    check_traffic(traffic, losses)


@pytest.mark.thorough
@pytest.mark.timeout(300 + 2 * _SECONDS)
async def test_losses_on_two_nodes(tmp_path: Path) -> None:
    settings = node_settings()
    with agent(settings, tmp_path) as other:
        async with serving_ranks(settings) as server, traffic_to(server) as traffic:
            losses = await lose_at_random(lambda: [*rank_processes(), *other.ranks()])
            await traffic.flows_again()
        check_traffic(traffic, losses)
