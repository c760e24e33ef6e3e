"""Chooses how decode and prefill share a device: on lanes with a split of the SMs, or joined in one step.

What a choice gave under this load counts, where that was measured (`lane_record`). What another one would
give is arithmetic. A step takes about as long as a line through a decode step and a prefill step says, both
on all SMs: reading the weights is its beginning, and every token adds the same. On a lane, a prefill step
slows down by the ratio of all SMs to the lane's, and a decode step, which is partly bound by memory, by that
ratio to the power of 0.85. Nearly all decode requests take longer than a step: they wait for others, for
threads and for the host. By how much, is measured on lanes, and taken to be the same on every split. A joined
request takes two steps.

Arithmetic is wrong where, say, the host needs longer to launch a step than the device to compute it. The
factor by which it was wrong for the split that was measured last holds for all other splits, and that of the
joined choice that was measured last for all others of these. Until one was measured, joined requests are
taken to need half as long again: nobody should wait for a mere try.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

JOINED_STEPS = 2  # that a joined decode request takes: the rest of the one that runs, and its own
CHUNKS = (1024, 2048)  # smaller ones gave less of prefill and were hardly faster, on an H200
LEAST_SMS, MOST_PART = 16, 0.65  # of a decode lane
_GAIN = 1.1  # what another choice must be worth, over the present one
_MISSED = 0.5  # a choice with which decode misses its target is worth this part of itself at most
_DECODE_POWER = 0.85  # of all SMs over a lane's; from 64 to 24 SMs of an H200, 0.6 to 0.95 were measured
_ROOM = 0.95  # while decode keeps its target, another choice must keep this part of it
_SAMPLES = 2  # in a row, in which it must be better
_IDLE_SAMPLES = 10  # while there are only decode requests, or only prefill: the others may come back
_SMOOTHING = 0.3  # weight of a new measurement

Reason = Literal["start", "target", "prefill", "decode"]


class Choice(NamedTuple):
    """decode_sms: of the decode lane; 0: joined. chunk_tokens: of joined prefill; 0: it is computed whole."""

    decode_sms: int
    chunk_tokens: int = 0


JOINED = Choice(0)


class Point(NamedTuple):
    """A step on all SMs."""

    tokens: float
    seconds: float


class Given(NamedTuple):
    """What a choice gave: seconds of nearly all decode requests, and prefill's tokens per second."""

    decode_seconds: float
    prefill_rate: float


class Factors(NamedTuple):
    """What was measured over what arithmetic expects, of decode requests' seconds and of prefill's rate."""

    decode: float = 1.0
    prefill: float = 1.0


UNTRIED_JOINED = Factors(decode=1.5)
"""On an H200, joined requests took up to twice as long as calculated."""


class Load(NamedTuple):
    """What is known of the device and of its requests.

    decode, prefill  their usual steps; None: there were none yet
    asked            the rate of prefill that is asked for over the most there can be, up to 1
    tail_seconds     by which nearly all requests of the decode lane exceed a step of it
    given            by choices that were measured with both kinds of requests
    of_splits, of_joined  the factors for others
    """

    total_sms: int
    unit_sms: int
    decode: Point | None
    prefill: Point | None
    asked: float = 1.0
    has_decode: bool = True
    has_prefill: bool = True
    tail_seconds: float = 0.0
    given: Mapping[Choice, Given] = MappingProxyType({})
    of_splits: Factors = Factors()
    of_joined: Factors = UNTRIED_JOINED


class Expected(NamedTuple):
    """What a choice gives: seconds of nearly all decode requests, and prefill's rate over its rate alone."""

    choice: Choice
    decode_seconds: float
    prefill_share: float


@dataclass(frozen=True)
class State:
    """The present choice, and why it was made.

    samples       in a row, in which another one was better
    idle_samples  the same, of samples with only decode requests, or only prefill
    """

    expected: Expected
    why: Reason
    samples: int = 0
    idle_samples: int = 0


def learned(known: Point | None, new: Point) -> Point:
    """`known` with another measurement."""
    if known is None:
        return new
    return Point(*(old + _SMOOTHING * (late - old) for old, late in zip(known, new, strict=True)))


def point_at(tokens: float, measured: Point, decode: Point | None) -> Point:
    """The step of `tokens` on the line through a measured one and a decode step."""
    if decode is None or measured.tokens <= decode.tokens:
        return Point(tokens, measured.seconds * tokens / measured.tokens)
    slope = max(0.0, measured.seconds - decode.seconds) / (measured.tokens - decode.tokens)
    return Point(tokens, decode.seconds + slope * (tokens - decode.tokens))


def choices(load: Load, chunks: Sequence[int] = CHUNKS) -> list[Choice]:
    """All choices: joined without and with chunks, and splits in steps of two units of SMs."""
    step = 2 * load.unit_sms
    most = int(load.total_sms * MOST_PART)
    splits = range(max(LEAST_SMS, step), most + 1, step)
    usual = load.prefill.tokens if load.prefill else 0
    return [JOINED, *(Choice(0, chunk) for chunk in chunks if chunk < usual), *map(Choice, splits)]


