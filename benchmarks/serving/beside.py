"""One-token requests beside long ones: `python -m benchmarks beside [--only NAME] [--json FILE]`.

The demo layer, served on this machine, answers a caller that sends one token again and again, while other
connections repeat requests of 4,096 tokens, or 16 of 64: without chunks of the long ones, with chunks of two
sizes, with several HTTP processes, with joined chunks, and on lanes. The time of a chunk is measured, too, as
that of a request of its size alone: beside long requests, p99 should exceed the p99 alone by no more than
that.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib import cpus
from benchmarks.lib.markdown import table
from benchmarks.serving.json_beside import Request, binary, measure, server

CASES = ((0, 0), (1, 4096), (4, 4096), (16, 64))  # connections, and the tokens of their requests
COLUMNS = (
    *("long requests", "beside", "requests", "p50, ms", "p99, ms", "p99 alone + one chunk, ms"),
    "tokens beside, 1/s",
)


class Variant(NamedTuple):
    """How long requests are computed; chunk: its tokens, 0: there are none."""

    chunk: int
    settings: tuple[str, ...] = ()


VARIANTS = {
    "whole": Variant(0),
    "chunks of 512": Variant(512),
    "chunks of 512, 4 HTTP processes": Variant(512, ("http_workers=4",)),
    "chunks of 1024": Variant(1024),
    "joined chunks of 1024": Variant(1024, ("limits.join_chunks=true",)),
    "on a lane": Variant(0, ("lanes.decode_max_tokens=16",)),
}


def rows_of(
    name: str, variant: Variant, seconds: float, of_server: set[int] | None
) -> Iterator[dict[str, Any]]:
    """A row for each case."""
    p99_alone: float | None = None
    with server(f"limits.prefill_chunk_tokens={variant.chunk}", *variant.settings, cpus=of_server) as port:
        chunk = _median_ms(port, binary(variant.chunk), seconds / 4) if variant.chunk else None
        for connections, num_tokens in CASES:
            beside = binary(num_tokens) if connections else None
            took, answered = measure(port, beside, connections, seconds)
            p50, p99 = np.percentile(np.array(took) * 1e3, (50, 99)).round(2).tolist()
            goal = None if p99_alone is None or chunk is None else round(p99_alone + chunk, 2)
            p99_alone = p99_alone or p99
            yield {
                "long": name,
                "beside": f"{connections} x {num_tokens}" if connections else "nothing",
                "requests": len(took),
                "p50_ms": p50,
                "p99_ms": p99,
                "goal_ms": goal,
                "tokens_per_s": round(answered * num_tokens / seconds),
            }


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    times = (row["p50_ms"], row["p99_ms"], row["goal_ms"])
    return [
        *(str(row[name]) for name in ("long", "beside", "requests")),
        *("" if time is None else f"{time:.1f}" for time in times),
        str(row["tokens_per_s"] or ""),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row of the table for each variant and case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=VARIANTS, nargs="+", default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    cpus.add_option(parser)
    given = parser.parse_args(arguments)
    of_server, header = cpus.split(given.server_cpus)
    header |= {"seconds": given.seconds}
    rows: list[dict[str, Any]] = []
    print(table(COLUMNS, []))
    for name in given.only:
        for row in rows_of(name, VARIANTS[name], given.seconds, of_server):
            rows.append(row)
            print(f"| {' | '.join(cells(row))} |", flush=True)
            if given.json:
                given.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    return 0


def _median_ms(port: int, request: Request, seconds: float) -> float:
    """Of a request alone."""
    took, _ = measure(port, None, 0, seconds, request)
    return 1e3 * float(np.median(took))


if __name__ == "__main__":
    sys.exit(main())
