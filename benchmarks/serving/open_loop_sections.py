"""Writes the results of `benchmarks open_loop`, `benchmarks deadlines`, the soak and fuzzing as Markdown."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.lib import cpus
from benchmarks.lib.markdown import paragraph, table
from benchmarks.serving import deadlines


def open_loop_machine(results: Path) -> str:
    """What was served where, and the goal."""
    content = _content(results, "open_loop-cpu.json")
    header, rows = content["header"], content["rows"]
    shares = zip(header["tokens"], header["shares"], strict=True)
    sizes = ", ".join(f"{share:.0%} of {size}" for size, share in shares)
    best, most = max(row["goodput"] for row in rows), rows[-1]
    return paragraph(
        f"{cpus.described(header)}; {header['seconds']:g} s each; {sizes} tokens; deadline "
        f"{header['deadline_ms']:g} ms. Capacity, by a closed loop: {content['capacity']:.0f} requests/s. At "
        f"{most['load']:g} times it, goodput is {most['goodput'] / best:.2f} of the best, and {most['late']} "
        f"of the {most['sent']} requests are late."
    )


def open_loop(results: Path) -> str:
    """Goodput by load."""
    rows = _content(results, "open_loop-cpu.json")["rows"]
    cells = [
        (
            f"{row['load']:g}", f"{row['offered']:.0f}", f"{row['goodput']:.0f}",
            f"{row['p50_ms']:.0f}", f"{row['p99_ms']:.0f}", row["refused"],
            f"{row['refused_p50_ms']:.1f}" if row["refused"] else "", row["late"],
            f"{row['late_by_most_ms']:.1f}" if row["late"] else "",
        )
        for row in rows
    ]  # fmt: skip
    columns = (
        "of capacity",
        "requests/s",
        "in time, 1/s",
        "p50, ms",
        "p99, ms",
        "refused",
        "after, p50, ms",
        "late",
        "by at most, ms",
    )
    return table(columns, cells)


def timeouts(results: Path) -> str:
    """When answers came that had no output in time."""
    rows = _content(results, "deadlines-cpu.json")["rows"]
    return table(deadlines.COLUMNS, map(deadlines.cells, rows))


def timeouts_machine(results: Path) -> str:
    """Where."""
    return _machine(results, "deadlines-cpu.json")


def beside(results: Path) -> str:
    """How long one token takes beside long requests."""
    rows = _content(results, "beside-cpu.json")["rows"]
    columns = (
        *("long requests", "beside", "requests", "p50, ms", "p99, ms", "p99 alone + one chunk, ms"),
        "tokens beside, 1/s",
    )
    cells = [
        (
            *(row[name] for name in ("long", "beside", "requests")),
            *("" if row[name] is None else f"{row[name]:.1f}" for name in ("p50_ms", "p99_ms", "goal_ms")),
            row["tokens_per_s"] or "",
        )
        for row in rows
    ]
    return table(columns, cells)


def beside_machine(results: Path) -> str:
    """Where."""
    return _machine(results, "beside-cpu.json")


def fuzz(results: Path) -> str:
    """What was sent to each target."""
    targets = _content(results, "fuzz-cpu.json")["targets"]
    columns = ("cases", "seconds", "failures")
    cells = [
        (re.sub(r"[_\W]+", " ", name).strip(), *(target[column] for column in columns))
        for name, target in targets.items()
    ]
    return table(("target", *columns), cells)


def soak(results: Path) -> str:
    """What became of the requests of each kind of callers on a CPU."""
    return _soak(_content(results, "soak-cpu.json"))


def soak_machine(results: Path) -> str:
    """How long it was, and what grew."""
    content = _content(results, "soak-cpu.json")
    return _soak_machine(content, f"2 cores of an {content['header']['cpu']}, beside other work,")


def soak_gpu(results: Path) -> str:
    """What became of the requests of each kind of callers on a GPU."""
    return _soak(_content(results, "soak-h200.json"))


def soak_gpu_machine(results: Path) -> str:
    """How long it was, and what grew; on the GPU, too."""
    content = _content(results, "soak-h200.json")
    return _soak_machine(content, "an NVIDIA H200", content["device_memory"])


def _soak(content: dict[str, Any]) -> str:
    kinds = {**content["kinds"], "together": {**content["total"], "p99_ms": None}}
    columns = ("sent", "right", "refused", "cancelled", "cut", "lost", "wrong", "failed")
    cells = [
        (kind, *(counts[name] for name in columns), _whole(counts["p99_ms"]))
        for kind, counts in kinds.items()
    ]
    return table(("callers", *columns, "p99, ms"), cells)


def _soak_machine(content: dict[str, Any], where: str, on_gpu: dict[str, Any] | None = None) -> str:
    header, memory, descriptors = content["header"], content["memory"], content["descriptors"]
    device = f", the GPU's by {on_gpu['growth']:.1%} of {on_gpu['bytes'] / 2**20:.0f} MiB" if on_gpu else ""
    return paragraph(
        f"{header['seconds']:.0f} s on {where}{_of(header.get('commit'))} with "
        f"{content['idle_connections']} idle connections. After warm-up, memory grew by "
        f"{memory['growth']:.1%} of {memory['bytes'] / 2**20:.0f} MiB{device}, and descriptors by "
        f"{descriptors['growth']:.1%} of {descriptors['count']}. Exit codes after SIGTERM: "
        f"{content['exit_codes'][0]} and {content['exit_codes'][-1]}."
    )


def _machine(results: Path, name: str) -> str:
    header = _content(results, name)["header"]
    return paragraph(f"{cpus.described(header)}; {header['seconds']:g} s each.")


def _of(commit: str | None) -> str:
    return f" at {commit}," if commit else ""


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:.0f}"


def _content(results: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((results / name).read_text())
    return content
