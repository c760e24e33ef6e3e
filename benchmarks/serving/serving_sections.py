"""Writes the results of `benchmarks serving` and `benchmarks steps` as Markdown."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.lib.markdown import paragraph, table
from examples.afd.intervals import read_timeline, times

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


def serving_machine(results: Path) -> str:
    """The machine and versions."""
    header = _content(results)["header"]
    name, driver = header["gpu"].split("\n")[0].split(", ")[:2]
    gpus = len(header["gpu"].splitlines())
    return paragraph(f"{gpus} GPUs of one host: {name}, driver {driver}, torch {header['torch']}.")


def serving(results: Path) -> str:
    """The median time of one caller by tokens and way."""
    rows = [row for row in _rows(results) if row["callers"] == 1]
    cells = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        of = {(row["way"], row["device"]): row for row in rows if row["tokens"] == tokens}
        cells.append(
            (
                tokens,
                _us(_gpu_us(rows, tokens)),
                *(_us(of[way]["p50_us"]) if way in of else "" for way in WAYS),
            )
        )
    return table(("tokens", "GPU alone", *WAYS.values()), cells)


def serving_callers(results: Path) -> str:
    """Rates of several callers."""
    rows = [row for row in _rows(results) if row["callers"] > 1]
    return table(
        ("callers", "tokens of each request", "way", "requests/s", "tokens/s", "p50, µs", "p99, µs"),
        [
            (
                row["callers"], row["tokens"], _way(row), f"{row['tokens_per_second'] / row['tokens']:.0f}",
                f"{row['tokens_per_second']:.0f}", _us(row["p50_us"]), _us(row["p99_us"]),
            )
            for row in rows
        ],
    )  # fmt: skip


def serving_workers(results: Path) -> str:
    """Rates of one HTTP process and of several."""
    rows = [row for row in _content(results)["rows"] if row["way"] == "http" and row["callers"] > 1]
    cells = []
    for one in (row for row in rows if row["http_workers"] == 1):
        for many in rows:
            if _load(many) == _load(one) and many["http_workers"] > 1:
                rates = [row["tokens_per_second"] / row["tokens"] for row in (one, many)]
                cells.append(
                    (
                        one["callers"], one["tokens"], many["http_workers"],
                        *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}",
                    )
                )  # fmt: skip
    columns = ("callers", "tokens of each request", "HTTP processes", "one, requests/s", "several", "ratio")
    return table(columns, cells)


def serving_cpu(results: Path) -> str:
    """HTTP on a CPU beside a plain Starlette route."""
    rows = _content(results, "serving_cpu.json")["rows"]
    cells = [
        (
            row["connections"], f"{row['datatype']} [{row['tokens']}, {row['hidden_size']}]",
            *(f"{row[name]['rps']:.0f}" for name in ("starlette", "expertd")), f"{row['ratio']:.2f}",
            *(f"{row[name]['p50_ms']:.3g}" for name in ("starlette", "expertd")),
        )
        for row in rows
    ]  # fmt: skip
    columns = (
        "connections",
        "tensor",
        "Starlette, requests/s",
        "expertd",
        "ratio",
        "Starlette, p50, ms",
        "expertd",
    )
    return table(columns, cells)


def serving_cpu_machine(results: Path) -> str:
    """The machine and versions."""
    about = _content(results, "serving_cpu.json")["machine"]
    versions = f"Python {about['python']}, Starlette {about['starlette']}"
    return paragraph(f"{about['cpus']} cores of an {about['cpu']}, {versions}.")


def serving_headline(results: Path) -> str:
    """What a caller adds to the GPU's time, in a sentence."""
    rows = _rows(results)
    one, many = (_row(rows, "channel", "cuda:0", tokens) for tokens in (1, 4096))
    http, http_many = (_row(rows, "http", None, tokens) for tokens in (1, 4096))
    alone, alone_many = (row["gpu_us"] for row in (http, http_many))
    gpu = _content(results)["header"]["gpu"].split(",")[0]
    return paragraph(
        f"On one {gpu}, a call of DeepSeek-V3's whole layer through a [channel](transports.md#channels), "
        f"with tensors in the GPU's memory, takes {one['p50_us'] - one['gpu_us']:.0f} µs longer than the GPU "
        f"alone at 1 token, and {100 * (many['p50_us'] / many['gpu_us'] - 1):.0f}% longer at 4096. Over "
        f"HTTP it takes {http['p50_us'] - alone:.0f} µs longer at 1 token; at 4096, where bodies take the "
        f"time, {http_many['p50_us'] / 1e3:.0f} ms instead of {alone_many / 1e3:.0f}."
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


def steps(results: Path) -> str:
    """compute_seconds by tokens and memory, beside the GPU's time."""
    rows = json.loads((results / "steps-h200.json").read_text())["steps"]
    return table(
        ("tokens", "GPU alone", "rows in pinned memory", "in the GPU's memory"),
        [(row["tokens"], *(_us(row[f"{key}_us"]) for key in ("gpu", "pinned", "device"))) for row in rows],
    )


def _rows(results: Path) -> list[dict[str, Any]]:
    """Those of one HTTP process."""
    return _one_process(_content(results)["rows"])


def _one_process(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("http_workers", 1) == 1]


def _row(rows: Iterable[dict[str, Any]], way: str, device: str | None, tokens: int) -> dict[str, Any]:
    wanted = way, device, tokens, 1
    return next(r for r in rows if (r["way"], r["device"], r["tokens"], r["callers"]) == wanted)


def _gpu_us(rows: Iterable[dict[str, Any]], tokens: int) -> float:
    """The GPU alone, as measured first: it varies by a few percent from one time to the next."""
    return float(next(row["gpu_us"] for row in rows if row["tokens"] == tokens))


def _load(row: dict[str, Any]) -> tuple[int, int]:
    return row["callers"], row["tokens"]


def _way(row: dict[str, Any]) -> str:
    return "HTTP" if row["way"] == "http" else f"{row['way']}, {row['device'] or 'host'}"


def _us(microseconds: float) -> str:
    return f"{microseconds:.0f}"


def _content(results: Path, name: str = "serving-h200.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / name).read_text())
    return content
