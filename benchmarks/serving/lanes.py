"""Decode beside prefill on one device: `python -m benchmarks lanes [--layers NAME ...] [--json FILE]`.

A server with one layer and random weights answers, through channels, a caller of decode steps (64 tokens, or
1), which pauses for 0.5 ms after each, beside a caller that always has three requests of 4,096 tokens in
flight. The ways to serve both: all in turns; prefill in chunks, in turns with decode or joined with it; two
lanes on all SMs; two lanes that split the SMs. The columns: the median and the 99th percentile of a decode
step as its caller sees it, and the prefill's rate as a share of its rate alone. Tensors are in the GPU's
memory. With --http, both callers send theirs over HTTP, the second one on two connections. Without a GPU, the
layer is a tiny one on the CPU. Rows that are not measured stay in the file.

Then it prints the split that suits, as a line of a server's settings: of those with which at most 1% of
decode steps take longer than --target, that with most prefill. Where decode steps have several numbers of
tokens, the split's worst row counts.
"""

import json
import platform
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from benchmarks.lib.caller import CALLER, POWER_SECONDS, SPIN_SECONDS, start_callers
from benchmarks.lib.markdown import pivot, table
from benchmarks.lib.processes import Program
from benchmarks.lib.run import Result, earlier, new_parser
from benchmarks.lib.timing import cpu_name, header
from benchmarks.serving.lanes_server import Server

Row = dict[str, Any]
KEYS = "layer", "way", "decode_tokens"
SLOTS = 3  # requests of prefill in flight
CONNECTIONS = 2  # the same, over HTTP
PAUSE_SECONDS = 0.5e-3
LEAD_SECONDS = 0.3  # that both callers have been busy before what is measured
MODEL = "layer"
DEEPSEEK = {
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "num_expert_groups": 8,
    "topk_group": 4,
}


class Layer(NamedTuple):
    """A layer's sizes, and the tokens of requests and chunks."""

    hidden: int
    intermediate: int
    experts: int
    routing: dict[str, Any]
    prefill: int = 4096
    decode: tuple[int, ...] = (64, 1)
    chunks: tuple[int, ...] = (512, 1024, 2048)
    top_k: int = 8


LAYERS = {
    "deepseek-v3/ep8": Layer(7168, 2048, 32, DEEPSEEK),
    "deepseek-v3": Layer(7168, 2048, 256, DEEPSEEK),
    "qwen3-30b-a3b": Layer(2048, 768, 128, {}),
    "tiny": Layer(256, 128, 8, {}, 256, (8, 1), (64,), 2),
}
SPLITS = (16, 32, 48, 64, 80)


class Way(NamedTuple):
    """How decode and prefill are served.

    split  the SMs of the decode lane; None: the lanes share all
    """

    name: str
    chunk: int = 0
    joins: bool = False
    lanes: bool = False
    split: int | None = None


ALONE = Way("alone")


def ways(layer: Layer, splits: Sequence[int]) -> list[Way]:
    """All ways; those with the same settings follow each other. In turns without chunks comes first."""
    return [
        Way("turns"),
        Way("joined", joins=True),
        *(Way(f"turns, chunks of {chunk}", chunk) for chunk in layer.chunks),
        *(Way(f"joined, chunks of {chunk}", chunk, joins=True) for chunk in layer.chunks),
        Way("lanes on all SMs", lanes=True),
        *(Way(f"lanes, {split} SMs for decode", lanes=True, split=split) for split in splits),
    ]


def settings_of(layer: Layer, way: Way, folder: Path, spin: int | None = None) -> dict[str, Any]:
    """The settings of a server, but its port; the split is changed while it runs.

    spin: its channels.spin_microseconds
    """
    # A joined step has a whole request of prefill, or a chunk of it, and all decode tokens.
    room = max(layer.decode) if way.joins and not way.chunk else 0
    limits = {
        "max_request_tokens": layer.prefill,
        "max_batch_tokens": layer.prefill + room,
        "prefill_chunk_tokens": way.chunk,
        "join_chunks": way.joins,
    }
    model = {
        "name": MODEL,
        "hidden_size": layer.hidden,
        "intermediate_size": layer.intermediate,
        "num_experts": layer.experts,
        "top_k": layer.top_k,
        "routing": layer.routing,
    }
    channels = {"socket": str(folder / "channels"), "spin_microseconds": spin}
    settings = {"models": [model], "limits": limits, "channels": channels}
    if way.lanes:
        lanes: dict[str, Any] = {"decode_max_tokens": max(layer.decode)}
        if way.split is not None:
            lanes |= {"decode_partition": "decode", "prefill_partition": "prefill"}
            settings["partitions"] = {"decode": 48, "prefill": 64}
        settings["lanes"] = lanes
    return settings


