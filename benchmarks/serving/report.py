"""The sections about servers."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib import cpus
from benchmarks.lib.markdown import (
    Cell,
    Row,
    Section,
    about,
    by,
    lines,
    machine,
    paragraph,
    pivot,
    read,
    table,
    written,
)
from benchmarks.ranks.report import compared
from benchmarks.serving import deadlines
from benchmarks.serving.lanes import by_way
from examples.afd.intervals import read_timeline, times

ONE_GPU = "serving-h200.json"
WAYS = {
    ("http", None): "HTTP",
    ("sockets", None): "its bytes alone",
    ("shared memory", None): "shared memory of the host",
    ("shared memory", "cuda:0"): "of the server's GPU",
    ("shared memory", "cuda:1"): "of another GPU",
    ("channel", None): "channel, memory of the host",
    ("channel", "cuda:0"): "of the server's GPU",
    ("channel", "cuda:1"): "of another GPU",
}
"""How tensors reach the server, in the order of the columns."""
RANKS_WAYS = {
    ("http", None): "HTTP",
    ("shared memory", None): "shared memory of the host",
    ("shared memory", "cuda:0"): "shared memory of a GPU of the server",
    ("channel", None): "channel, memory of the host",
    ("channel", "cuda:0"): "channel, memory of a GPU of the server",
}


def serving_machine(results: Path) -> str:
    """The machine and versions."""
    what = read(results, ONE_GPU)["about"]
    gpus, shown = len(what["gpu"].splitlines()), machine(what)
    return paragraph(
        f"{gpus} GPUs of one host: {shown['gpu']}, driver {shown['driver']}, torch {shown['torch']}."
    )


def serving(results: Path) -> str:
    """The median time of one caller by tokens and way."""
    rows = [row for row in _one_process(results) if row["callers"] == 1]
    # The GPU alone, as measured first: it varies by a few percent from one time to the next.
    alone = {tokens: of[0]["gpu_us"] for (tokens,), of in by(rows, "tokens").items()}
    cells = [
        (tokens, f"{alone[tokens]:.0f}", *times)
        for tokens, *times in pivot(rows, ["tokens"], ["way", "device"], "{p50_us:.0f}", order=WAYS)
    ]
    return table(("tokens", "GPU alone", *WAYS.values()), cells)


def serving_callers(results: Path) -> str:
    """Rates of several callers."""
    return lines(
        [row for row in _one_process(results) if row["callers"] > 1],
        {
            "callers": "{callers}",
            "tokens of each request": "{tokens}",
            "way": lambda row: "HTTP" if row["way"] == "http" else f"{row['way']}, {row['device'] or 'host'}",
            "requests/s": lambda row: f"{row['tokens_per_second'] / row['tokens']:.0f}",
            "tokens/s": "{tokens_per_second:.0f}",
            "p50, µs": "{p50_us:.0f}",
            "p99, µs": "{p99_us:.0f}",
        },
    )


def serving_workers(results: Path) -> str:
    """Rates of one HTTP process and of several."""
    rows = [row for row in read(results, ONE_GPU)["rows"] if row["way"] == "http" and row["callers"] > 1]
    cells = []
    for load, (one, *several) in by(rows, "callers", "tokens").items():
        for many in several:
            rates = [row["tokens_per_second"] / row["tokens"] for row in (one, many)]
            shown = (f"{rate:.0f}" for rate in rates)
            cells.append((*load, many["http_workers"], *shown, f"{rates[1] / rates[0]:.2f}"))
    columns = ("callers", "tokens of each request", "HTTP processes", "one, requests/s", "several", "ratio")
    return table(columns, cells)


def serving_headline(results: Path) -> str:
    """What a caller adds to the GPU's time, in a sentence."""
    rows = {
        (row["way"], row["device"], row["tokens"]): row
        for row in reversed(_one_process(results))
        if row["callers"] == 1
    }
    one, many = (rows["channel", "cuda:0", tokens] for tokens in (1, 4096))
    http, http_many = (rows["http", None, tokens] for tokens in (1, 4096))
    gpu = machine(read(results, ONE_GPU)["about"])["gpu"]
    return paragraph(
        f"On one {gpu}, a call of DeepSeek-V3's whole layer through a [channel](transports.md#channels), "
        f"with tensors in the GPU's memory, takes {one['p50_us'] - one['gpu_us']:.0f} µs longer than the GPU "
        f"alone at 1 token, and {100 * (many['p50_us'] / many['gpu_us'] - 1):.0f}% longer at 4096. Over "
        f"HTTP it takes {http['p50_us'] - http['gpu_us']:.0f} µs longer at 1 token; at 4096, where bodies "
        f"take the time, {http_many['p50_us'] / 1e3:.0f} ms instead of {http_many['gpu_us'] / 1e3:.0f}."
    )


