"""Recording steps without a server: which steps run, what the trace has, and its limits."""

import json
import time
from collections.abc import Sequence

import pytest

from expertd.service.engine.errors import NotReadyError, StepFailedError
from expertd.service.engine.profile_run import profile_steps
from expertd.service.moe.request import LayerRequest, StepResult
from tests.service.apps import serving_runner, tiny_settings
from tests.service.runners import EchoRunner

LANES = {"decode_max_tokens": 2, "decode_batch_tokens": 4}


@pytest.mark.parametrize("num_tokens", [1, 64])
@pytest.mark.parametrize("lanes", [{}, LANES])
async def test_each_step_has_its_tokens(num_tokens: int, lanes: dict[str, int]) -> None:
    runner = EchoRunner()
    settings = tiny_settings(lanes=lanes)
    recording = await profile_steps(settings, 6, num_tokens, 20, serving_runner(runner))
    assert runner.steps == [[num_tokens]] * 16  # the first 10 are not recorded
    assert recording.steps == json.loads(recording.trace)["expertd"]["steps"] == 6


async def test_the_trace_has_the_layers_operations() -> None:
    recording = await profile_steps(tiny_settings(), 3, 8, 20)
    trace = json.loads(recording.trace)
    assert trace["expertd"] == {
        "steps": 3,
        "backend": "reference",
        "device": trace["expertd"]["device"],
        "sms": None,
    }
    operations = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    names = [event["name"] for event in operations]
    assert names.count("aten::softmax") == 3  # the router's, once in each step
    took = max(event["ts"] + event["dur"] for event in operations) - min(event["ts"] for event in operations)
    assert 0 < took / 1e6 <= recording.seconds


@pytest.mark.parametrize(("num_tokens", "name"), [(2, "decode lane"), (3, "prefill lane")])
async def test_threads_are_named(num_tokens: int, name: str) -> None:
    recording = await profile_steps(tiny_settings(lanes=LANES), 1, num_tokens, 20)
    events = json.loads(recording.trace)["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    (used,) = {event["tid"] for event in events if event["name"] == "aten::softmax"}
    assert threads[used] == f"{name} (thread {used})"


async def test_seconds_end_a_recording() -> None:
    class Slow(EchoRunner):
        def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
            time.sleep(0.05)
            return super()._run(requests)

    runner = Slow()
    recording = await profile_steps(tiny_settings(), 100, 1, 0.6, serving_runner(runner))
    assert 0 < recording.steps <= 12
    assert len(runner.steps) <= 24  # also those before
    assert json.loads(recording.trace)["expertd"]["steps"] == recording.steps


async def test_a_failing_step_ends_it() -> None:
    class Failing(EchoRunner):
        def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
            if len(self.steps) == 12:
                raise RuntimeError("no more")
            return super()._run(requests)

    with pytest.raises(StepFailedError):
        await profile_steps(tiny_settings(), 5, 1, 3600, serving_runner(Failing()))


async def test_what_does_not_load_is_no_recording() -> None:
    with pytest.raises(NotReadyError, match=r"^model tiny: expected it to load, got an error "):
        await profile_steps(tiny_settings(partitions={"compute": 8}), 1, 1, 20)
