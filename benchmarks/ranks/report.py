"""The sections about a layer whose experts are spread over several GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.layer.problem import LAYERS
from benchmarks.lib.markdown import (
    Cell,
    Row,
    Section,
    by,
    cell,
    lines,
    machine,
    mean,
    paragraph,
    pivot,
    read,
    span,
    table,
)

# Each way, by the number of GPUs: measured, of 450e3 by name; for eight assumed.
NVLINK_BYTES_PER_US = {2: 370e3, 4: 345e3, 8: 345e3}
_VERSIONS = {"nvrtc": "NVRTC", "torch": "torch", "nccl": "NCCL", "deep_gemm": "DeepGEMM: sgl-deep-gemm"}
_COUNTS, _EXPECTED = (2, 4, 8), (128, 1024, 4096)  # GPUs, and tokens of each
_SMS = 40  # for communication, the setting's default
_TOKENS = 1, *_EXPECTED  # of the rows that are shown
_TIMES = {"exchange": "{exchange_us:.0f}", "layer": "{layer_us:.0f}"}
_ROUTINGS = {"rows": "even", "skewed": "Zipf 1.0", "uneven": "even, uneven tokens"}
_OVERLAP: dict[str, Cell] = {
    "layer": "{layer}",
    "GPUs": "{gpus}",
    "tokens a GPU": "{tokens}",
    "dispatch and combine alone": "{exchange_us:.0f}",
    "one GPU, the same work": "{one_gpu_us:.0f}",
    "whole layer": "{layer_us:.0f}",
    "overlapped": "{overlapped_us:.0f}",
    "exposed without": lambda row: f"{100 * row['exposed_without']:.0f}%",
    "exposed": lambda row: f"{100 * row['exposed']:.0f}%",
}


def parallel_machine(results: Path) -> str:
    """The machine and versions, for each number of GPUs."""
    counts: dict[str, list[str]] = {}
    for count, content in _contents(results).items():
        what = machine(content["about"])
        versions = [f"{label} {what[key]}" for key, label in _VERSIONS.items() if key in what]
        counts.setdefault(f"{what['gpu']}, driver {what['driver']}, {', '.join(versions)}", []).append(
            str(count)
        )
    return paragraph(" ".join(f"{' and '.join(of)} GPUs of one host: {what}." for what, of in counts.items()))


def parallel(results: Path) -> str:
    """A line for each layer and number of tokens, with the times on each number of GPUs."""
    rows = [row for row in _rows(results, "rows") if row["tokens"] in _TOKENS]
    counts = sorted({row["gpus"] for row in rows})
    cells = pivot(
        rows, ["layer", "tokens"], ["gpus"], *_TIMES.values(), order=[(n,) for n in counts], missing="-"
    )
    columns = [
        f"{count} GPUs: {name}" if not place else name
        for count in counts
        for place, name in enumerate(_TIMES)
    ]
    return table(("layer", "tokens a GPU", *columns), cells) if cells else ""


def parallel_headline(results: Path) -> str:
    """The whole layer against the two GEMMs alone, and the exchange against NCCL's, in a sentence each."""
    sentences = []
    for (count,), rows in by(_rows(results, "rows"), "gpus").items():
        if ratios := [row["over_two_gemms"] for row in rows if "over_two_gemms" in row]:
            sentences.append(
                f"On {count} GPUs the whole layer takes {mean(ratios):.2f} times as long as DeepGEMM's two "
                f"GEMMs alone (the geometric mean of {len(ratios)} rows, {span(ratios)}), and is slower in "
                f"{sum(ratio > 1 for ratio in ratios) or 'none'} of them."
            )
        if nccl := [row["nccl_us"] / row["exchange_us"] for row in rows if "nccl_us" in row]:
            sentences.append(f"An exchange by NCCL takes {span(nccl)} times as long as ours.")
    return paragraph(" ".join(sentences))


def parallel_routing(results: Path) -> str:
    """The whole layer over one GPU with the same work, by how tokens and experts are drawn."""
    cells = []
    for section, name in _ROUTINGS.items():
        for (count,), rows in by(_rows(results, section), "gpus").items():
            ratios = [row["layer_us"] / row["one_gpu_us"] for row in rows]
            cells.append(
                (
                    name,
                    count,
                    span([row["imbalance"] for row in rows]),
                    f"{mean(ratios):.2f} ({span(ratios)})",
                )
            )
    columns = "experts", "GPUs", "max/mean of the GPUs' rows", "whole layer over one GPU, the same work"
    return table(columns, cells) if cells else ""


