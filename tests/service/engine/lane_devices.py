"""Simulated devices with times of an H200, which do not follow the line that the choice assumes."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from expertd.service.engine.lane_choice import JOINED, Choice, Expected

TOTAL, UNIT, PREFILL_TOKENS = 132, 8, 4096


class Phase(NamedTuple):
    """A load for some time. decode: tokens of its steps; 0: none."""

    seconds: int
    decode: int
    prefill: bool


class Device(NamedTuple):
    """Decode steps of 1 and of 64 tokens, beside endless prefill by requests of 4,096 tokens.

    prefill  seconds of a prefill step on all SMs
    alone    seconds of a decode step on all SMs, by its tokens
    steps    on lanes with so many SMs for decode: the same, beside prefill
    took     by nearly all decode requests, by choice and tokens
    shares   prefill's rate over its rate alone, by choice
    beyond   seconds by which nearly all decode requests exceed a step where there is no prefill
    """

    prefill: float
    alone: Mapping[int, float]
    steps: Mapping[int, Mapping[int, float]]
    took: Mapping[Choice, Mapping[int, float]]
    shares: Mapping[Choice, float]
    beyond: float

    def truth(self, choice: Choice, phase: Phase) -> Expected:
        """What a choice really gives."""
        if not phase.decode:
            seconds = 0.0
        elif phase.prefill:
            seconds = self.took[choice][phase.decode]
        else:
            seconds = self.decode_step(choice, phase) + self.beyond
        return Expected(choice, seconds, self.shares[choice])

    def decode_step(self, choice: Choice, phase: Phase) -> float:
        """Seconds of a decode step of its own, which joined ones are not beside prefill."""
        if choice.decode_sms and phase.prefill:
            return self.steps[choice.decode_sms][phase.decode]
        return self.alone[phase.decode] * TOTAL / (choice.decode_sms or TOTAL)

    def prefill_step(self, choice: Choice) -> float:
        """Seconds of a step with prefill."""
        tokens = choice.chunk_tokens or PREFILL_TOKENS
        return self.prefill * tokens / PREFILL_TOKENS / self.shares[choice]


def _choices(on_lanes: Mapping[int, float], joined: Mapping[int, float]) -> Iterator[tuple[Choice, float]]:
    """Of values by the SMs of decode, and by the tokens of a chunk; 0: joined whole."""
    yield from ((Choice(sms), value) for sms, value in on_lanes.items())
    yield from ((Choice(0, chunk), value) for chunk, value in joined.items())


def deepseek(tail: float) -> Device:
    """DeepSeek-V3 with 32 experts; tail: seconds by which nearly all requests exceed a step.

    Steps on lanes are medians of requests in benchmarks/results/lanes-h200.json, less what requests on all
    SMs take beyond a step (about 60 µs for 64 tokens, 90 for 1).
    """
    steps = {
        16: {64: 1500e-6, 1: 330e-6},  # not measured: from 24 SMs
        32: {64: 833e-6, 1: 197e-6},
        48: {64: 613e-6, 1: 143e-6},
        64: {64: 493e-6, 1: 115e-6},
        80: {64: 493e-6, 1: 115e-6},  # 497 and 130 µs, but more SMs are never slower here
    }
    on_lanes = {16: 0.87, 32: 0.77, 48: 0.67, 64: 0.56, 80: 0.46}
    shares = dict(_choices(on_lanes, {0: 1.0, 1024: 0.77, 2048: 0.94}))
    joined = {
        JOINED: {64: 5670e-6, 1: 5650e-6},
        Choice(0, 1024): {64: 1930e-6, 1: 1420e-6},
        Choice(0, 2048): {64: 2790e-6, 1: 2830e-6},
    }
    split = {
        Choice(sms): {tokens: seconds + tail for tokens, seconds in of.items()} for sms, of in steps.items()
    }
    return Device(3.0e-3, {64: 368e-6, 1: 107e-6}, steps, split | joined, shares, tail)


QWEN = Device(
    prefill=0.55e-3,
    alone={64: 240e-6, 1: 100e-6},
    steps={
        16: {64: 1200e-6, 1: 130e-6},
        32: {64: 600e-6, 1: 100e-6},
        48: {64: 400e-6, 1: 90e-6},
        64: {64: 320e-6, 1: 90e-6},
        80: {64: 280e-6, 1: 85e-6},
    },
    took={
        Choice(16): {64: 1400e-6, 1: 620e-6},  # not measured: a step's time by graph replays, and what 24 add
        Choice(32): {64: 790e-6, 1: 560e-6},
        Choice(48): {64: 680e-6, 1: 480e-6},
        Choice(64): {64: 640e-6, 1: 430e-6},
        Choice(80): {64: 570e-6, 1: 380e-6},
        JOINED: {64: 1560e-6, 1: 1460e-6},
        Choice(0, 1024): {64: 1250e-6, 1: 1100e-6},
        Choice(0, 2048): {64: 1140e-6, 1: 1230e-6},
    },
    shares=dict(
        _choices({16: 0.88, 32: 0.77, 48: 0.69, 64: 0.62, 80: 0.51}, {0: 0.855, 1024: 0.345, 2048: 0.60})
    ),
    beyond=0.1e-3,
)
"""Qwen3-30B with 128 experts, whose steps in chunks take as long as the host needs to launch them.

What nearly all requests took differs between two sessions, by a factor of up to three, because they wait for
the host. These values lie between both, and so that more SMs are never slower.
"""