def ping_pong(results: Path) -> str:
    """What the timeline of the example amounts to."""
    about, intervals = read_timeline(results / "afd_timeline-h200.json")
    took = times(intervals)
    return paragraph(
        f"{about['title'][0].upper()}{about['title'][1:]}. Attention ran for {1e3 * took.attention:.1f} ms "
        f"and experts for {1e3 * took.experts:.1f} ms of {1e3 * took.wall:.1f} ms: {took.overlap:.0%} of the "
        "shorter is hidden behind the other."
    )


def ranks(field: str, keys: dict[str, str], wanted: Callable[[int], bool], rising: bool) -> Section:
    """A field of callers by the number of GPUs, one beside several; wanted: by their number."""

    def write(results: Path) -> str:
        rows: list[Row] = []
        for file in sorted(results.glob("serving-*xh200.json")):
            gpus = int(file.name.removeprefix("serving-").partition("x")[0])
            rows += [
                row | {"gpus": gpus, "name": RANKS_WAYS[row["way"], row["device"]]}
                for row in read(results, file.name)["rows"]
                if row["http_workers"] == 1 and (row["way"], row["device"]) in RANKS_WAYS
                if wanted(row["callers"])
            ]
        several = {tuple(row[key] for key in keys.values()) for row in rows if row["gpus"] > 1}
        order = list(RANKS_WAYS.values())
        rows = [row for row in rows if tuple(row[key] for key in keys.values()) in several]
        rows.sort(key=lambda row: (order.index(row["name"]), row["callers"], row["tokens"]))
        return compared(rows, keys, field, "faster on {last}", rising)

    return write


def lanes(results: Path) -> str:
    """A table for each layer, of every way to serve decode beside prefill."""
    return "\n\n".join(map(by_way, by(read(results, "lanes-h200.json")["rows"], "layer").values()))


def open_loop_machine(results: Path) -> str:
    """What was served where, and the goal."""
    content = read(results, "open_loop-cpu.json")
    what, rows = content["about"], content["rows"]
    shares = zip(what["tokens"], what["shares"], strict=True)
    sizes = ", ".join(f"{share:.0%} of {size}" for size, share in shares)
    best, most = max(row["goodput"] for row in rows), rows[-1]
    return paragraph(
        f"{cpus.described(what)}; {what['seconds']:g} s each; {sizes} tokens; deadline "
        f"{what['deadline_ms']:g} ms. Capacity, by a closed loop: {content['capacity']:.0f} requests/s. At "
        f"{most['load']:g} times it, goodput is {most['goodput'] / best:.2f} of the best, and {most['late']} "
        f"of the {most['sent']} requests are late."
    )


def machine_of(name: str) -> Section:
    """The cores of server and callers, and the seconds of a row."""

    def write(results: Path) -> str:
        what = read(results, name)["about"]
        return paragraph(f"{cpus.described(what)}; {what['seconds']:g} s each.")

    return write


def fuzz(results: Path) -> str:
    """What was sent to each target."""
    rows = [
        {"name": re.sub(r"[_\W]+", " ", name).strip(), **target}
        for name, target in read(results, "fuzz-cpu.json")["targets"].items()
    ]
    return lines(rows, {"target": "{name}", **_same("cases", "seconds", "failures")})


def soak(name: str) -> Section:
    """What became of the requests of each kind of callers."""

    def write(results: Path) -> str:
        content = read(results, name)
        kinds = {**content["kinds"], "together": {**content["total"], "p99_ms": None}}
        counts = _same("sent", "right", "refused", "cancelled", "cut", "lost", "wrong", "failed")
        columns = {"callers": "{kind}", **counts, "p99, ms": "{p99_ms:.0f}"}
        return lines([{"kind": kind, **of} for kind, of in kinds.items()], columns)

    return write


def soak_machine(name: str, where: Callable[[dict[str, Any]], str]) -> Section:
    """How long it was, and what grew; on a GPU, too."""

    def write(results: Path) -> str:
        content = read(results, name)
        header, memory, descriptors = (content[key] for key in ("header", "memory", "descriptors"))
        gpu = content["device_memory"]
        on_gpu = f", the GPU's by {gpu['growth']:.1%} of {gpu['bytes'] / 2**20:.0f} MiB"
        device = on_gpu if gpu["bytes"] else ""
        commit = f" at {header['commit']}," if header.get("commit") else ""
        return paragraph(
            f"{header['seconds']:.0f} s on {where(header)}{commit} with "
            f"{content['idle_connections']} idle connections. After warm-up, memory grew by "
            f"{memory['growth']:.1%} of {memory['bytes'] / 2**20:.0f} MiB{device}, and descriptors by "
            f"{descriptors['growth']:.1%} of {descriptors['count']}. Exit codes after SIGTERM: "
            f"{content['exit_codes'][0]} and {content['exit_codes'][-1]}."
        )

    return write