def parallel_growth(results: Path) -> str:
    """The layer's time on the max_gpus GPUs over that on one, in a sentence."""
    contents = _contents(results)
    max_gpus = max(contents, default=0)
    rows: list[Row] = contents[max_gpus].get("growth", []) if contents else []
    ratios = [
        times[max_gpus] / times[1]
        for of in by(rows, "layer", "tokens").values()
        if {1, max_gpus} <= (times := {row["gpus"]: row["layer_us"] for row in of}).keys()
    ]
    return (
        ""
        if not ratios
        else paragraph(f"On {max_gpus} GPUs a layer takes {span(ratios)} times as long as on one.")
    )


def compared(rows: Sequence[Row], keys: dict[str, str], field: str, ratio: str, rising: bool = True) -> str:
    """A line for each value of the keys, by their columns; a column for each number of GPUs; and the ratio.

    ratio   its column's name, a format of the `first` and the `last` number of GPUs
    rising  the last over the first
    """
    counts = sorted({row["gpus"] for row in rows})
    cells = []
    for line in pivot(rows, [*keys.values()], ["gpus"], lambda row: row[field], order=[(n,) for n in counts]):
        values = line[len(keys) :]
        ends = (values[-1], values[0]) if rising else (values[0], values[-1])
        over = cell(lambda row: f"{row['ends'][0] / row['ends'][1]:.2f}", {"ends": ends}, "-")
        shown = (f"{value:.0f}" if isinstance(value, (int, float)) else "-" for value in values)
        cells.append((*line[: len(keys)], *shown, over))
    if not cells:
        return ""
    names = [f"{count} GPU{'s' if count > 1 else ''}" for count in counts]
    return table((*keys, *names, ratio.format(first=counts[0], last=counts[-1])), cells)


def parallel_expected(results: Path) -> str:
    """The layer's time on more GPUs by arithmetic, and on those that were measured beside it."""
    name = LAYERS[0].name
    measured = {
        count: {row["tokens"]: row for row in content["rows"] if row["layer"] == name}
        for count, content in _contents(results).items()
    }
    if not measured or not all({1, *_EXPECTED} <= of_count.keys() for of_count in measured.values()):
        return ""
    rows = measured[min(measured)]
    fixed = rows[1]["layer_us"] - rows[1]["one_gpu_us"]
    said = []
    for count in reversed(_COUNTS):
        links = [sum(link_microseconds(tokens, count)) for tokens in _EXPECTED]
        times = [rows[tokens]["one_gpu_us"] + fixed + us for tokens, us in zip(_EXPECTED, links, strict=True)]
        seen = [of[tokens]["layer_us"] for tokens in _EXPECTED if (of := measured.get(count))]
        text = f"on {count} GPUs {_listed(times)} µs, of which the link {_listed(links)}"
        said.append(text + (f" (measured {_listed(seen)})" if seen else ""))
    return paragraph(f"With {_listed(_EXPECTED)} tokens a GPU: {'; '.join(said)}.")


def parallel_overlap(results: Path) -> str:
    """The layer with and without combine under the down GEMM."""
    rows = read(results, "overlap-h200.json")["rows"]
    return lines([row for row in rows if row["communication_sms"] == _SMS], _OVERLAP)


def other_ranks(num_ranks: int, top_k: int) -> float:
    """How many other ranks a token goes to, on average, if all experts are equally likely."""
    return float((num_ranks - 1) * (1 - (1 - 1 / num_ranks) ** top_k))


def link_microseconds(tokens: int, num_ranks: int) -> tuple[float, float]:
    """The time that the first layer's rows of a GPU's tokens take over NVLink: there in FP8, back in bf16."""
    layer = LAYERS[0]
    rows, h = tokens * other_ranks(num_ranks, layer.top_k), layer.hidden_size
    rate = NVLINK_BYTES_PER_US[num_ranks]
    return rows * (h + h // 128 * 4) / rate, rows * 2 * h / rate


def _listed(values: Sequence[float]) -> str:
    return f"{', '.join(f'{value:.0f}' for value in values[:-1])} and {values[-1]:.0f}"


def _contents(results: Path) -> dict[int, dict[str, Any]]:
    """The results for each number of GPUs, the fewest first."""
    contents = [read(results, file.name) for file in results.glob("parallel-*xh200.json")]
    return dict(sorted((content["about"]["ranks"], content) for content in contents))


def _rows(results: Path, section: str) -> list[Row]:
    """A section's rows for all numbers of GPUs."""
    return [row for content in _contents(results).values() for row in content.get(section, [])]


SECTIONS: dict[str, Section] = {
    function.__name__.replace("_", "-"): function
    for function in (
        parallel_machine, parallel, parallel_headline, parallel_routing, parallel_growth, parallel_expected,
        parallel_overlap,
    )
}  # fmt: skip
