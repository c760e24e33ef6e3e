"""The table and the JSON file."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertd_client.bench.case import BenchError, BenchTarget, Result
from expertd_client.version import __version__

_BUSY = 0.9  # of a core: Python threads of one process share about one
_LATENCIES = ("p50", "p90", "p99", "max")
_HEADS = ("tokens", "conns", "rate/s", "requests/s", "tokens/s", *_LATENCIES, "errors", "client CPU")


def heading() -> str:
    """The first line of the table."""
    return _line(_HEADS)


def row(result: Result) -> str:
    """A line of the table."""
    latencies = (result.p50_us, result.p90_us, result.p99_us, result.max_us)
    return _line(
        (
            str(result.tokens),
            str(result.connections),
            "closed" if result.rate is None else f"{result.rate:g}",
            f"{result.requests_per_second:,.1f}",
            f"{result.tokens_per_second:,.0f}",
            *map(_time, latencies),
            str(result.failed),
            f"{result.client_cpu:.0%} of {result.processes}",
        )
    )


def remarks(results: list[Result]) -> Iterator[str]:
    """What a reader of the table should know."""
    yield "Latencies are of whole calls; client CPU is the busiest client process's share of a core."
    if any(result.client_cpu > _BUSY for result in results):
        yield "Where client CPU is above 90%, the client may be the bottleneck: try more --processes."
    if any(result.rate is not None for result in results):
        late = max(result.late_p99_us for result in results if result.rate is not None)
        yield f"Open loop: latencies count from when requests were due; 99% were sent within {_time(late)}."
    for result in results:
        if result.failed:
            kinds = [f"{count} {name}" for name, count in sorted(result.errors.items())]
            kinds += [f"{result.unsent} not sent"] * bool(result.unsent)
            case = f"{result.tokens} tokens, {result.connections} connections"
            yield f"{case}: expected {result.requests + result.failed} answers, got {', '.join(kinds)}"


def write_json(path: Path, target: BenchTarget, server: Any, results: list[Result]) -> None:
    """Everything that was measured, and where. Raises BenchError, and leaves no part of it."""
    about = {
        "server": {"url": target.url, "name": server.get("name"), "version": server.get("version")},
        "model": {"name": target.model, "hidden_size": target.hidden_size, "datatype": target.datatype},
        "client": {
            "version": __version__,
            "transport": target.transport,
            "python": platform.python_version(),
            "cpus": num_cpus(),
        },
        "results": [result.as_json() for result in results],
    }
    try:
        path.write_text(json.dumps(about, indent=2) + "\n")
    except OSError as error:
        if path.is_file() and not path.is_symlink():
            path.unlink()
        raise BenchError(f"--json: expected room for {path}, got an error: {error.strerror}") from error


def num_cpus() -> int:
    """Those that this process may use; of the machine, where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class Progress:
    """`write` prints a line above the bar; `advance` takes what is being measured, and seconds done."""

    write: Callable[[str], None]
    advance: Callable[[str, float], None]


@contextmanager
def progress_bar(seconds: float) -> Iterator[Progress]:
    """A bar on a terminal if tqdm is installed; else lines alone."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield Progress(print, lambda name, seconds: None)
        return
    form = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(total=seconds, bar_format=form, leave=False, disable=not sys.stderr.isatty()) as bar:

        def advance(name: str, done: float) -> None:
            bar.set_description(name, refresh=False)
            bar.update(min(done, seconds - bar.n))

        yield Progress(lambda line: tqdm.write(line, file=sys.stdout), advance)


def _line(cells: tuple[str, ...]) -> str:
    widths = (6, 5, 8, 10, 11, 9, 9, 9, 9, 6, 11)
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _time(microseconds: float) -> str:
    if microseconds != microseconds:
        return "-"
    return f"{microseconds:,.0f} us" if microseconds < 10_000 else f"{microseconds / 1e3:,.1f} ms"