class Callers(NamedTuple):
    """The two callers, and what they share.

    lead  seconds for which prefill is under way before what is measured; None: until times are steady
    """

    decode: Program
    prefill: Program
    seconds: float
    device: str | None
    http: bool = False
    lead: float | None = None

    @property
    def slots(self) -> int:
        """Requests of prefill in flight."""
        return CONNECTIONS if self.http else SLOTS

    def lead_of(self, prefills: bool) -> float:
        """Seconds for which the callers have been busy before what is measured."""
        if prefills and self.lead is not None:
            return self.lead
        return POWER_SECONDS if prefills and self.device is not None else LEAD_SECONDS

    def measure(self, url: str, layer: Layer, decode: int, prefills: bool) -> tuple[list[float], float]:
        """A decode step's seconds, each, and the prefill's tokens per second. decode 0: prefill alone."""
        common: dict[str, Any] = {"way": "http" if self.http else "channel", "url": url, "models": [MODEL]}
        common |= {"hidden_size": layer.hidden, "device": self.device}
        common |= {"spin": SPIN_SECONDS if self.device else 0.0}
        at_once = "connections" if self.http else "slots"
        loads: dict[Program, dict[str, Any]] = {
            self.decode: {"tokens": decode, "pause": PAUSE_SECONDS},
            self.prefill: {"tokens": layer.prefill, at_once: self.slots},
        }
        busy = [caller for caller, is_busy in zip(loads, (decode, prefills), strict=True) if is_busy]
        given, lead = [common | loads[caller] for caller in busy], self.lead_of(prefills)
        start = 1e9 * start_callers(busy, given, self.seconds, lead)
        end = start + 1e9 * self.seconds
        found = [[stamp for stamp in caller.read()["stamps"] if start <= stamp[1] <= end] for caller in busy]
        steps = [(answered - sent) / 1e9 for sent, answered in found[0] if start <= sent] if decode else []
        return sorted(steps), len(found[-1]) * layer.prefill / self.seconds if prefills else 0.0


