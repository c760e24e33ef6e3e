"""Changes how lanes share the device while they serve: looks twice a second, and has `lane_choice` choose."""

import asyncio
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from prometheus_client.core import Metric

from expertd.service.engine.errors import SchedulerClosedError
from expertd.service.engine.lane_choice import Choice, Load, Point, Reason, State, at, expected, learned, look
from expertd.service.engine.lanes import AnyScheduler, Lanes
from expertd.service.engine.loading import Loaded, Partitions
from expertd.service.engine.metric_family import Family
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

_WHEN = "with `lanes.decode_p99_ms`"
DECODE_SMS = Family("gauge", "lanes_decode_sms", "SMs of the decode lane; 0: joined", "SMs", when=_WHEN)
CHUNK_TOKENS = Family(
    "gauge", "lanes_chunk_tokens", "tokens of a chunk while joined; 0: no chunks", "tokens", when=_WHEN
)
DECODE_SECONDS = Family(
    "gauge",
    "lanes_expected_decode_seconds",
    "what nearly all decode requests are expected to take at most",
    "seconds",
    when=_WHEN,
)
MEASURED_SECONDS = Family(
    "gauge",
    "lanes_measured_decode_seconds",
    "what 99 of 100 requests on the decode lane took at most, in their queue and step, when last looked at; "
    "0: not known",
    "seconds",
    when=_WHEN,
)
PREFILL_RATIO = Family(
    "gauge",
    "lanes_expected_prefill_ratio",
    "prefill's expected rate over its rate alone",
    "ratio",
    when=_WHEN,
)
CHANGES = Family(
    "counter",
    "lanes_changes",
    "changes of the choice; reason: target (decode reaches its target), prefill (it gets faster), decode "
    "(it gets faster)",
    "changes",
    ("reason",),
    when=_WHEN,
)
FAMILIES = (DECODE_SMS, CHUNK_TOKENS, DECODE_SECONDS, MEASURED_SECONDS, PREFILL_RATIO, CHANGES)

_LOOK_SECONDS = 0.5
_BUSY_PART = 0.9  # of the time in steps of prefill: then more is asked for than there can be
_LEAST_REQUESTS = 20  # on the decode lane between two looks, that say what nearly all take
_TAILS = 5  # looks whose median counts: one with a pause says nothing


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
        self._seen = self._arrived()
        self._prefill_seconds = 0.0  # in steps, since the last look
        self._usual_tokens = 0.0  # of a long request, between the two looks before; 0: there was none
        self._refused: set[Choice] = set()  # by the device
        self._took: list[float] = []  # by each request on the decode lane, since the last look
        self._tails: deque[float] = deque(maxlen=_TAILS)  # see `Load.tail_seconds`
        self._measured = 0.0  # what nearly all took at most
        self._has_changed = False  # since the last look: requests have waited for that
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._lanes.counts.on_step = self.step_done
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Look no more; a change that has begun is made."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def step_done(self, lane: str, tokens: int, seconds: float, waited: Sequence[float]) -> None:
        """Learn from a step, whose requests have `waited` for this many seconds."""
        part = self.state.expected.choice.decode_sms / self._load.total_sms
        if lane == "prefill":
            part = 1 - part
        elif not part:
            return  # of before the change
        else:
            self._took.extend(seconds + each for each in waited)
        step = Point(tokens, seconds * part)  # as on all SMs
        known = self._load
        if tokens <= self._small_tokens:
            self._load = known._replace(decode=learned(known.decode, step))
            return
        self._prefill_seconds += seconds
        if self._usual_tokens:
            whole = at(self._usual_tokens, step, known.decode)
            self._load = known._replace(prefill=learned(known.prefill, whole))

    async def look(self, seconds: float) -> None:
        """Look at what happened in the last `seconds`, and change the lanes if another choice is better."""
        now, before = self._arrived(), self._seen
        short, long, long_tokens = (new - old for new, old in zip(now, before, strict=True))
        busy, self._prefill_seconds, self._seen = self._prefill_seconds / seconds, 0.0, now
        if long:
            self._usual_tokens = long_tokens / long
        self._learn_tail()
        load, asked = self._load, 1.0
        if busy < _BUSY_PART and load.prefill is not None:
            asked = min(1.0, long_tokens / seconds * load.prefill.seconds / load.prefill.tokens)
        self._load = load._replace(
            asked=max(0.01, asked), has_decode=short > 0, has_prefill=long > 0 or busy >= _BUSY_PART
        )
        found = look(self.state, self._load, self._target_seconds)
        if found.expected.choice == self.state.expected.choice or await self._change(found):
            self.state = found

    def _learn_tail(self) -> None:
        """Learn by how much nearly all requests of the decode lane exceeded a step of it."""
        took, self._took = sorted(self._took), []
        has_changed, self._has_changed = self._has_changed, False
        part, step = self.state.expected.choice.decode_sms / self._load.total_sms, self._load.decode
        if has_changed or len(took) < _LEAST_REQUESTS or not part or step is None:
            return
        self._measured = took[math.ceil(0.99 * len(took)) - 1]
        self._tails.append(max(0.0, self._measured - step.seconds / part))
        self._load = self._load._replace(tail_seconds=statistics.median(self._tails))

    def metrics(self) -> Iterator[Metric]:
        """The present choice, what it is expected to give, and how often it was changed for what reason."""
        now = self.state.expected
        yield DECODE_SMS.gauge(now.choice.decode_sms)
        yield CHUNK_TOKENS.gauge(now.choice.chunk_tokens)
        yield DECODE_SECONDS.gauge(now.decode_seconds)
        yield MEASURED_SECONDS.gauge(self._measured)
        yield PREFILL_RATIO.gauge(now.prefill_share)
        changes = CHANGES.counter()
        for reason, count in self._changes.items():
            changes.add_metric([reason], count)
        yield changes

    async def _change(self, found: State) -> bool:
        """Make a new choice; False if the device refuses it, now or before."""
        choice = found.expected.choice
        if choice in self._refused:
            return False
        try:
            await self._apply(choice)
        except ValueError as error:
            self._refused.add(choice)
            logger.warning("lanes: %s", error)
            return False
        self._changes[found.why] += 1
        self._has_changed = True
        logger.info("lanes: %s, for %s", shown(choice), found.why)
        return True

    def _arrived(self) -> tuple[int, int, int]:
        arrived = self._lanes.arrived
        return arrived.requests[0], arrived.requests[1], arrived.tokens[1]

    async def _run(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.perf_counter()
            try:
                await self.look(now - last)
            except SchedulerClosedError:
                return
            except Exception:  # as of a device that failed: the lanes stay as they are
                logger.exception("lanes: looking, or changing them, failed")
            last = now


def lane_control(
    settings: Settings, lanes: AnyScheduler, loaded: Loaded, prepare_steps: Callable[[], None]
) -> LaneControl | None:
    """What controls the lanes of a server, started; None if their split stays as it is."""
    set_split, partitions = loaded.set_split, loaded.partitions
    if settings.lanes.decode_p99_ms is None or set_split is None or partitions is None:
        return None
    assert isinstance(lanes, Lanes)

    def change(choice: Choice) -> None:
        set_split(choice.decode_sms)
        lanes.share(choice, settings)
        prepare_steps()

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