def expected(choice: Choice, load: Load) -> Expected:
    """What `choice` likely gives: what it gave, or else by arithmetic and the factor."""
    found = calculated(choice, load)
    if not (load.has_decode and load.has_prefill):
        return found
    if load.prefill is not None and choice in load.given:
        seconds, rate = load.given[choice]
        return Expected(choice, seconds, min(1.0, rate * load.prefill.seconds / load.prefill.tokens))
    factors = load.of_splits if choice.decode_sms else load.of_joined
    share = min(1.0, found.prefill_share * factors.prefill)
    return Expected(choice, found.decode_seconds * factors.decode, share)


def slowdown(decode_sms: int, total_sms: int) -> float:
    """How many times longer a decode step takes on a lane than on all SMs."""
    return math.pow(total_sms / decode_sms, _DECODE_POWER)


def calculated(choice: Choice, load: Load) -> Expected:
    """What arithmetic expects of `choice`; a step that has not been measured takes no time."""
    prefill, decode = load.prefill or Point(1, 0), load.decode or Point(1, 0)
    if choice.decode_sms:
        seconds = decode.seconds * slowdown(choice.decode_sms, load.total_sms)
        return Expected(choice, seconds + load.tail_seconds, 1 - choice.decode_sms / load.total_sms)
    if not load.has_prefill:
        return Expected(choice, decode.seconds + load.tail_seconds, 1)
    slope = max(0.0, prefill.seconds - decode.seconds) / max(1.0, prefill.tokens - decode.tokens)
    tokens = min(choice.chunk_tokens or prefill.tokens, prefill.tokens)
    seconds = decode.seconds + slope * tokens  # with the decode tokens
    share = tokens / seconds * prefill.seconds / prefill.tokens if seconds else 1.0
    return Expected(choice, JOINED_STEPS * seconds, min(1.0, share))


def worth(of: Expected, load: Load, target_seconds: float) -> float:
    """How good a choice is: the rate of prefill that is asked for, less where decode misses its target."""
    share = min(of.prefill_share, load.asked) if load.has_prefill else 1.0
    late = of.decode_seconds / target_seconds if load.has_decode else 1.0
    return share if late <= 1.0 else _MISSED * share / late


def best(
    load: Load, target_seconds: float, refused: Container[Choice] = (), room: float = 1.0
) -> tuple[Expected, float]:
    """The choice that is worth most, but for `refused` ones, and its worth.

    Of equal ones, that with the shortest decode steps, if there are any.

    room  the part of the target that choices have to keep; all of it, for splits that were not measured:
          otherwise what arithmetic expects just above it would never be tried
    """

    def worth_of(each: Expected) -> float:
        is_untried = each.choice.decode_sms > 0 and each.choice not in load.given
        return worth(each, load, target_seconds * (1.0 if is_untried else room))

    def rank(each: Expected) -> tuple[float, float]:
        tie = -each.decode_seconds if load.has_decode else each.choice == JOINED
        return round(worth_of(each), 3), tie

    allowed = [choice for choice in choices(load) if choice not in refused] or [JOINED]
    found = max((expected(choice, load) for choice in allowed), key=rank)
    return found, worth_of(found)


def next_state(state: State, load: Load, target_seconds: float, refused: Container[Choice] = ()) -> State:
    """The state after another sample: another choice is taken once it was clearly better several times.

    refused  by the device
    """
    now = expected(state.expected.choice, load)
    is_known = (load.decode or not load.has_decode) and (load.prefill or not load.has_prefill)
    if not is_known or not (load.has_decode or load.has_prefill):
        return replace(state, expected=now, samples=0, idle_samples=0)
    # Measurements scatter: what is just below the target may be above it at the next sample.
    room = _ROOM if now.decode_seconds <= target_seconds else 1.0
    found, its_worth = best(load, target_seconds, refused, room)
    gain = its_worth / max(worth(now, load, target_seconds), 1e-9)
    gains = is_better(found, now, load, gain)
    if load.has_decode and load.has_prefill:
        samples, idle_samples = (state.samples + 1 if gains else 0), 0
        is_sure = samples >= _SAMPLES
    else:  # for a moment, perhaps: what was seen with both still counts
        samples, idle_samples = state.samples, (state.idle_samples + 1 if gains else 0)
        is_sure = idle_samples >= _IDLE_SAMPLES
    if is_sure:
        return State(found, reason(now, found, target_seconds))
    return replace(state, expected=now, samples=samples, idle_samples=idle_samples)


def is_better(found: Expected, now: Expected, load: Load, gain: float) -> bool:
    """Whether `found` is clearly better: worth more, or without prefill as much, with shorter steps."""
    faster = load.has_decode and found.decode_seconds * _GAIN <= now.decode_seconds
    return gain >= _GAIN or (gain >= 1 and faster and not load.has_prefill)


def reason(now: Expected, found: Expected, target_seconds: float) -> Reason:
    """Why `found` is better: decode reaches its target, or comes nearer to it, or prefill is faster."""
    if found.decode_seconds <= target_seconds < now.decode_seconds:
        return "target"
    return "prefill" if found.prefill_share > now.prefill_share else "decode"
