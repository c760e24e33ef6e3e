"""The HTTP processes' access to the engine, in one process with it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd.service.channels.cells import CELL_BYTES
from expertd.service.channels.opening import Opening
from expertd.service.channels.remote import RemoteEngine
from expertd.service.engine.errors import (
    ExecutorClosedError,
    MemoryFullError,
    NotReadyError,
    QueueFullError,
    QueueTimeoutError,
    RegionsElsewhereError,
    RequestRefusedError,
    StepFailedError,
    TooManyRequestsError,
)
from expertd.service.engine.queue_counts import QueueCounts, num_cells
from expertd.service.engine.repository import ModelState
from expertd.service.engine.steps import Submission
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest, OutputMemory
from tests.service.apps import HIDDEN, NUM_EXPERTS, Serving, rows, tiny_settings
from tests.service.channels.servers import channel_server, mapped
from tests.service.runners import EchoRunner, Turnstile
from tests.service.waiting import until

CELLS, SLOTS = 4, 8
ARENA = 8 * CELL_BYTES


@asynccontextmanager
async def remote(
    directory: Path,
    runner: EchoRunner | None = None,
    **limits: Any,
) -> AsyncIterator[tuple[Serving, RemoteEngine]]:
    """A server, and an engine that computes in it."""
    given: dict[str, Any] = {
        "max_request_tokens": 512,
        "max_batch_tokens": 512,
        "max_queue_tokens": 4096,
        **limits,
    }
    async with channel_server(directory, runner, given) as server:
        app = server.app
        entry = await app.channels.open_ours(
            Opening(("tiny",), SLOTS, given["max_request_tokens"], memory=CELLS * CELL_BYTES + ARENA)
        )
        assert entry.token is not None
        channel = app.channels.claim(entry.token, 1, lambda: None)
        assert channel is not None
        cells = [0.0] * 2 * num_cells(1)
        engine = RemoteEngine(app.engine.settings, QueueCounts(cells, 1, 1))
        app.engine.share_counts(QueueCounts(cells, 1, 0))
        connection, other = socket.socketpair()
        with connection, other:
            engine.connect(channel.take_descriptors(), connection, CELLS)
            yield server, engine
            asyncio.get_running_loop().remove_reader(engine._link.answers)


class Asked:
    """A request to the engine, and its answer."""

    def __init__(
        self,
        engine: RemoteEngine,
        request: LayerRequest,
        priority: int = 128,
        caller: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.answers: list[OutputMemory | Exception] = []
        self.pending = engine.submit(
            Submission(
                "tiny", request, self.answers.append, priority=priority, caller=caller, timeout=timeout
            )
        )

    async def answer(self) -> OutputMemory | Exception:
        await until(lambda: bool(self.answers))
        assert len(self.answers) == 1
        return self.answers[0]

    async def output(self) -> bytes:
        answer = await self.answer()
        assert not isinstance(answer, Exception), answer
        return bytes(host_view(answer))


def request(num_tokens: int, seed: int = 0) -> LayerRequest:
    return LayerRequest(num_tokens, rows(num_tokens, seed).tobytes(), "FP32", None, "INT32", None, "FP32")


async def test_small_and_large_tensors_and_those_in_the_arena(tmp_path: Path) -> None:
    async with remote(tmp_path, EchoRunner()) as (_, engine):
        assert engine.arena is not None
        for num_tokens in (1, 100, 128, 129, 400):  # in a cell, of 128 KiB for both tensors, or in a block
            echoed = await Asked(engine, request(num_tokens, num_tokens)).output()
            assert echoed == rows(num_tokens, num_tokens).tobytes()
        assert engine.arena.used_bytes == 0
        body, output = engine.arena.take(512 * 4 * HIDDEN), engine.arena.take(512 * 4 * HIDDEN)
        assert body is not None
        assert output is not None
        body.view[:] = rows(512, 7).tobytes()
        given = LayerRequest(512, body.span, "FP32", None, "INT32", None, "FP32", output.span)
        answer = await Asked(engine, given).answer()
        assert answer is output.span, "written in place"
        assert bytes(output.view) == bytes(body.view)


async def test_more_requests_than_slots_wait_for_one(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (server, engine):
        runner.gate.clear()
        asked = [Asked(engine, request(1 + number, number)) for number in range(3 * SLOTS)]
        error = QueueTimeoutError("late")
        assert engine.cancel(asked[-1].pending, error), "it is not in the channel"
        assert asked[-1].answers == [error]
        runner.gate.set()
        for number, each in enumerate(asked[:-1]):
            assert await each.output() == rows(1 + number, number).tobytes()
        assert server.metric("requests_total", model="tiny", status="200") == 0, "the HTTP process counts"
        assert server.metric("channels") == 0


async def filled(runner: EchoRunner, engine: RemoteEngine, caller: int) -> list[Asked]:
    """Requests of a caller, the first of which is being computed; for one more there is no room."""
    runner.gate.clear()
    asked = [Asked(engine, request(1), caller=caller)]
    assert await asyncio.to_thread(runner.entered.acquire, True, 60)
    return [*asked, *(Asked(engine, request(128), caller=caller) for _ in range(CELLS - 2))]


async def test_what_waits_is_sent_in_the_engines_order(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner, max_request_tokens=128, max_batch_tokens=128) as (_, engine):
        asked = await filled(runner, engine, caller=1)
        asked += [Asked(engine, request(100 + number), caller=1) for number in range(3)]
        asked.append(Asked(engine, request(80), caller=2))  # into the cell that is kept
        asked += [Asked(engine, request(81 + number), caller=2) for number in range(2)]
        asked.append(Asked(engine, request(70), caller=1, priority=1))
        waits = [not each.pending.sequence for each in asked]
        assert waits == [False] * 3 + [True] * 3 + [False] + [True] * 3
        runner.gate.set()
        for each in asked:
            await each.output()
    sent = sorted(asked, key=lambda each: each.pending.sequence)
    # Of the other caller, one found room at once; then the most urgent one, and callers in turns.
    assert [each.pending.left for each in sent] == [1, 128, 128, 80, 70, 100, 81, 101, 82, 102]


async def test_one_like_which_none_is_in_the_channel_is_sent_into_the_first_free_cell(tmp_path: Path) -> None:
    runner = EchoRunner()
    runner.gate = Turnstile()
    async with remote(tmp_path, runner, max_request_tokens=128, max_batch_tokens=128) as (_, engine):
        first = [Asked(engine, request(128), caller=1) for _ in range(CELLS - 1)]
        others = [Asked(engine, request(128), caller=caller) for caller in (2, 1, 3)]
        assert [bool(each.pending.sequence) for each in others] == [True, False, False]
        runner.gate.let_one_through()
        await first[0].output()
        assert others[2].pending.sequence
        assert not others[1].pending.sequence, "the channel has some of its caller"
        runner.gate.set()
        for each in others:
            await each.output()


async def test_a_request_that_takes_long_holds_up_none_before_its_slot_comes_again(tmp_path: Path) -> None:
    runner = EchoRunner()
    runner.gate = Turnstile()
    async with remote(tmp_path, runner, max_request_tokens=128, max_batch_tokens=128) as (_, engine):
        begun = Asked(engine, request(128))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        slow = Asked(engine, request(128), priority=255)
        others = [begun, Asked(engine, request(128), priority=1)]
        for number in range(SLOTS - 2):
            others.append(Asked(engine, request(128), priority=1))
            runner.gate.let_one_through()
            await others[number].output()
            assert others[-1].pending.sequence
        assert not slow.answers
        assert slow.pending.sequence + SLOTS == others[-1].pending.sequence + 1
        runner.gate.set()
        await slow.output()


async def test_more_than_may_wait_is_refused_from_the_headers(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner, max_queue_requests=2) as (_, engine):
        asked = await filled(runner, engine, caller=0)
        for number in range(2):
            engine.check_capacity("tiny", 1, 0)
            asked.append(Asked(engine, request(1, number)))
        with pytest.raises(QueueFullError, match="2 requests of at most 2 are waiting"):
            engine.check_capacity("tiny", 1, 0)
        with pytest.raises(QueueFullError, match="2 requests of at most 2 are waiting"):
            Asked(engine, request(1))
        runner.gate.set()
        for each in asked:
            await each.answer()
        engine.check_capacity("tiny", 1, 0)


async def test_a_full_queue_of_the_engine_is_known_from_the_headers(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner, max_queue_requests=2) as (server, engine):
        runner.gate.clear()
        asked = [Asked(engine, request(1), caller=1)]
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        asked += [Asked(engine, request(1), caller=1) for _ in range(2)]
        server.app.engine.executor.poll_sources()
        text = "^the queue of model tiny is full: 2 requests of at most 2 are waiting$"
        for caller in (0, 1):
            with pytest.raises(QueueFullError, match=text):
                engine.check_capacity("tiny", 1, caller)
        engine.check_capacity("tiny", 1, 2)
        asked.append(Asked(engine, request(1), caller=2))
        runner.gate.set()
        for each in asked:
            await each.output()
        engine.check_capacity("tiny", 1, 0)


async def test_what_waits_is_in_metrics_and_answered_in_a_drain(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (server, engine):
        asked = await filled(runner, engine, caller=0)
        asked += [Asked(engine, request(2)) for _ in range(3 * CELLS)]
        server.app.engine.executor.poll_sources()
        assert server.metric("queue_requests", model="tiny") == CELLS - 2 + 3 * CELLS
        assert server.metric("queue_tokens", model="tiny") == (CELLS - 2) * 128 + 6 * CELLS
        drain = asyncio.ensure_future(server.app.engine.drain())
        await asyncio.sleep(0)
        runner.gate.set()
        for each in asked:
            await each.output()
        assert await drain
        assert server.app.engine.queue_states()["tiny"][:2] == (0, 0)


async def test_the_time_in_which_a_request_waits_is_part_of_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(submission: Submission) -> Submission:
        timeouts.append(submission.timeout)
        return submit(submission)

    timeouts: list[float | None] = []
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (server, engine):
        submit = server.app.engine.executor.submit
        monkeypatch.setattr(server.app.engine.executor, "submit", noted)
        asked = await filled(runner, engine, caller=0)
        waits = [Asked(engine, request(2), timeout=timeout) for timeout in (100.0, 0.01)]
        assert not any(each.pending.sequence for each in waits)
        await asyncio.sleep(0.05)
        runner.gate.set()
        for each in (*asked, waits[0]):
            await each.output()
        answer = await waits[1].answer()  # an idle engine may try
        assert not isinstance(answer, Exception) or isinstance(answer, QueueTimeoutError | QueueFullError)
    left = [timeout for timeout in timeouts if timeout is not None]
    assert 0 < left[0] <= 99.95
    assert left[1] == 1e-6, "the least there is"


async def test_a_queued_request_is_cancelled_with_its_error(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (server, engine):
        runner.gate.clear()
        begun = Asked(engine, request(1))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        queued = Asked(engine, request(2))
        error = QueueTimeoutError("late")
        assert not engine.cancel(begun.pending, error)
        assert not engine.cancel(queued.pending, error)
        server.app.engine.executor.poll_sources()
        assert await queued.answer() is error
        runner.gate.set()
        assert await begun.output() == rows(1).tobytes()


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ([{}, {"priority": 1}], [259, 260]),
        ([{"caller": 7}, {"caller": 7}, {"caller": 2**32 - 1}], [260, 258, 259]),
    ],
    ids=["priority", "callers share the channel"],
)
async def test_priorities_and_callers_reach_the_engine(
    given: list[dict[str, int]], order: list[int], tmp_path: Path
) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (_, engine):
        runner.gate.clear()
        begun = Asked(engine, request(1), caller=7)
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        asked = [Asked(engine, request(260 - number), **each) for number, each in enumerate(given)]
        runner.gate.set()
        for each in (begun, *asked):
            await each.output()
    assert runner.steps == [[1], *([tokens] for tokens in order)], "no two fit in a step"


async def test_errors_are_those_of_the_engine(tmp_path: Path) -> None:
    runner = EchoRunner(poison=float(rows(1)[0, 0]))
    limits: dict[str, Any] = {"max_queue_requests": 1, "queue_full_status": 429}
    async with remote(tmp_path, runner, **limits) as (server, engine):
        assert isinstance(await Asked(engine, request(1)).answer(), StepFailedError)
        runner.gate.clear()
        begun = Asked(engine, request(1, 1))
        for _ in range(2):  # steps
            assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        assert begun.answers == []
        asked = [Asked(engine, request(1, 2)) for _ in range(2)]
        server.app.engine.executor.poll_sources()
        refused = await asked[1].answer()
        assert isinstance(refused, TooManyRequestsError)
        assert refused.retry_after >= 1
        runner.gate.set()
        await asked[0].output()
        server.app.engine.repository._states["tiny"] = ModelState("LOADING")
        server.app.engine.executor.remove_runner("tiny")
        refused = await Asked(engine, request(1)).answer()
        assert isinstance(refused, NotReadyError), "without a time to ask again, as of the engine"
        assert str(refused) == "model tiny is not ready: it is loading"
        server.app.engine.executor.close()
        assert isinstance(await Asked(engine, request(1)).answer(), ExecutorClosedError)


async def test_routing_is_checked_and_64_bit_ids_become_32_bit_ones(tmp_path: Path) -> None:
    async with remote(tmp_path) as (_, engine):
        weights = np.full((2, 2), 0.5, np.float32).tobytes()

        def routed(ids: list[list[int]], datatype: str) -> LayerRequest:
            given = np.array(ids, np.int64 if datatype == "INT64" else np.int32).tobytes()
            return LayerRequest(2, rows(2).tobytes(), "FP32", given, datatype, weights, "FP32")

        outputs = [
            await Asked(engine, routed([[0, 3], [2, 1]], each)).output() for each in ("INT32", "INT64")
        ]
        assert outputs[0] == outputs[1]
        padded = routed([[-1, NUM_EXPERTS], [2, -1]], "INT64")
        engine.validate("tiny", padded)
        assert (
            await Asked(engine, padded).output()
            == await Asked(engine, routed([[-1, NUM_EXPERTS], [2, -1]], "INT32")).output()
        )
        refused = await Asked(engine, routed([[0, NUM_EXPERTS + 1], [2, 1]], "INT32")).answer()
        assert isinstance(refused, RequestRefusedError)
        expected = "topk_ids: expected 0 to 3, or for no expert -1 or 4, got"
        assert str(refused) == f"{expected} 5 in token 0, slot 1"
        for wrong in (2**32, 2**32 - 1):
            with pytest.raises(ValueError, match=f"{expected} {wrong} in token 0, slot 1"):
                engine.validate("tiny", routed([[0, wrong], [2, 1]], "INT64"))


async def test_a_full_arena_refuses_what_needs_it(tmp_path: Path) -> None:
    async with remote(tmp_path, EchoRunner()) as (_, engine):
        assert engine.arena is not None
        block = engine.arena.take(engine.arena.num_bytes)
        assert block is not None
        with pytest.raises(MemoryFullError, match=r"limits\.max_buffered_bytes: expected memory"):
            engine.submit(Submission("tiny", request(400), lambda _: None))
        assert await Asked(engine, request(1)).output() == rows(1).tobytes(), "no slot was lost"
        block.release()
        assert await Asked(engine, request(400)).output() == rows(400).tobytes()


def test_only_the_engines_process_has_regions() -> None:
    settings = tiny_settings()
    assert RemoteEngine(settings).region_uses() is None
    allowed = settings.shared_memory.model_copy(update={"enabled": True})
    with pytest.raises(RegionsElsewhereError):
        RemoteEngine(settings.model_copy(update={"shared_memory": allowed})).region_uses()


async def test_the_servers_memory_is_freed(tmp_path: Path) -> None:
    before = mapped()
    async with remote(tmp_path, EchoRunner()) as (server, engine):
        await Asked(engine, request(1)).output()
        del engine
        (entry,) = server.app.channels.entries.values()
        server.app.channels.close(entry.channel, "test")
        del entry
    await until(lambda: mapped() <= before + 2)