def split_sms(url: str, split: int) -> None:
    """Give `split` SMs to the decode lane, and the others to the prefill lane."""
    with urllib.request.urlopen(f"{url}/v1/partitions") as answer:
        total = json.load(answer)["total_sms"]
    body = json.dumps({"partitions": {"decode": split, "prefill": total - split}}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/partitions", body, method="PUT")).close()


def measured(
    name: str, layer: Layer, wanted: Sequence[Way], decode: Sequence[int], callers: Callers, spin: int | None
) -> Iterator[Row]:
    """The rows of one layer: first what runs alone, on a server without lanes and chunks."""
    server = Server()
    points = [(ALONE, tokens) for tokens in (*decode, 0)] + [(way, t) for way in wanted for t in decode]
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.callback(server.close)
        running, now, url, alone = ExitStack(), None, "", 0.0
        stack.callback(lambda: running.close())
        for way, tokens in points:
            settings = settings_of(layer, way, Path(folder), spin)
            if settings != now:
                running.close()
                now = settings
                url = running.enter_context(server.running(settings))
            if way.split is not None:
                split_sms(url, way.split)
            steps, rate = callers.measure(url, layer, tokens, way is not ALONE or not tokens)
            alone = alone or rate
            yield row_of(name, way, tokens, steps, rate, alone)


def row_of(name: str, way: Way, tokens: int, steps: Sequence[float], rate: float, alone: float) -> Row:
    """One row of the file."""
    times = {
        "steps": len(steps),
        "p50_us": 1e6 * statistics.median(steps) if steps else None,
        "p99_us": 1e6 * steps[int(0.99 * len(steps))] if steps else None,
    }
    prefill = {
        "prefill_tokens_per_second": rate or None,
        "prefill_share": rate / alone if rate else None,
    }
    return {"layer": name, "decode_tokens": tokens, "way": way.name, **times, **prefill}


def by_way(rows: Sequence[Row]) -> str:
    """A line for each way of one layer: p50, p99 and the prefill's share, by decode tokens."""
    rows = [row for row in rows if row["decode_tokens"]]
    tokens = sorted({row["decode_tokens"] for row in rows}, reverse=True)
    formats = "{p50_us:.0f}", "{p99_us:.0f}", "{prefill_share:.2f}"
    cells = pivot(rows, ["way"], ["decode_tokens"], *formats, order=[(count,) for count in tokens])
    columns = [name for count in tokens for name in (f"{count}: p50, µs", "p99, µs", "prefill")]
    return table((f"{rows[0]['layer']}, decode tokens", *columns), cells)


def suiting(
    rows: Sequence[Row], layer: Layer, splits: Sequence[Way], target_ms: float, total_sms: int
) -> str:
    """The settings of the split that suits, by the rows of one layer: a line of YAML."""
    shares: dict[Way, float] = {}
    for way in splits:
        of = [row for row in rows if row["way"] == way.name]
        if of and all(row["steps"] and row["p99_us"] <= 1e3 * target_ms for row in of):
            shares[way] = min(row["prefill_share"] or 0.0 for row in of)
    if not shares:
        return f"# no split with which at most 1% of decode steps take longer than {target_ms:g} ms"
    way = max(shares, key=shares.__getitem__)
    assert way.split is not None
    settings = {
        "partitions": {"decode": way.split, "prefill": total_sms - way.split},
        "lanes": settings_of(layer, way, Path())["lanes"],
    }
    line = yaml.safe_dump(settings, default_flow_style=True, sort_keys=False, width=sys.maxsize).strip()
    # By a merge, two keys fit in one line of a file that has others.
    return f"<<: {line}  # at most 1% of decode over {target_ms:g} ms, prefill at {shares[way]:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each layer, and write all rows to a file if asked to."""
    parser = new_parser(__doc__)
    on_gpu = torch.cuda.is_available()
    default = [name for name in LAYERS if (name != "tiny") == on_gpu]
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=default)
    parser.add_argument("--ways", nargs="+", default=[""], help="only ways that begin with one of these")
    parser.add_argument("--tokens", type=int, nargs="+", help="only decode steps of these")
    parser.add_argument("--splits", type=int, nargs="+", default=SPLITS, help="SMs of the decode lane")
    parser.add_argument("--target", type=float, default=1.0, help="ms of a decode step, for the split")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    parser.add_argument("--lead", type=float, help="seconds of prefill before them; 0.3, on a GPU 2")
    parser.add_argument("--spin", type=int, help="the server's channels.spin_microseconds")
    parser.add_argument("--http", action="store_true", help="call over HTTP, in rows of their own")
    given = parser.parse_args(arguments)
    machine = header() if on_gpu else {"cpu": cpu_name(), "torch": torch.__version__}
    machine |= {"python": platform.python_version(), "spin_microseconds": given.spin}
    result = Result(given.json, machine, earlier(given.json), KEYS)
    with ExitStack() as stack:
        decode, prefill = (stack.enter_context(Program(CALLER)) for _ in range(2))
        device = "cuda:0" if on_gpu else None
        callers = Callers(decode, prefill, given.seconds, device, given.http, given.lead)
        for name in given.layers:
            layer = LAYERS[name]
            wanted = [
                way
                for way in ways(layer, given.splits if on_gpu else ())
                if way.name.startswith(tuple(given.ways))
            ]
            steps = [tokens for tokens in layer.decode if not given.tokens or tokens in given.tokens]
            title = f"{name} over HTTP" if given.http else name
            found: list[Row] = []
            for row in measured(title, layer, wanted, steps, callers, given.spin):
                found.append(row)
                result.put(row)
            print(by_way([row for row in result.rows if row["layer"] == title]), flush=True)
            if splits := [way for way in wanted if way.split is not None]:
                sms = torch.cuda.get_device_properties(0).multi_processor_count
                print(suiting(found, layer, splits, given.target, sms), flush=True)
    return 0