def _one_process(results: Path) -> list[Row]:
    """The rows of one HTTP process."""
    return [row for row in read(results, ONE_GPU)["rows"] if row.get("http_workers", 1) == 1]


def _same(*keys: str) -> dict[str, str]:
    """Columns that are named like what they have."""
    return {key: f"{{{key}}}" for key in keys}


def _if(count: str, text: str) -> Callable[[Row], str]:
    """A cell that is empty if the row has none of these."""
    return lambda row: text.format_map(row) if row[count] else ""


_OPEN_LOOP: dict[str, Cell] = {
    "of capacity": "{load:g}",
    "requests/s": "{offered:.0f}",
    "in time, 1/s": "{goodput:.0f}",
    "p50, ms": "{p50_ms:.0f}",
    "p99, ms": "{p99_ms:.0f}",
    "refused": "{refused}",
    "after, p50, ms": _if("refused", "{refused_p50_ms:.1f}"),
    "late": "{late}",
    "by at most, ms": _if("late", "{late_by_most_ms:.1f}"),
}
_BESIDE: dict[str, Cell] = {
    "long requests": "{long}",
    "beside": "{beside}",
    "requests": "{requests}",
    "p50, ms": "{p50_ms:.1f}",
    "p99, ms": "{p99_ms:.1f}",
    "p99 alone + one chunk, ms": "{goal_ms:.1f}",
    "tokens beside, 1/s": _if("tokens_per_s", "{tokens_per_s}"),
}
_SERVING_CPU = [
    ("connections", "{connections}"),
    ("tensor", "{datatype} [{tokens}, {hidden_size}]"),
    ("Starlette, requests/s", "{starlette[rps]:.0f}"),
    ("expertd", "{expertd[rps]:.0f}"),
    ("ratio", "{ratio:.2f}"),
    ("Starlette, p50, ms", "{starlette[p50_ms]:.3g}"),
    ("expertd", "{expertd[p50_ms]:.3g}"),
]
_STEPS = {
    "tokens": "{tokens}",
    "GPU alone": "{gpu_us:.0f}",
    "rows in pinned memory": "{pinned_us:.0f}",
    "in the GPU's memory": "{device_us:.0f}",
}
SECTIONS: dict[str, Section] = {
    "serving-headline": serving_headline,
    "serving-machine": serving_machine,
    "serving": serving,
    "serving-callers": serving_callers,
    "serving-workers": serving_workers,
    "steps": written("steps-h200.json", _STEPS),
    "ping-pong": ping_pong,
    "serving-cpu-machine": about(
        "serving_cpu.json", "{cpus} cores of an {cpu}, Python {python}, Starlette {starlette}."
    ),
    "serving-cpu": written("serving_cpu.json", _SERVING_CPU),
    "serving-ranks": ranks(
        "p50_us", {"way": "name", "tokens": "tokens"}, lambda callers: callers == 1, False
    ),
    "serving-ranks-callers": ranks(
        "tokens_per_second",
        {"way": "name", "callers": "callers", "tokens of each request": "tokens"},
        lambda callers: callers > 1,
        True,
    ),
    "lanes-machine": about("lanes-h200.json", "{gpu}, driver {driver}, torch {torch}, Python {python}."),
    "lanes": lanes,
    "open-loop-machine": open_loop_machine,
    "open-loop": written("open_loop-cpu.json", _OPEN_LOOP),
    "timeouts-machine": machine_of("deadlines-cpu.json"),
    "timeouts": written("deadlines-cpu.json", deadlines.COLUMNS, missing="-"),
    "beside-machine": machine_of("beside-cpu.json"),
    "beside": written("beside-cpu.json", _BESIDE),
    "soak-machine": soak_machine(
        "soak-cpu.json", lambda header: f"2 cores of an {header['cpu']}, beside other work,"
    ),
    "soak": soak("soak-cpu.json"),
    "soak-gpu-machine": soak_machine("soak-h200.json", lambda _: "an NVIDIA H200"),
    "soak-gpu": soak("soak-h200.json"),
    "fuzz": fuzz,
}
