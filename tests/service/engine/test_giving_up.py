"""What is accepted while an executor closes, fails or hangs is answered, and counted until then."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from expertd.service.engine.completions import Completion
from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.executor import Executor
from expertd.service.engine.steps import Submission
from expertd.service.memory import Span
from expertd.service.moe.request import LayerRequest
from tests.service.engine.test_executor import held, running, soon
from tests.service.runners import Computed, DeviceRunner, EchoRunner, Submitted, layer_request
from tests.service.waiting import until


def submit_together(
    executor: Executor, requests: Sequence[LayerRequest], done: Callable[[int, object], None]
) -> None:
    """Submit a source's requests, for one step; `done` also gets their numbers."""
    both = threading.Event()
    executor.do_between_steps(lambda: both.wait(60))
    for number, request in enumerate(requests):
        executor.submit(Submission("0", request, partial(done, number), on_worker=True))
    both.set()


class FailsTogether(EchoRunner):
    """A step of several requests fails; those of one wait at the gate then."""

    def begin(self, requests: Sequence[LayerRequest]) -> Computed:
        if len(requests) > 1:
            self.gate.clear()
            raise RuntimeError("not together")
        return super().begin(requests)


async def test_all_requests_of_a_step_are_answered_if_the_first_retry_hangs() -> None:
    runner = FailsTogether()
    async with running(runner) as executor:
        first = await held(runner, executor)
        others = [Submitted(executor, "0", layer_request([float(number)])) for number in range(4)]
        runner.gate.set()
        await soon(first.answer)
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        executor.give_up(DeviceLostError("the device hangs"))
        answers = await soon(asyncio.gather(*(each.answer for each in others), return_exceptions=True))
        assert all(str(answer) == "the device hangs" for answer in answers)
        runner.gate.set()  # the late ends answer nobody again
        await soon(executor.drained())


async def test_a_failed_step_behind_one_that_hangs_is_answered() -> None:
    class Behind(DeviceRunner):
        def begin(self, requests: Sequence[LayerRequest]):  # type: ignore[no-untyped-def]
            if self.steps:
                self.entered.release()
                raise RuntimeError("behind another one")
            return super().begin(requests)

    runner = Behind()
    runner.gate.clear()
    async with running(runner, max_request_tokens=1024, max_batch_tokens=1024, max_queue_tokens=4096) as one:
        both = threading.Event()
        one.do_between_steps(both.wait)
        requests = [Submitted(one, "0", layer_request([1.0] * 1024)) for _ in range(2)]
        both.set()
        for _ in requests:
            assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        one.give_up(DeviceLostError("the device hangs"))
        answers = await soon(asyncio.gather(*(each.answer for each in requests), return_exceptions=True))
        assert all(str(answer) == "the device hangs" for answer in answers)


async def test_requests_of_sources_are_answered_once_if_the_device_fails_meanwhile() -> None:
    class Failing(EchoRunner):
        def begin(self, requests: Sequence[LayerRequest]) -> Computed:
            super().begin(requests)
            raise RuntimeError("the device is gone")

    runner = Failing()
    given_up = threading.Event()
    answers: list[tuple[int, object]] = []

    def done(number: int, answer: object) -> None:
        answers.append((number, answer))
        if executor.lanes[0].is_here:  # the event loop gives up while the thread of the steps answers
            assert given_up.wait(60)

    async with running(runner) as executor:

        def give_up(why: str) -> None:
            executor.give_up(DeviceLostError(why))
            given_up.set()

        executor.watch_device(lambda: "gone", give_up)
        requests = [layer_request([float(number)]) for number in range(3)]
        submit_together(executor, requests, done)
        await soon(executor.drained())
    assert sorted(number for number, _ in answers) == [0, 1, 2]


@pytest.mark.parametrize("writes_in_place", [False, True])
async def test_requests_of_sources_are_answered_once_if_others_give_up_meanwhile(
    writes_in_place: bool,
) -> None:
    runner = EchoRunner()
    given_up = threading.Event()
    answers: list[tuple[int, object]] = []

    def done(number: int, answer: object) -> None:
        answers.append((number, answer))
        if executor.lanes[0].is_here:
            executor.lanes[0].completions.loop.call_soon_threadsafe(give_up)
            assert given_up.wait(60)

    def give_up() -> None:
        executor.give_up(DeviceLostError("the device hangs"))
        given_up.set()

    async with running(runner) as executor:
        requests = [layer_request([float(number)]) for number in range(3)]
        if writes_in_place:
            requests = [
                replace(request, output=Span(0, 4, None, memoryview(bytearray(4)))) for request in requests
            ]
        submit_together(executor, requests, done)
        await soon(executor.drained())
    assert sorted(number for number, _ in answers) == [0, 1, 2]
    assert not any(isinstance(answer, Exception) for _, answer in answers)


async def test_a_refused_request_is_answered_once_if_the_event_loop_gives_up_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = EchoRunner(poison=1.0)
    given_up = threading.Event()
    answers: list[object] = []

    def give_up() -> None:
        executor.give_up(DeviceLostError("the device hangs"))
        given_up.set()

    async with running(runner) as executor:
        completions = executor.lanes[0].completions
        deliver_soon = completions.deliver_soon

        def slowly(pairs: Sequence[Completion]) -> None:
            deliver_soon(pairs)
            completions.loop.call_soon_threadsafe(give_up)
            assert given_up.wait(60)

        monkeypatch.setattr(completions, "deliver_soon", slowly)
        executor.do_between_steps(lambda: None)  # so that the thread computes it
        executor.submit(Submission("0", layer_request([1.0]), answers.append))
        await soon(executor.drained())
        await until(given_up.is_set)  # on this loop, which the executor's stop would hold up
    assert len(answers) == 1


async def test_a_request_that_is_being_accepted_is_counted_when_the_executor_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, goes_on = threading.Event(), threading.Event()

    def note(pending: Submission) -> None:
        inside.set()
        assert goes_on.wait(60)

    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        monkeypatch.setattr(executor.lanes[0].early, "note", note)
        request, done = layer_request([1.0]), threading.Event()
        submitting = asyncio.ensure_future(
            asyncio.to_thread(executor.submit, Submission("0", request, lambda _: done.set()))
        )
        assert await asyncio.to_thread(inside.wait, 60)

        def close() -> int:
            executor.close()
            return executor.unanswered

        closing = asyncio.ensure_future(asyncio.to_thread(close))
        await asyncio.wait({closing}, timeout=0.2)
        goes_on.set()
        await submitting
        assert await closing == 2
        runner.gate.set()
        await soon(first.answer)
        await soon(executor.drained())
        assert done.is_set()


async def test_a_step_whose_model_is_unloaded_meanwhile_is_none_for_other_threads() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        queue = executor.lanes[0].queues._of.pop("0")
        assert executor.lanes[0].step_in_flight() == (None, 0.0)
        assert not executor.lanes[0].poller._may_be_long(executor.lanes[0].stepping.in_flight())
        executor.lanes[0].queues._of["0"] = queue
        assert executor.lanes[0].step_in_flight()[0] is not None
        runner.gate.set()
        await soon(first.answer)
