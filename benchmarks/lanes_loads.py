"""A server that chooses its lanes, on loads that change: `python -m benchmarks.lanes_loads [--json FILE]`.

Callers as in `benchmarks.lanes` come and go in phases. What the server gives is compared with what each of
the choices that it has would give if it were kept all the time. Every half second counts, also those in which
it changes its choice or tries another: prefill's rate over its rate alone, and less where decode misses the
target (`lane_choice.worth`). 99% of the time that decode's caller waits is in waits of at most what decode
takes, so that one long wait counts as much as the many short ones that it replaces. The first choice is not a
good one. Needs a GPU.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lanes import SLOTS, Caller, split_sms
from benchmarks.lanes_loads_table import loads_table
from benchmarks.lanes_server import Server
from benchmarks.lanes_ways import LAYERS, Layer, Way, settings_of
from benchmarks.serving_rows import free_port
from benchmarks.timing import header
from expertd.kernels.partitions import SMPartitions
from expertd.service.engine import lane_choice
from expertd.service.engine.lane_choice import Choice, Expected, Load

SLOT_SECONDS = 0.5
GAP_SECONDS = 3.0  # after their first requests: for the server, prefill comes with the first phase


class Phase(NamedTuple):
    """decode: tokens of a caller's steps; 0: there is none. prefill: whether there is a caller of that."""

    seconds: float
    decode: int
    prefill: bool


class Slot(NamedTuple):
    """What callers saw in half a second: decode's time, None if there is none; prefill's tokens/s."""

    decode: int
    prefill: bool
    decode_seconds: float | None
    rate: float


def loads(seconds: float) -> dict[str, list[Phase]]:
    """Loads, each in phases of `seconds`."""
    both, decode, prefill = Phase(seconds, 64, True), Phase(seconds, 64, False), Phase(seconds, 0, True)
    return {
        "both all the time": [both] * 2,
        "one kind at times": [both, decode, prefill] * 2,
        "decode grows and shrinks": [Phase(seconds, 1, True), both] * 2,
    }


# Of each, the last slots count: on a GPU, prefill needs the first two seconds until the clock is steady.
FIXED = [Phase(4, 0, True), Phase(2.5, 64, True), Phase(2.5, 1, True), Phase(2.5, 64, False)]
_LAST_SLOTS = 4
_FIRST_SMS = 80  # of the decode lane, where the server begins


def spans(phases: Sequence[Phase], kind: int) -> list[tuple[float, float]]:
    """When a caller is busy, in seconds from the beginning. kind: its tokens; 0: that of prefill."""
    found: list[tuple[float, float]] = []
    begin = 0.0
    for phase in phases:
        end = begin + phase.seconds
        if (kind and phase.decode == kind) or (not kind and phase.prefill):
            joins = bool(found) and found[-1][1] == begin
            found[-1 if joins else len(found) :] = [(found[-1][0] if joins else begin, end)]
        begin = end
    return found


def slots_of(
    phases: Sequence[Phase],
    decode: Sequence[tuple[float, float]],
    prefill: Sequence[tuple[float, float]],
    tokens: int,
) -> Iterator[Slot]:
    """What callers saw. decode, prefill: when requests were sent and answered; tokens: of one of prefill."""
    begin = 0.0
    for phase in phases:
        for place in range(round(phase.seconds / SLOT_SECONDS)):
            start = begin + place * SLOT_SECONDS
            end = start + SLOT_SECONDS
            done = sum(start <= answered < end for _, answered in prefill)
            seconds = decode_seconds(decode, start, end) if phase.decode else None
            yield Slot(phase.decode, phase.prefill, seconds, done * tokens / SLOT_SECONDS)
        begin += phase.seconds


