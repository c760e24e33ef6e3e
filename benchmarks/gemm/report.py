"""The sections about grouped GEMMs."""

import re
from pathlib import Path

from benchmarks.gemm.gemm_sweep import by_kind
from benchmarks.gemm.grouped_gemm import by_band, by_weights
from benchmarks.gemm.heat_map import worst
from benchmarks.lib.markdown import (
    Row,
    Section,
    about,
    by,
    mean,
    paragraph,
    pivot,
    read,
    span,
    table,
)

GEMMS, SWEEP = "grouped_gemm-h200.json", "gemm_sweep-h200.json"
MXFP4 = "grouped_gemm_mxfp4-h200.json"
PICTURE = "../gemm_sweep-h200.svg"
_OF = "ours", "deep_gemm"
_POWER = "ours, pJ/FLOP", "DeepGEMM", "ratio"


def grouped_gemm(results: Path) -> str:
    """The grouped GEMMs, by band of shapes."""
    return by_band(read(results, GEMMS)["rows"])


def mxfp4(results: Path) -> str:
    """MXFP4 weights beside the same numbers in FP8, by rows of a group."""
    return by_weights(read(results, MXFP4)["rows"])


def peers(results: Path) -> str:
    """Our speed over the other implementations, by band of shapes."""
    rows = read(results, GEMMS)["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row.get("peers_us", {})))

    def speed(name: str, rows: list[Row]) -> str:
        found = [row["peers_us"][name] / row["us"] for row in rows if name in row.get("peers_us", {})]
        return f"{mean(found):.2f} ({span(found)})" if found else ""

    cells = [(band, *(speed(name, of) for name in names)) for (band,), of in by(rows, "band").items()]
    return table(("speed over", *names), cells) if names else ""


def power(results: Path) -> str:
    """The energy of the largest shapes, in a loop and as single launches; watts and clocks in a sentence."""
    names, cells, figures = ("loop", "cold"), [], []
    for row in read(results, GEMMS)["rows"]:
        found = [row.get("power", {}).get(name, {}) for name in names]
        if all("deep_gemm" in each for each in found):
            pairs = [[each[of]["pj_per_flop"] for of in _OF] for each in found]
            figures += [each[of] for each in found for of in _OF]
            cells.append((row["shape"], *(text for pair in pairs for text in _cells_of(*pair))))
    if not cells:
        return ""
    columns = [f"{what}, {name}" for name in ("loop", "single launches") for what in _POWER]
    ranges = [[round(each[key]) for each in figures] for key in ("watts", "mhz")]
    watts, mhz = (f"{min(values)} to {max(values)}" for values in ranges)
    return f"{table(('shape', *columns), cells)}\n\n{paragraph(f'Both ran at {watts} W and {mhz} MHz.')}"


def sweep(results: Path) -> str:
    """The sweep by layout and number of groups, and its picture."""
    picture = f"![speed over DeepGEMM by rows of a group and N x K, the worst points numbered]({PICTURE})"
    return f"{by_kind(read(results, SWEEP)['rows'])}\n\n{picture}"


def sweep_worst(results: Path) -> str:
    """The points that the picture numbers."""
    numbered = [row | {"place": place} for place, row in enumerate(worst(read(results, SWEEP)["rows"]), 1)]
    text = "{place}: {layout}, {groups} of {rows}, {n}x{k}: {speed:.2f}"
    return paragraph("; ".join(text.format_map(row) for row in numbered) + ".")


def host_cost(results: Path) -> str:
    """The host's time for a call."""
    cases = [(tensors, out) for tensors in ("reused", "fresh") for out in ("given", "allocated")]
    rows = read(results, "host_cost-h200.json")["rows"]
    cells = pivot(rows, ["shape"], ["tensors", "out"], "{us:.1f}", order=cases)
    return table(("µs a call", *(f"{tensors}, `out` {out}" for tensors, out in cases)), cells)


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


def _cells_of(ours: float, theirs: float) -> tuple[str, str, str]:
    return f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.3f}"


_MACHINE = "{gpu}, driver {driver}, NVRTC {nvrtc}, torch {torch}; a copy moved {copy_tbps:.2f} TB/s; "
SECTIONS: dict[str, Section] = {
    "grouped-gemm-machine": about(
        GEMMS, _MACHINE + "cuBLAS FP8 reached {cublas_fp8_tflops:.0f} TFLOPS in the same run."
    ),
    "grouped-gemm": grouped_gemm,
    "grouped-gemm-mxfp4-machine": about(MXFP4, _MACHINE.removesuffix("; ") + "."),
    "grouped-gemm-mxfp4": mxfp4,
    "grouped-gemm-peers": peers,
    "grouped-gemm-power": power,
    "gemm-sweep-machine": about(SWEEP, _MACHINE + "DeepGEMM: sgl-deep-gemm {deep_gemm}."),
    "gemm-sweep": sweep,
    "gemm-sweep-worst": sweep_worst,
    "host-cost": host_cost,
    "layouts": layouts,
}
