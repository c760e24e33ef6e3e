"""How late a `timeout` is answered: `python -m benchmarks deadlines [--timeout MS ...] [--json FILE]`.

The demo layer, served on this machine, answers a caller whose one-token requests have a timeout, while other
connections repeat long requests. Of each answer without an output, or after the timeout, the caller sees how
long after it that came: before, if it is negative. The last column is how long the server's event loop
waited for a core of the machine, which server and callers share.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib import cpus
from benchmarks.lib.caller import CALLER, Connection, infer_request, start_callers, tokens_of
from benchmarks.lib.markdown import lines
from benchmarks.lib.processes import Program, demo_server
from benchmarks.lib.run import Result, new_parser

CASES = ((0, 0), (1, 4096), (4, 4096), (16, 64))  # connections, and the tokens of their requests
COLUMNS = {
    "timeout, ms": "{timeout_ms:g}",
    "beside": "{beside}",
    "in time": "{in_time}",
    "refused or late": "{others}",
    "after it: p50, ms": "{p50_ms:.1f}",
    "p99, ms": "{p99_ms:.1f}",
    "most, ms": "{most_ms:.1f}",
    "waited, ms/s": "{waited_ms_per_s}",
}
MODEL, HIDDEN = "demo", 512
_PAUSE_SECONDS = 0.01


class Measured(NamedTuple):
    """in_time: answers with an output; late: milliseconds after the timeout, of all others, or before."""

    in_time: int
    late: list[float]
    waited: float  # milliseconds a second, of the event loop


def measure(port: int, pid: int, milliseconds: float, seconds: float) -> Measured:
    """Send one request after the other."""
    request = infer_request(MODEL, tokens_of(1, HIDDEN, "FP32"), timeout=round(1e3 * milliseconds))
    late: list[float] = []
    in_time, before = 0, _waited(pid)
    connection = Connection(port)
    with closing(connection.socket):
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            status = connection.call(request)
            after = 1e3 * (time.perf_counter() - began) - milliseconds
            if status == 200 and after <= 0:
                in_time += 1
            else:
                late.append(after)
            time.sleep(_PAUSE_SECONDS)
    return Measured(in_time, late, (_waited(pid) - before) / seconds)


@contextmanager
def background_load(port: int, connections: int, num_tokens: int, seconds: float) -> Iterator[None]:
    """Long requests of these connections, each of a process, until these seconds are over."""
    given = {"way": "http", "url": f"http://127.0.0.1:{port}", "models": [MODEL], "tokens": num_tokens}
    given |= {"hidden_size": HIDDEN, "datatype": "FP32"}
    with ExitStack() as stack:
        callers = [stack.enter_context(Program(CALLER)) for _ in range(connections)]
        start_callers(callers, [given] * connections, seconds, 0.0)
        yield
        for caller in callers:
            caller.read()


def row(milliseconds: float, name: str, found: Measured) -> dict[str, Any]:
    """What is measured of a case; the times are None if all answers had an output in time."""
    times = np.percentile(found.late, (50, 99, 100)).round(1).tolist() if found.late else [None] * 3
    return {
        "timeout_ms": milliseconds,
        "beside": name,
        "in_time": found.in_time,
        "others": len(found.late),
        **dict(zip(("p50_ms", "p99_ms", "most_ms"), times, strict=True)),
        "waited_ms_per_s": round(found.waited),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row of the table for each case."""
    parser = new_parser(__doc__)
    parser.add_argument("--timeout", type=float, nargs="+", default=[10.0, 50.0], help="milliseconds")
    parser.add_argument("--seconds", type=float, default=10.0)
    cpus.add_option(parser)
    given = parser.parse_args(arguments)
    of_server, header = cpus.split(given.server_cpus)
    result = Result(given.json, header | {"seconds": given.seconds})
    with demo_server(cpus=of_server) as (port, pid):
        for milliseconds in given.timeout:
            for connections, num_tokens in CASES:
                with background_load(port, connections, num_tokens, given.seconds):
                    found = measure(port, pid, milliseconds, given.seconds)
                name = f"{connections} x {num_tokens}" if connections else "nothing"
                result.put(row(milliseconds, name, found))
    print(lines(result.rows, COLUMNS, "-"))
    return 0


def _waited(pid: int) -> float:
    """Milliseconds for which the main thread of a process was ready to run, and did not."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e6