def decode_seconds(requests: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """What requests took at most for 99% of the time between `start` and `end` in which there were some."""
    parts = sorted(
        ((answered - sent, min(answered, end) - max(sent, start)) for sent, answered in requests),
        reverse=True,
    )
    parts = [(took, part) for took, part in parts if part > 0]
    left = 0.01 * sum(part for _, part in parts)
    for took, part in parts:
        left -= part
        if left < 0:
            return took
    return math.inf  # no answer


class Callers:
    """One for prefill and one for each of these numbers of decode tokens."""

    def __init__(self, layer: Layer, decode: Sequence[int], device: str | None) -> None:
        self._layer, self._device = layer, device
        self._callers = {kind: Caller() for kind in (0, *decode)}

    def close(self) -> None:
        """End their processes."""
        for caller in self._callers.values():
            caller.close()

    def run(self, url: str, phases: Sequence[Phase]) -> list[Slot]:
        """What they see in these phases."""
        layer, device = self._layer, self._device
        busy = {kind: caller for kind, caller in self._callers.items() if spans(phases, kind)}
        for kind, caller in busy.items():
            caller.open(url, layer, kind or layer.prefill, device, 1 if kind else SLOTS)
        for caller in busy.values():
            caller.read()
        base = time.perf_counter() + GAP_SECONDS
        for kind, caller in busy.items():
            for begin, end in spans(phases, kind):
                window = {"begin": base + begin, "start": base + begin, "seconds": end - begin}
                caller.write(window)
            caller.write({})

        def seen(kind: int) -> list[tuple[float, float]]:
            windows = [busy[kind].read() for _ in spans(phases, kind)]
            stamps = [stamp for window in windows for stamp in (*window["stamps"], *window["late"])]
            return [(sent / 1e9 - base, answered / 1e9 - base) for sent, answered in stamps]

        with ThreadPoolExecutor(len(busy)) as readers:  # a caller waits until its results are read
            found = dict(zip(busy, readers.map(seen, busy), strict=True))
        decode = [stamp for kind, stamps in found.items() if kind for stamp in stamps]
        return list(slots_of(phases, decode, found.get(0, []), layer.prefill))


def worth(slots: Sequence[Slot], choice: Choice, target_seconds: float, rate_alone: float) -> float:
    """The mean of these slots."""
    values = []
    for slot in slots:
        found = Expected(choice, slot.decode_seconds or 0.0, slot.rate / rate_alone)
        has_decode = slot.decode_seconds is not None
        load = Load(0, 0, None, None, asked=2.0, has_decode=has_decode, has_prefill=slot.prefill)
        values.append(lane_choice.worth(found, load, target_seconds))
    return statistics.fmean(values)


def late_part(slots: Sequence[Slot], target_seconds: float) -> float:
    """Of those with decode, in how many it missed the target."""
    return statistics.fmean(slot.decode_seconds > target_seconds for slot in slots if slot.decode_seconds)


def fixed(
    layer: Layer, server: Server, callers: Callers, folder: Path
) -> Iterator[tuple[Choice, list[Slot]]]:
    """Each choice, and the last slots of each kind of phase with it; joined without chunks first."""
    partitions = SMPartitions(0)
    usual = lane_choice.Point(layer.prefill, 0.0)
    choices = lane_choice.choices(Load(partitions.total_sms, partitions.granularity, None, usual))
    running, now, url = ExitStack(), None, ""
    with running:
        for choice in choices:
            way = Way("joined", choice.chunk_tokens, joins=True)
            if choice.decode_sms:
                way = Way("lanes", lanes=True, split=choice.decode_sms)
            settings = settings_of(layer, way, folder)
            if settings != now:
                running.close()
                now = settings
                url = running.enter_context(server.running({**settings, "port": free_port()}))
            if choice.decode_sms:
                split_sms(url, choice.decode_sms)
            yield choice, list(last_slots(FIXED, callers.run(url, FIXED)))


def last_slots(phases: Sequence[Phase], slots: Sequence[Slot]) -> Iterator[Slot]:
    """Of each phase."""
    end = 0
    for phase in phases:
        end += round(phase.seconds / SLOT_SECONDS)
        yield from slots[end - _LAST_SLOTS : end]


def as_if_kept(phases: Sequence[Phase], slots: Sequence[Slot]) -> Iterator[Slot]:
    """Those of a load, with a choice whose slots for each kind of phase are these."""
    for phase in phases:
        of = [slot for slot in slots if (slot.decode, slot.prefill) == (phase.decode, phase.prefill)]
        yield from itertools.islice(itertools.cycle(of), round(phase.seconds / SLOT_SECONDS))


def measured(name: str, target_ms: float, seconds: float, device: str) -> Iterator[dict[str, Any]]:
    """A row for each load."""
    layer, target = LAYERS[name], target_ms / 1e3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = Server()
        stack.callback(server.close)
        callers = Callers(layer, layer.decode, device)
        stack.callback(callers.close)
        of = dict(fixed(layer, server, callers, folder))
        rate_alone = statistics.fmean(slot.rate for slot in of[lane_choice.JOINED] if not slot.decode)
        settings = settings_of(layer, Way("chosen", lanes=True, target_ms=target_ms), folder)
        settings["partitions"] = {"decode": _FIRST_SMS, "prefill": SMPartitions(0).granularity}
        for load, phases in loads(seconds).items():
            kept = {choice: list(as_if_kept(phases, slots)) for choice, slots in of.items()}
            worths = {choice: worth(slots, choice, target, rate_alone) for choice, slots in kept.items()}
            best = max(worths, key=worths.__getitem__)
            with server.running({**settings, "port": free_port()}) as url:
                slots = callers.run(url, phases)
            yield {
                "layer": name,
                "target_ms": target_ms,
                "phase_seconds": seconds,
                "load": load,
                "best": [best.decode_sms, best.chunk_tokens],
                "best_worth": worths[best],
                "best_late": late_part(kept[best], target),
                "chosen_worth": worth(slots, best, target, rate_alone),
                "chosen_late": late_part(slots, target),
                "fixed": [[*choice, value] for choice, value in worths.items()],
                "slots": [[micros(slot), round(slot.rate / rate_alone, 3)] for slot in slots],
            }


def micros(slot: Slot) -> int | str | None:
    """What decode took, for the file."""
    seconds = slot.decode_seconds
    return "no answer" if seconds == math.inf else None if seconds is None else round(1e6 * seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table, and write its rows to a file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--layers",
        nargs="+",
        choices=[name for name in LAYERS if name != "tiny"],
        default=["deepseek-v3/ep8"],
    )
    parser.add_argument("--target", type=float, default=1.0, help="of decode, in ms")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("expected a GPU, got none: on a CPU, lanes share all cores")
    if given.seconds <= 0 or given.seconds % SLOT_SECONDS:
        parser.error(f"--seconds: expected a multiple of {SLOT_SECONDS} above 0, got {given.seconds}")
    rows: list[dict[str, Any]] = []
    if given.json and given.json.exists():
        rows = json.loads(given.json.read_text())["rows"]
    for name in given.layers:
        rows = [row for row in rows if (row["layer"], row["target_ms"]) != (name, given.target)]
        for row in measured(name, given.target, given.seconds, "cuda:0"):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if given.json:
                content = {"header": header(), "rows": rows}
                given.json.write_text(json.dumps(content) + "\n")
    print(loads_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
