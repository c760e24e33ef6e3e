"""`LaneControl` over time, on a simulated device: it sees the events of steps that a load would have."""

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

from expertd.service.engine.busy_time import BusyTime
from expertd.service.engine.lane_choice import Choice, Load, worth
from expertd.service.engine.lane_control import LaneControl
from expertd.service.engine.lanes import Arrived, Lanes
from expertd.service.engine.loading import Partitions
from tests.service.apps import tiny_settings
from tests.service.engine.lane_devices import PREFILL_TOKENS, TOTAL, UNIT, Device, Phase

SAMPLE_SECONDS = 0.5
SETTLING_SAMPLES = 3  # that do not count, from where prefill begins
_STEPS = 25  # of each kind between two samples
# How much longer requests take in the first samples with prefill, and after a change: graphs are captured,
# then a GPU that has reached its power limit slows down too much.
_SETTLING = (3.0, 1.4)


class Simulation:
    """Has the events of one sample after another.

    scatter  of what nearly all requests take: a factor of up to 1 + scatter, or its inverse, in each sample
    slower   a factor of the same, while something disturbs them
    """

    slower = 1.0

    def __init__(self, device: Device, target_seconds: float, first: int = 48, scatter: float = 0.0) -> None:
        self.device, self.scatter = device, scatter
        self.arrived, self.long = Arrived([0, 0], [0, 0]), BusyTime()
        lanes = SimpleNamespace(
            arrived=self.arrived, long=self.long, short_tokens=64, counts=SimpleNamespace()
        )
        split = [SimpleNamespace(name="decode", num_sms=first)]
        partitions = SimpleNamespace(total_sms=TOTAL, granularity=UNIT, partitions=split)
        names = {"decode_partition": "decode", "prefill_partition": "prefill"}
        settings = tiny_settings(
            lanes={"decode_max_tokens": 64, "decode_p99_ms": 1e3 * target_seconds, **names},
            partitions={"decode": 48, "prefill": 80},
            limits={"max_batch_tokens": 4096},
        )
        self._random = random.Random(7)
        self._settling = iter(_SETTLING)
        self._has_prefill = False

        async def apply(choice: Choice) -> None:
            self._settling = iter(_SETTLING)

        self.control = LaneControl(settings, cast(Lanes, lanes), cast(Partitions, partitions), apply)

    @property
    def choice(self) -> Choice:
        return self.control.state.expected.choice

    async def serve(self, phase: Phase) -> None:
        """Report the steps of this load, and take a sample."""
        choice, device = self.choice, self.device
        took = device.truth(choice, phase).decode_seconds
        took *= (1 + self.scatter) ** self._random.uniform(-1, 1)
        if phase.prefill and not self._has_prefill:
            self._settling = iter(_SETTLING)
        self._has_prefill = phase.prefill
        if phase.prefill:
            took *= next(self._settling, 1.0) * self.slower
        if phase.decode:
            self.arrived.requests[0] += _STEPS
            self.arrived.tokens[0] += _STEPS * phase.decode
            if choice.decode_sms or not phase.prefill:
                lane = "decode" if choice.decode_sms else "prefill"
                self._steps(lane, phase.decode, device.decode_step(choice, phase), took, [phase.decode])
        if phase.prefill:
            step = device.prefill_step(choice)
            tokens = choice.chunk_tokens or PREFILL_TOKENS
            self.arrived.requests[1] += _STEPS
            self.arrived.tokens[1] += _STEPS * PREFILL_TOKENS
            if choice.decode_sms or not phase.decode:
                self._steps("prefill", tokens, step, step, [PREFILL_TOKENS])
            else:
                self._steps("prefill", tokens + phase.decode, step, took, [phase.decode, PREFILL_TOKENS])
            self.long.seconds += SAMPLE_SECONDS
            self.long.tokens += int(SAMPLE_SECONDS * tokens / step)
        await self.control.sample(SAMPLE_SECONDS + 1e-3)  # never sooner

    def _steps(self, lane: str, tokens: int, seconds: float, took: float, requests: list[int]) -> None:
        for _ in range(_STEPS):
            waited = [took - seconds] * len(requests)
            self.control.step_done(lane, tokens, seconds, waited, requests)


def samples(phases: list[Phase]) -> Iterator[Phase]:
    for phase in phases:
        yield from [phase] * int(phase.seconds / SAMPLE_SECONDS)


def chosen(
    device: Device, phases: list[Phase], target_seconds: float, first: int = 48, scatter: float = 0.0
) -> list[Choice]:
    """The choice at each sample."""
    simulation = Simulation(device, target_seconds, first, scatter)
    found = []

    async def run() -> None:
        for phase in samples(phases):
            found.append(simulation.choice)
            await simulation.serve(phase)

    asyncio.run(run())
    return found


def mean_worth(device: Device, choices: list[Choice], phases: list[Phase], target_seconds: float) -> float:
    """Of the choice at each sample."""
    values = []
    for choice, phase in zip(choices, samples(phases), strict=True):
        load = Load(TOTAL, UNIT, None, None, 1.0, phase.decode > 0, phase.prefill)
        values.append(worth(device.truth(choice, phase), load, target_seconds))
    return sum(values) / len(values)
