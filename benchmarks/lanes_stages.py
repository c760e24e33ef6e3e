"""Where a decode step's time goes, as its caller sees it: `python -m benchmarks.lanes_stages`.

A server with one layer answers a caller of decode steps through a channel, as in `benchmarks.lanes`: alone,
with or without lanes, and on lanes beside prefill. Both processes stamp what they do. A request's stages are:

  arrive   from the caller's call until the server's worker thread reads the request
  queue    until its step begins
  launch   until it has begun: on a GPU, its launches are enqueued; on a CPU it is done then
  compute  until the caller sees the answer, or the server that the step is done, if that is earlier
  answer   until the caller sees it: what the server needs from the end of the step on

The first table has each stage's median and 99th percentile. The second one compares the slowest hundredth of
requests with all: the mean of each stage, and for how long the worker thread did something for the prefill
lane meanwhile, or there was a report (metrics, on the event loop) or a collection of garbage, either of which
holds the interpreter's lock. The third one says how long each of these takes. With --stand-in, steps only
take time (`benchmarks.lanes_stand_in`), and the stages show what the host of a GPU would do.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.lanes import Caller, Callers, split_sms
from benchmarks.lanes_server import Server
from benchmarks.lanes_ways import ALONE, LAYERS, Way, settings_of
from benchmarks.markdown import table
from benchmarks.serving_rows import free_port
from benchmarks.stage_stamps import Stamp, read_stamps

STAGES = ("arrive", "queue", "launch", "compute", "answer")
MEANWHILE = ("prefill", "report", "gc")
BESIDE = "beside prefill"
_WAY = (
    "submit",
    "begin",
    "wait",
)  # the last one only if the server sees that the step is done before the caller


class Request(NamedTuple):
    """Microseconds of each stage, and of what happened at the same time."""

    stages: tuple[float, ...]
    meanwhile: tuple[float, ...]

    @property
    def total(self) -> float:
        return sum(self.stages)


def requests_of(sent: Sequence[tuple[int, int]], stamps: Sequence[Stamp]) -> Iterator[Request]:
    """The requests of one caller that sends them one after another, each as (sent, answered).

    One without its stamps is left out.
    """
    ordered = sorted(stamps, key=lambda stamp: stamp[1])
    first = 0
    for began, seen in sent:
        while first < len(ordered) and ordered[first][2] < began:
            first += 1
        on_way: dict[str, tuple[int, int]] = {}
        held = dict.fromkeys(MEANWHILE, 0)
        for place in range(first, len(ordered)):
            name, start, end = ordered[place]
            if start > seen:
                break
            if name in _WAY and start >= began:
                on_way.setdefault(name, (start, end))
            elif (kind := name.rstrip("012")) in held:
                held[kind] += max(0, min(end, seen) - max(start, began))
        if "submit" not in on_way or "begin" not in on_way:
            continue
        begin = on_way["begin"]
        ends = on_way["submit"][0], *begin, max(begin[1], on_way.get("wait", (0, seen))[1])
        times = began, *(min(end, seen) for end in ends), seen
        yield Request(
            tuple((end - start) / 1e3 for start, end in pairwise(times)),
            tuple(held[name] / 1e3 for name in MEANWHILE),
        )


def shown(found: Sequence[Request], stamps: Sequence[Stamp]) -> str:
    """The three tables."""
    by_total = sorted(found, key=lambda request: request.total)
    slowest = by_total[-max(1, len(found) // 100) :]
    rows = []
    for name, times in zip(
        (*STAGES, "all"), (*zip(*(each.stages for each in found), strict=True), ()), strict=True
    ):
        ordered = sorted(times or [each.total for each in found])
        rows.append((name, f"{statistics.median(ordered):.0f}", f"{ordered[int(0.99 * len(ordered))]:.0f}"))
    means = [
        (
            name,
            *(
                f"{statistics.fmean((*each.stages, *each.meanwhile)[at] for each in of):.0f}"
                for of in (found, slowest)
            ),
        )
        for at, name in enumerate((*STAGES, *MEANWHILE))
    ]
    holds = []
    for kind in MEANWHILE:
        if took := sorted((end - start) / 1e3 for name, start, end in stamps if name.rstrip("012") == kind):
            times = (statistics.median(took), took[int(0.99 * len(took))], took[-1])
            holds.append((kind, len(took), *(f"{each:.0f}" for each in times)))
    return "\n\n".join(
        (
            table(("stage", "p50, µs", "p99, µs"), rows),
            table(("mean, µs", f"all {len(found)}", f"the slowest {len(slowest)}"), means),
            table(("one takes", "number", "p50, µs", "p99, µs", "most, µs"), holds),
        )
    )


class Stages(NamedTuple):
    """Measures them: by a server that starts again for each way, and its two callers.

    folder  of its channels, and of the file `stamps` that it writes when it ends
    """

    server: Server
    callers: Callers
    folder: Path
    stamps: Path
    spin: int | None

    def of(self, name: str, way: Way, tokens: int) -> tuple[list[Request], list[Stamp]]:
        """The requests of the caller of decode steps; prefill is beside it if the way's name says so."""
        settings = {**settings_of(LAYERS[name], way, self.folder, self.spin), "port": free_port()}
        with self.server.running(settings) as url:
            if way.split is not None and self.callers.device:
                split_sms(url, way.split)
            beside = way.name.endswith(BESIDE)
            lead = self.callers.lead_of(beside)
            found = self.callers.results(url, LAYERS[name], tokens, beside, lead)[0]
        stamps = read_stamps(self.stamps)
        sent = [(begin, end) for begin, end in found["stamps"]]
        during = [stamp for stamp in stamps if sent[0][0] <= stamp[1] <= sent[-1][1]]
        return list(requests_of(sent, stamps)), during


@contextmanager
def measuring(given: argparse.Namespace, device: str | None) -> Iterator[Stages]:
    """The processes, which take seconds to start."""
    module = "benchmarks.lanes_stand_in" if given.stand_in else "benchmarks.lanes_server"
    with (
        tempfile.TemporaryDirectory() as folder,
        Caller() as decode,
        Caller() as prefill,
        closing(Server((file := Path(folder) / "stamps.json", max(given.tokens)), module)) as server,
    ):
        callers = Callers(decode, prefill, given.seconds, device)
        yield Stages(server, callers, Path(folder), file, given.spin)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of each layer, way and number of tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--layers", nargs="+", choices=LAYERS, default=["deepseek-v3/ep8" if on_gpu else "tiny"]
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64] if on_gpu else [1])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each pair of tables")
    parser.add_argument(
        "--split", type=int, default=48, help="SMs of the decode lane beside prefill, on a GPU"
    )
    parser.add_argument("--spin", type=int, help="the server's channels.spin_microseconds")
    parser.add_argument(
        "--stand-in", action="store_true", help="without a GPU: steps that only take time, on lanes"
    )
    given = parser.parse_args(arguments)
    split = given.split if on_gpu else None
    lanes = (
        Way("alone, with lanes", lanes=True),
        Way(f"lanes, {split or 'all'} SMs for decode, {BESIDE}", lanes=True, split=split),
    )
    ways = lanes if given.stand_in else (ALONE, *lanes)
    with measuring(given, "cuda:0" if on_gpu else None) as stages:
        for name, way, tokens in product(given.layers, ways, given.tokens):
            found = shown(*stages.of(name, way, tokens))
            print(f"\n{name}, {way.name}, {tokens} tokens\n\n{found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
