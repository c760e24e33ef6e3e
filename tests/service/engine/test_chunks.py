"""Requests in chunks, through the executor: their answers, and what happens between chunks."""

import asyncio
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest

from expertd.service.engine.chunks import part_of
from expertd.service.engine.errors import QueueTimeoutError, StepFailedError
from expertd.service.engine.executor import Executor
from expertd.service.memory import Span
from expertd.service.moe.request import LayerRequest, Signal, StepPlan
from tests.service.engine.test_executor import Observed, held, running, soon, values
from tests.service.runners import EchoRunner, Submitted, Turnstile, layer_request

LONG = [float(i) for i in range(1, 33)]


def chunking(runner: EchoRunner, observer: Observed | None = None) -> AbstractAsyncContextManager[Executor]:
    """An executor with chunks of 8 tokens."""
    limits = {"max_request_tokens": 32, "max_batch_tokens": 32, "prefill_chunk_tokens": 8}
    return running(runner, observer=observer, **limits)


async def next_step(runner: EchoRunner, gate: Turnstile) -> None:
    """Let the step at the gate end, and wait for the next one."""
    gate.let_one_through()
    assert await asyncio.to_thread(runner.entered.acquire, True, 10)


async def in_chunks(runner: EchoRunner, executor: Executor, request: LayerRequest) -> Submitted:
    """A long request that will be computed in chunks, behind a request whose step is running."""
    await held(runner, executor)
    long = Submitted(executor, "0", request)
    Submitted(executor, "0", layer_request([0.0]))
    return long


def span(array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> Span:
    return Span(array.ctypes.data, array.nbytes, None, array.data.cast("B"), array)


async def test_a_request_in_chunks_is_answered_once_with_all_of_its_output() -> None:
    runner, observed = EchoRunner(), Observed()
    async with chunking(runner, observed) as executor:
        long = await in_chunks(runner, executor, layer_request(LONG))
        runner.gate.set()
        assert values(await soon(long.answer)) == LONG
        await soon(executor.drained())
    assert runner.steps == [[1], [1], [8], [8], [8], [8]]
    assert long.pending.compute_seconds == pytest.approx(4 * runner.seconds)
    assert observed.done == [("0", 1)] * 3 + [("0", 0)] * 3, "it counts in its first step"


async def test_chunks_use_the_requests_own_memory() -> None:
    runner = EchoRunner()
    out = np.zeros(32, np.float32)
    request = layer_request(LONG)
    request.hidden_states, request.output = span(np.array(LONG, np.float32)), span(out)
    async with chunking(runner) as executor:
        long = await in_chunks(runner, executor, request)
        runner.gate.set()
        assert await soon(long.answer) is request.output
    assert out.tolist() == LONG
    assert len(runner.steps) == 6


async def test_a_request_that_is_cancelled_between_chunks_is_not_computed_further() -> None:
    runner = EchoRunner()
    runner.gate = gate = Turnstile()
    async with chunking(runner) as executor:
        first = Submitted(executor, "0", layer_request([0.0]))
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
        long, other = (Submitted(executor, "0", layer_request(tokens)) for tokens in (LONG, [0.0]))
        for _ in range(3):
            await next_step(runner, gate)
        assert executor.waiting("0") == (1, 16), "the second chunk is being computed"
        assert executor.cancel(long.pending, QueueTimeoutError("too late"))
        assert not executor.cancel(long.pending, QueueTimeoutError("twice"))
        assert executor.waiting("0") == (0, 0)
        await asyncio.sleep(0)
        assert not long.answer.done(), "the step still uses its memory"
        gate.set()
        with pytest.raises(QueueTimeoutError, match="too late"):
            await soon(long.answer)
        for each in (first, other):
            await soon(each.answer)
        await soon(executor.drained())
    assert runner.steps == [[1], [1], [8], [8]]


async def test_a_request_is_not_cancelled_once_its_last_chunk_has_begun() -> None:
    runner = EchoRunner()
    runner.gate = gate = Turnstile()
    async with chunking(runner) as executor:
        Submitted(executor, "0", layer_request([0.0]))
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
        long = Submitted(executor, "0", layer_request(LONG[:16]))
        Submitted(executor, "0", layer_request([0.0]))
        for _ in range(3):
            await next_step(runner, gate)
        assert not executor.cancel(long.pending, QueueTimeoutError("too late"))
        gate.set()
        assert values(await soon(long.answer)) == LONG[:16]


async def test_a_chunk_that_fails_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner, observed = EchoRunner(poison=9.0), Observed()
    async with chunking(runner, observed) as executor:
        with caplog.at_level("CRITICAL"):
            long = await in_chunks(runner, executor, layer_request(LONG))  # its second chunk begins with 9
            other = Submitted(executor, "0", layer_request([5.0] * 8))
            runner.gate.set()
            with pytest.raises(StepFailedError, match="the step failed: RuntimeError"):
                await soon(long.answer)
            assert values(await soon(other.answer)) == [5.0] * 8
            await soon(executor.drained())
    assert runner.steps == [[1], [1, 8], [8], [8]]
    assert observed.failed == [1]


@pytest.mark.parametrize("ids_datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("datatype", ["BF16", "FP16", "FP32"])
def test_a_part_has_its_rows_of_every_tensor(datatype: str, ids_datatype: str) -> None:
    element, wide = (4 if datatype == "FP32" else 2), (8 if ids_datatype == "INT64" else 4)
    out = np.zeros(6 * 3, np.float32)
    request = LayerRequest(
        6, _counted(6, 3 * element), datatype, _counted(6, 2 * wide), ids_datatype, _counted(6, 2 * 4),
        "FP32", span(out), Signal(1, 2), plan=StepPlan(None, None, "kept"),
    )  # fmt: skip
    part = part_of(request, 2, 3)
    sizes = ((part.hidden_states, 3 * element), (part.topk_ids, 2 * wide), (part.topk_weights, 8))
    for rows, size in sizes:
        assert isinstance(rows, memoryview)
        assert bytes(rows) == b"".join(bytes([row]) * size for row in (2, 3, 4))
    assert part.output is not None
    assert part.output.view is not None
    assert (part.output.address, part.output.num_bytes) == (out.ctypes.data + 24, 36)
    part.output.view[:] = b"\1" * 36
    assert (out != 0).nonzero()[0].tolist() == list(range(6, 15))
    assert (part.num_tokens, part.datatype, part.topk_ids_datatype) == (3, datatype, ids_datatype)
    assert part.signal is None, "the device would announce an output that is not complete"
    assert part.plan is None


def _counted(rows: int, row_bytes: int) -> bytes:
    return b"".join(bytes([row]) * row_bytes for row in range(rows))
