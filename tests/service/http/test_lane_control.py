"""Lanes whose split the server chooses: what is measured, what is chosen, and that nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from expertd.service.engine import lane_control, settling
from expertd.service.engine.lane_choice import JOINED, Choice, slowdown
from expertd.service.engine.lane_control import LaneControl
from expertd.service.engine.loading import Loaded
from expertd.service.settings.model import Settings
from tests.service.apps import Serving, error_of, hidden_request, output_of, rows, serving, tiny_settings
from tests.service.http.routes.test_partitions import TOTAL, Device, Share
from tests.service.http.test_lanes import ask, entered, two_runners
from tests.service.runners import EchoRunner
from tests.service.waiting import until

LANES = {
    "decode_max_tokens": 4,
    "decode_batch_tokens": 8,
    "decode_partition": "decode",
    "prefill_partition": "prefill",
    "decode_p99_ms": 1.6,
}
SETTLING_SAMPLES = 2  # of which nothing counts
DECODE_SECONDS, PREFILL_SECONDS = 368e-6, 3e-3  # of a step on all SMs


class Chosen:
    """A server with such lanes, whose samples a test takes."""

    def __init__(self, server: Serving, decode: EchoRunner, prefill: EchoRunner, device: Device) -> None:
        self.server, self.decode, self.prefill, self.device = server, decode, prefill, device
        control = server.app.engine.lane_control
        assert isinstance(control, LaneControl)
        self.control = control
        self.busy_seconds = 0.0  # with long requests

    @property
    def choice(self) -> Choice:
        return self.control.state.expected.choice

    async def held(self) -> "asyncio.Future[Any]":
        """A request of 64 tokens whose step waits at the runner's gate."""
        while self.prefill.entered.acquire(blocking=False):  # earlier steps
            pass
        self.prefill.gate.clear()
        answer = await ask(self.server, 64)
        await entered(self.prefill)
        return answer

    async def serve(self, short: int, long: int) -> None:
        """Answer this many requests of 1 and of 64 tokens, one after another, and take a sample."""
        part = self.choice.decode_sms / TOTAL
        self.decode.seconds = DECODE_SECONDS / part if part else DECODE_SECONDS
        self.prefill.seconds = PREFILL_SECONDS / (1 - part)
        before = self.server.metric("compute_seconds_count", model="tiny", layout="masked")
        for count in [1] * short + [64] * long:
            output_of(await self.server.infer(*hidden_request(rows(count))))
        counted = before + short + long
        await until(
            lambda: self.server.metric("compute_seconds_count", model="tiny", layout="masked") == counted
        )
        seconds = long * self.prefill.seconds if long else 1.0
        self.busy_seconds += long * self.prefill.seconds
        self.control._lanes.long.seconds = self.busy_seconds  # as if these steps took so long
        await self.control.sample(seconds)


@asynccontextmanager
async def chosen(monkeypatch: pytest.MonkeyPatch, **changes: float) -> AsyncIterator[Chosen]:
    monkeypatch.setattr(lane_control, "_SAMPLE_SECONDS", 3600.0)
    monkeypatch.setattr(settling, "_SETTLING_SECONDS", 1e-9)  # a sample, and that in which prefill comes
    device, runners = Device(), (EchoRunner(), EchoRunner())
    loader = two_runners(*runners, device)

    def load(settings: Settings, cancelled: Callable[[], bool]) -> Loaded:
        device.apply(settings.partitions)

        def set_split(decode_sms: int) -> None:
            sizes = {"decode": 8} if not decode_sms else {"decode": decode_sms, "prefill": TOTAL - decode_sms}
            device.apply(sizes)

        return replace(loader(settings, cancelled), set_split=set_split)

    partitions = {"decode": 48, "prefill": 80}
    settings = tiny_settings(lanes={**LANES, **changes}, partitions=partitions)
    async with serving(settings, load) as server:
        try:
            yield Chosen(server, *runners, device)
        finally:
            for runner in runners:
                runner.gate.set()


def split_of(device: Device) -> list[int]:
    return [share.num_sms for share in device.partitions]


async def test_the_split_follows_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch) as lanes:
        assert lanes.choice == Choice(48)
        for _ in range(SETTLING_SAMPLES + 3):
            await lanes.serve(5, 5)
        assert lanes.choice == Choice(32), "1.5 ms for decode, and the most for prefill"
        assert split_of(lanes.device) == [32, 100]
        metric = lanes.server.metric
        assert metric("lanes_decode_sms") == 32
        expected = DECODE_SECONDS * 132 / 48 * slowdown(32, 132) / slowdown(48, 132)
        assert metric("lanes_expected_decode_seconds") == pytest.approx(expected, rel=0.01)
        assert metric("lanes_expected_prefill_ratio") == pytest.approx(100 / 132)
        assert metric("lanes_changes_total", reason="prefill") == 1
        for _ in range(5):
            await lanes.serve(5, 5)
        assert lanes.choice == Choice(32), "what is measured there agrees"


