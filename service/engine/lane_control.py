"""Changes how lanes share the device while they serve: takes samples, and has `lane_choice` choose."""

import asyncio
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from prometheus_client.core import Metric

from expertd.service.engine.errors import SchedulerClosedError
from expertd.service.engine.lane_choice import (
    Choice,
    Given,
    Load,
    Point,
    Reason,
    State,
    expected,
    learned,
    next_state,
    point_at,
    slowdown,
)
from expertd.service.engine.lane_control_metrics import control_metrics
from expertd.service.engine.lane_record import LaneRecord, Usual
from expertd.service.engine.lanes import AnyScheduler, Lanes
from expertd.service.engine.loading import Loaded, Partitions
from expertd.service.engine.settling import Settling
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_SAMPLE_SECONDS = 0.5  # from one to the next
_BUSY_PART = 0.8  # share of the time with long requests from which demand exceeds capacity
_LEAST_BUSY_PART = 0.1  # with less, the rate of long requests is not measured
_LEAST_REQUESTS = 20  # short ones in a sample: with fewer, what nearly all take is not measured
_TAILS = 5  # samples whose median counts: one with a pause says nothing


class LaneControl:
    """Measures the steps and requests of `lanes`, and has `apply` make the better choice, on the event loop.

    The split of the settings is the first choice. apply may raise ValueError if the device has no such split.
    """

    def __init__(
        self,
        settings: Settings,
        lanes: Lanes,
        partitions: Partitions,
        apply: Callable[[Choice], Awaitable[None]],
    ) -> None:
        assert settings.lanes.decode_p99_ms is not None
        self._target_seconds = settings.lanes.decode_p99_ms / 1e3
        self._small_tokens = max(settings.lanes.decode_batch_tokens, settings.lanes.decode_max_tokens)
        self._lanes, self._apply = lanes, apply
        self._load = Load(partitions.total_sms, partitions.granularity, None, None)
        split = next(each for each in partitions.partitions if each.name == settings.lanes.decode_partition)
        self.state = State(expected(Choice(split.num_sms), self._load), "start")
        self._changes: dict[Reason, int] = dict.fromkeys(("target", "prefill", "decode"), 0)
        self._seen = self._so_far()
        self._usual_tokens = 0.0  # of a long request, in the last sample with one; 0: there was none
        self._refused: set[Choice] = set()  # by the device
        self._took: list[float] = []  # by each short request, since the last sample
        self._short_steps: list[int] = []  # the tokens of short requests in each step with some, since then
        self._tails: deque[float] = deque(maxlen=_TAILS)  # see `Load.tail_seconds`
        self._record = LaneRecord()
        self._measured = 0.0  # what nearly all took at most
        self._measured_ratio = 0.0
        self._settling = Settling()
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()  # of what steps change, on other threads

    def start(self) -> None:
        """Take samples from now on."""
        self._lanes.counts.on_step = self.step_done
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Take no more; a change that has begun is made."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def step_done(
        self,
        lane: str,
        tokens: int,
        seconds: float,
        waited: Sequence[float],
        request_tokens: Sequence[int],
    ) -> None:
        """Learn from a step; its requests, of so many tokens, have `waited` for this many seconds."""
        with self._lock:
            if self._settling.is_on:
                return
            decode_sms, total_sms = self.state.expected.choice.decode_sms, self._load.total_sms
            if lane == "decode":
                if not decode_sms:
                    return  # of before the change
                self._note_short(seconds, waited, tokens)
                seconds /= slowdown(decode_sms, total_sms)
            else:
                if not decode_sms:
                    most = self._lanes.short_tokens
                    short = [place for place, each in enumerate(request_tokens) if each <= most]
                    short_tokens = sum(request_tokens[place] for place in short)
                    self._note_short(seconds, [waited[place] for place in short], short_tokens)
                seconds *= 1 - decode_sms / total_sms
            self._learn(Point(tokens, seconds))

    def _learn(self, step: Point) -> None:
        """Learn from a step's time, as on all SMs."""
        known, choice = self._load, self.state.expected.choice
        if step.tokens <= self._small_tokens:
            self._load = known._replace(decode=learned(known.decode, step))
        elif self._usual_tokens and not (known.prefill and choice.chunk_tokens):  # the host may bound chunks
            whole = point_at(self._usual_tokens, step, known.decode)
            self._load = known._replace(prefill=learned(known.prefill, whole))

    def _note_short(self, seconds: float, waited: Sequence[float], tokens: int) -> None:
        """Keep what the short requests of a step took, which have so many tokens together."""
        if waited:
            self._took.extend(seconds + each for each in waited)
            self._short_steps.append(tokens)

    async def sample(self, seconds: float) -> None:
        """Take a sample of the last `seconds`, and change the lanes if another choice is better."""
        with self._lock:
            if not self._collect(seconds):
                self.state = replace(self.state, samples=0, idle_samples=0)
                return
            load = self._load
        found = next_state(self.state, load, self._target_seconds, self._refused)
        choice = self.state.expected.choice
        if found.expected.choice == choice or await self._change(found):
            self.state = found
        else:
            self.state = replace(self.state, expected=expected(choice, load), samples=0, idle_samples=0)

    def _collect(self, seconds: float) -> bool:
        """Learn from what happened in the last `seconds`; False if that does not count."""
        now, before = self._so_far(), self._seen
        short, long, long_tokens, busy_seconds, computed = (
            new - old for new, old in zip(now, before, strict=True)
        )
        self._seen = now
        busy = busy_seconds / seconds
        if long:
            self._usual_tokens = long_tokens / long
        load, asked = self._load, 1.0
        if load.prefill is not None and load.decode is not None and self._usual_tokens > load.decode.tokens:
            load = load._replace(prefill=point_at(self._usual_tokens, load.prefill, load.decode))
        if busy < _BUSY_PART and load.prefill is not None:
            asked = min(1.0, long_tokens / seconds * load.prefill.seconds / load.prefill.tokens)
        self._load = load._replace(
            asked=max(0.01, asked), has_decode=short > 0, has_prefill=long > 0 or busy >= _BUSY_PART
        )
        if not self._settling.counts(seconds, busy):
            self._took.clear()
            self._short_steps.clear()
            return False
        self._measure(computed / busy_seconds if busy >= _LEAST_BUSY_PART else 0.0)
        return True

    def _measure(self, prefill_rate: float) -> None:
        """Learn what the choice gave since the last sample.

        prefill_rate  tokens per second while there were long requests; 0: unknown
        """
        took, self._took = sorted(self._took), []
        steps, self._short_steps = self._short_steps, []
        choice, load = self.state.expected.choice, self._load
        if prefill_rate and load.prefill is not None:
            self._measured_ratio = prefill_rate * load.prefill.seconds / load.prefill.tokens
        if len(took) < _LEAST_REQUESTS:
            return
        self._measured = took[math.ceil(0.99 * len(took)) - 1]
        if choice.decode_sms and load.decode is not None:
            step = load.decode.seconds * slowdown(choice.decode_sms, load.total_sms)
            self._tails.append(max(0.0, self._measured - step))
            self._load = load = load._replace(tail_seconds=statistics.median(self._tails))
        if prefill_rate and load.has_prefill:
            # Large steps count more: while requests come apart from each other, some steps have only a few.
            usual = Usual(sum(each * each for each in steps) / sum(steps), self._usual_tokens)
            self._load = self._record.noted(choice, usual, Given(self._measured, prefill_rate), load)

    def metrics(self) -> Iterator[Metric]:
        """What was chosen, and what it gave."""
        return control_metrics(self.state.expected, self._measured, self._measured_ratio, self._changes)

    async def _change(self, found: State) -> bool:
        """Make a new choice; False if the device refuses it."""
        choice, began = found.expected.choice, time.perf_counter()
        self._settling.changed(0.0)  # what steps say from now on is of either choice
        try:
            await self._apply(choice)
        except ValueError as error:
            self._refused.add(choice)
            logger.warning("lanes: %s", error)
            return False
        finally:
            self._settling.changed(time.perf_counter() - began)
        self._changes[found.why] += 1
        logger.info("lanes: %s, for %s", shown(choice), found.why)
        return True

    def _so_far(self) -> tuple[int, int, int, float, int]:
        """Short and long requests, the tokens of these, seconds with some of them, and tokens computed."""
        arrived = self._lanes.arrived
        return arrived.requests[0], arrived.requests[1], arrived.tokens[1], *self._lanes.long.so_far()

    async def _run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            now = time.perf_counter()
            try:
                await self.sample(now - last)
            except SchedulerClosedError:
                return
            except Exception:  # as of a device that failed: the lanes stay as they are
                logger.exception("lanes: a sample, or changing them, failed")
            last = now


def lane_control(
    settings: Settings, lanes: AnyScheduler, loaded: Loaded, prepare_later: Callable[[], None]
) -> LaneControl | None:
    """What controls the lanes of a server, started; None if their split stays as it is."""
    set_split, partitions = loaded.set_split, loaded.partitions
    if settings.lanes.decode_p99_ms is None or set_split is None or partitions is None:
        return None
    assert isinstance(lanes, Lanes)

    def change(choice: Choice) -> None:
        set_split(choice.decode_sms)
        lanes.share(choice, settings)
        prepare_later()

    async def apply(choice: Choice) -> None:
        await lanes.between_steps(partial(change, choice))

    control = LaneControl(settings, lanes, partitions, apply)
    control.start()
    return control


def shown(choice: Choice) -> str:
    """A choice, for the log."""
    if choice.decode_sms:
        return f"{choice.decode_sms} SMs for decode"
    return f"joined, in chunks of {choice.chunk_tokens}" if choice.chunk_tokens else "joined"
