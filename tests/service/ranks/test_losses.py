"""Steps that fail: on all ranks, or on one alone while the others wait for it."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from expertd.service.engine.errors import DeviceLostError
from expertd.service.memory import Arena, Span
from expertd.service.moe.request import LayerRequest
from tests.service.apps import HIDDEN, Serving, rows, tiny_settings
from tests.service.channels.servers import answer_of, claimed
from tests.service.ranks.servers import output_for, rank_processes, serving_ranks
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


async def test_a_step_that_fails_on_all_ranks_leaves_them_as_they_are() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server:
        ranks = rank_processes()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="ValueError: span: expected a part of 65536 bytes"):
                await step_with_room_for(1, server)
            assert len(await output_for(server, rows(3))) == 3
        assert rank_processes() == ranks


async def test_a_step_that_fails_on_one_rank_alone_starts_all_again() -> None:
    async with serving_ranks(tiny_settings(ranks=2)) as server, asyncio.timeout(60):
        ranks = rank_processes()
        with pytest.raises(DeviceLostError, match="the step failed on some ranks alone: ValueError: span"):
            await step_with_room_for(3, server)
        await until(lambda: server.app.engine.why_not_ready() is None, 30)
        assert len(await output_for(server, rows(3))) == 3
        assert not set(ranks) & set(rank_processes())


async def test_a_channel_is_told_to_try_again_and_outlives_the_ranks(tmp_path: Path) -> None:
    settings = tiny_settings(ranks=2, channels={"socket": str(tmp_path / "channels")})
    async with serving_ranks(settings) as server, asyncio.timeout(60):
        peer = await claimed(server)
        values = rows(5)
        expected = await asyncio.to_thread(peer.infer, values)
        os.kill(rank_processes()[0], signal.SIGKILL)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        answer = await answer_of(peer, 5)
        assert (answer.status, answer.retry_after) == (503, 1.0)
        assert "rank 0: its process ended by SIGKILL" in answer.error
        await until(lambda: server.app.engine.why_not_ready() is None, 30)
        assert (await asyncio.to_thread(peer.infer, values) == expected).all()
        peer.close()