async def test_what_nearly_all_requests_take_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps keep the target on 32 SMs and on 48; some requests wait, and only 64 make up for it."""
    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch) as lanes:
        for count in range(SETTLING_SAMPLES + 8):
            waited = [0.0] * 2960 + [5.0 if count == 5 else 0.8e-3] * 40  # once, a pause
            seconds = DECODE_SECONDS * TOTAL / lanes.choice.decode_sms
            lanes.control.step_done("decode", 4, seconds, waited, [1] * len(waited))
            await lanes.serve(5, 5)
        assert lanes.choice == Choice(64)
        metric = lanes.server.metric
        assert metric("lanes_measured_decode_seconds") == pytest.approx(DECODE_SECONDS * 132 / 64 + 0.8e-3)
        assert metric("lanes_expected_decode_seconds") == pytest.approx(1.559e-3, rel=0.05)
        assert metric("lanes_changes_total", reason="target") == 1


async def test_joined_requests_are_all_on_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch, decode_p99_ms=100.0) as lanes:
        for _ in range(SETTLING_SAMPLES + 3):
            await lanes.serve(3, 3)
        assert lanes.choice == JOINED
        assert split_of(lanes.device) == [8], "prefill has all SMs"
        before = len(lanes.decode.steps)
        tasks = [await lanes.held()]
        tasks += [await ask(lanes.server, count) for count in (1, 64, 2)]
        await until(lambda: lanes.server.metric("lane_queue_tokens", model="tiny", lane="prefill") == 67)
        lanes.prefill.gate.set()
        for task in tasks:
            output_of(await task)
        assert len(lanes.decode.steps) == before
        assert lanes.prefill.steps[-1] == [1, 64, 2]
        for _ in range(12):
            await lanes.serve(3, 0)
        assert lanes.choice == JOINED


async def test_what_joined_requests_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time of the step that computes long requests, too; theirs do not count."""
    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch, decode_p99_ms=100.0) as lanes:
        while lanes.choice != JOINED:
            await lanes.serve(3, 3)
        metric = lanes.server.metric
        for _ in range(2):  # at the first sample, requests have waited for the change
            long = await lanes.held()
            shorts = [await ask(lanes.server, 1) for _ in range(25)]
            await until(lambda: metric("lane_queue_tokens", model="tiny", lane="prefill") == 25)
            lanes.prefill.gate.set()
            for task in (long, *shorts):
                output_of(await task)
            await lanes.serve(0, 5)
        assert metric("lanes_measured_decode_seconds") >= PREFILL_SECONDS
        assert metric("lanes_measured_prefill_ratio") > 0


async def test_a_change_waits_for_steps_and_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch) as lanes:
        for _ in range(SETTLING_SAMPLES + 1):
            await lanes.serve(5, 5)
        tasks = [await lanes.held()]
        output_of(await lanes.server.infer(*hidden_request(rows(1))))
        change = asyncio.ensure_future(lanes.control.sample(1e-4))
        await asyncio.sleep(0)
        tasks += [await ask(lanes.server, count) for count in (1, 2, 64)]
        await until(lambda: lanes.server.metric("queue_requests", model="tiny") == 3)
        assert (change.done(), split_of(lanes.device)) == (False, [48, 80])
        lanes.prefill.gate.set()
        for task in tasks:
            output_of(await task)
        await change
        assert (lanes.choice, split_of(lanes.device)) == (Choice(32), [32, 100])


async def test_a_split_that_the_device_refuses_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with chosen(monkeypatch) as lanes:  # it rounds 100 SMs up
        for _ in range(SETTLING_SAMPLES + 6):
            await lanes.serve(5, 5)
        assert lanes.choice == Choice(48)
        assert split_of(lanes.device) == [48, 80]
        assert caplog.text.count("lanes: partitions: expected at most 132 SMs, got 136") == 1
        output_of(await lanes.server.infer(*hidden_request(rows(1))))


async def test_a_split_by_hand_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chosen(monkeypatch) as lanes:
        body = {"partitions": {"decode": 64, "prefill": 64}}
        refused = await lanes.server.http.put("/v1/partitions", json=body)
        expected = "lanes.decode_p99_ms null, without which the server does not choose them itself"
        assert error_of(refused, 422) == f"partitions: expected {expected}, got 1.6"


async def test_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch, decode_p99_ms=100.0) as lanes:
        monkeypatch.setattr(lane_control, "_SAMPLE_SECONDS", 0.01)
        await lanes.control.stop()
        lanes.control.start()
        lanes.decode.seconds, lanes.prefill.seconds = 1e-3, 0.03  # always busy

        async def serve() -> None:
            while lanes.choice != JOINED:
                for count in (1, 64):
                    output_of(await lanes.server.infer(*hidden_request(rows(count))))

        await asyncio.wait_for(serve(), 20)


def granting_all(device: Device, sizes: Mapping[str, int]) -> None:
    """`apply` of a device that rounds nothing."""
    device.partitions = tuple(Share(name, sms, sms) for name, sms in sizes.items())


async def test_a_change_that_fails_is_logged_and_others_follow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(device: Device, sizes: Mapping[str, int]) -> None:
        monkeypatch.setattr(Device, "apply", granting_all)
        raise RuntimeError("the driver is out of contexts")

    monkeypatch.setattr(Device, "apply", granting_all)
    async with chosen(monkeypatch) as lanes:
        monkeypatch.setattr(lane_control, "_SAMPLE_SECONDS", 0.01)
        monkeypatch.setattr(Device, "apply", broken)
        await lanes.control.stop()
        lanes.control.start()
        lanes.decode.seconds, lanes.prefill.seconds = 1e-3, 0.03

        async def serve() -> None:
            while lanes.choice == Choice(48):
                for count in (1, 64):
                    output_of(await lanes.server.infer(*hidden_request(rows(count))))

        await asyncio.wait_for(serve(), 20)
        assert "the driver is out of contexts" in caplog.text
