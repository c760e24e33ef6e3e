"""The sections about grouped GEMMs."""

import re
from pathlib import Path

from benchmarks.gemm.gemm_sweep import by_kind
from benchmarks.gemm.grouped_gemm import by_band
from benchmarks.gemm.heat_map import worst
from benchmarks.lib.markdown import (
    Cell,
    Row,
    Section,
    about,
    by,
    lines,
    mean,
    paragraph,
    pivot,
    read,
    span,
    table,
)

GEMMS, SWEEP = "grouped_gemm-h200.json", "gemm_sweep-h200.json"
PICTURE = "../gemm_sweep-h200.svg"


def grouped_gemm(results: Path) -> str:
    """The grouped GEMMs, by band of shapes."""
    return by_band(read(results, GEMMS)["rows"])


def peers(results: Path) -> str:
    """Our speed over the other implementations, by band of shapes."""
    rows = read(results, GEMMS)["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("peers_us", {})))

    def speed(name: str, rows: list[Row]) -> str:
        found = [row["peers_us"][name] / row["us"] for row in rows if name in row.get("peers_us", {})]
        return f"{mean(found):.2f} ({span(found)})" if found else ""

    cells = [(band, *(speed(name, of) for name in names)) for (band,), of in by(rows, "band").items()]
    return table(("speed over", *names), cells) if names else ""


def power(case: str) -> Section:
    """The energy of the largest shapes: in a loop, or as single launches on a cold L2."""
    formats = {"µs": "us]:.0f", "W": "watts]:.0f", "MHz": "mhz]:.0f", "pJ/FLOP": "pj_per_flop]:.3f"}
    columns: list[tuple[str, Cell]] = [("shape", "{shape}")]
    for name, of in formats.items():
        columns.append(("ours, µs" if name == "µs" else name, f"{{ours[{of}}}"))
        columns.append(("DeepGEMM", f"{{deep_gemm[{of}}}"))
    columns.append(("ratio", "{ratio:.3f}"))

    def write(results: Path) -> str:
        rows = []
        for row in read(results, GEMMS)["rows"]:
            found = row.get("power", {}).get(case, {})
            if "deep_gemm" in found:
                ratio = found["ours"]["pj_per_flop"] / found["deep_gemm"]["pj_per_flop"]
                rows.append({"shape": row["shape"], **found, "ratio": ratio})
        return lines(rows, columns)

    return write


def sweep(results: Path) -> str:
    """The sweep by layout and number of groups, and its picture."""
    picture = f"![speed over DeepGEMM by rows of a group and N x K, the worst points numbered]({PICTURE})"
    return f"{by_kind(read(results, SWEEP)['rows'])}\n\n{picture}"


def sweep_worst(results: Path) -> str:
    """The points that the picture numbers."""
    numbered = [row | {"place": place} for place, row in enumerate(worst(read(results, SWEEP)["rows"]), 1)]
    columns: dict[str, Cell] = {"": "{place}", "layout": "{layout}", "groups": "{groups}", "rows": "{rows}"}
    columns |= {"N": "{n}", "K": "{k}", "ours, µs": "{us:.1f}", "DeepGEMM, µs": "{deep_gemm_us:.1f}"}
    return lines(numbered, columns | {"speed": "{speed:.2f}"})


def host_cost(results: Path) -> str:
    """The host's time for a call."""
    cases = [(tensors, out) for tensors in ("reused", "fresh") for out in ("given", "allocated")]
    rows = read(results, "host_cost-h200.json")["rows"]
    cells = pivot(rows, ["shape"], ["tensors", "out"], "{us:.1f}", order=cases)
    return table(("µs a call", *(f"{tensors}, `out` {out}" for tensors, out in cases)), cells)


def sm_counts(results: Path) -> str:
    """The scaling of time with the number of SMs."""
    cells = []
    for (count,), rows in by(read(results, "sm_counts-h200.json")["rows"], "num_sms").items():
        ratios = [row["ratio"] for row in rows]
        cells.append((count, len(ratios), f"{mean(ratios):.2f}", span(ratios)))
    return table(("SMs", "shapes", "time, with 1 for inverse to SMs: geometric mean", "least to most"), cells)


def layouts(results: Path) -> str:
    """The masked layout's time over the contiguous one's in a layer."""
    h200, cpu = (
        [float(ratio) for ratio in re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)$", path.read_text(), re.M)]
        for path in (results / "layouts-h200.txt", results / "layouts-cpu.txt")
    )
    return paragraph(
        f"A layer in the masked layout took {span(h200)} times as long as in the contiguous one on an H200 "
        f"({len(h200)} cases), and {span(cpu)} times on a CPU ({len(cpu)} cases)."
    )


_MACHINE = "{gpu}, driver {driver}, NVRTC {nvrtc}, torch {torch}; a copy moved {copy_tbps:.2f} TB/s; "
SECTIONS: dict[str, Section] = {
    "grouped-gemm-machine": about(
        GEMMS, _MACHINE + "cuBLAS FP8 reached {cublas_fp8_tflops:.0f} TFLOPS in the same run."
    ),
    "grouped-gemm": grouped_gemm,
    "grouped-gemm-peers": peers,
    "grouped-gemm-power": power("loop"),
    "grouped-gemm-power-cold": power("cold"),
    "gemm-sweep-machine": about(SWEEP, _MACHINE + "DeepGEMM: sgl-deep-gemm {deep_gemm}."),
    "gemm-sweep": sweep,
    "gemm-sweep-worst": sweep_worst,
    "host-cost": host_cost,
    "sm-counts": sm_counts,
    "layouts": layouts,
}
