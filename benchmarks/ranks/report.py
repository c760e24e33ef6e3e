"""The sections about a layer whose experts are spread over several GPUs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.layer.problem import LAYERS
from benchmarks.lib.markdown import (
    NOT_MEASURED,
    Cell,
    Row,
    Section,
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
_PEERS = {"two_gemms": "DeepGEMM's two GEMMs alone", "mega_moe": "SM90 Mega MoE"}
_COUNTS, _EXPECTED = (2, 4, 8), (128, 1024, 4096)  # GPUs, and tokens of each
_LAYER: dict[str, Cell] = {"layer": "{layer}"}
_GPUS: dict[str, Cell] = {"GPUs": "{gpus}"}
_TOKENS: dict[str, Cell] = {"tokens a GPU": "{tokens}"}
_ALONE: dict[str, Cell] = {"dispatch and combine alone": "{exchange_us:.0f}"}
_WHOLE: dict[str, Cell] = {
    "one GPU, the same work": "{one_gpu_us:.0f}",
    "whole layer": "{layer_us:.0f}",
}
_IN_A_ROW: dict[str, Cell] = {"in a row": "{exchange_next_us:.0f}", "by NCCL": "{nccl_us:.0f}"}
_OVER_GEMMS: dict[str, Cell] = {"whole layer over two GEMMs": "{over_two_gemms:.2f}"}
_OVER: dict[str, Cell] = {"whole layer over Mega MoE": "{over_mega_moe:.2f}"}
_OVERLAP: dict[str, Cell] = {
    "SMs for communication": "{communication_sms}",
    **_ALONE,
    **_WHOLE,
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
    """Every row, in a table for each number of GPUs."""
    columns = _LAYER | _TOKENS | _ALONE | _IN_A_ROW | _WHOLE | _OVER_GEMMS | _OVER
    tables = {count: _table(content["rows"], columns) for count, content in _contents(results).items()}
    return "\n\n".join(f"{count} GPUs:\n\n{text or NOT_MEASURED}" for count, text in tables.items())


def parallel_headline(results: Path) -> str:
    """The whole layer against its peers, in a sentence each."""
    sentences = []
    for count, content in _contents(results).items():
        for key, peer in _PEERS.items():
            ratios = [row[f"over_{key}"] for row in content["rows"] if f"over_{key}" in row]
            if ratios:
                slower = sum(ratio > 1 for ratio in ratios) or "none"
                sentences.append(
                    f"On {count} GPUs the whole layer takes {mean(ratios):.2f} times as long as {peer} "
                    f"(the geometric mean of {len(ratios)} rows, {span(ratios)}); it is slower in {slower} "
                    "of them."
                )
    return paragraph(" ".join(sentences))


def parallel_skewed(results: Path) -> str:
    """The rows whose experts are drawn by Zipf's law."""
    drawn: dict[str, Cell] = {"Zipf": "{zipf}", "max/mean of the GPUs' rows": "{imbalance:.2f}"}
    columns = _LAYER | _GPUS | _TOKENS | drawn | _ALONE | _WHOLE | _OVER
    return _table(_all_rows(results, "skewed"), columns)


def parallel_uneven(results: Path) -> str:
    """The rows with other numbers of tokens on each rank."""
    tokens: dict[str, Cell] = {"tokens of ranks 0, 1, ...": "{uneven}"}
    return _table(_all_rows(results, "uneven"), _LAYER | _GPUS | tokens | _ALONE | _WHOLE | _OVER)


def parallel_growth(results: Path) -> str:
    """The layer's time by the number of GPUs, measured on the most of them."""
    contents = _contents(results)
    rows: list[Row] = contents[max(contents)].get("growth", []) if contents else []
    return compared(rows, {"layer": "layer", "tokens a GPU": "tokens"}, "layer_us", "{last} over {first}")


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
    cells = []
    for tokens in _EXPECTED:
        alone = rows[tokens]["one_gpu_us"]
        links = [sum(link_microseconds(tokens, count)) for count in _COUNTS]
        seen = [of_count[tokens]["layer_us"] for of_count in measured.values()]
        times = [*links, alone, *(alone + fixed + link for link in links), *seen]
        cells.append((tokens, *(f"{us:.0f}" for us in times)))
    columns = (
        "tokens a GPU", *(f"link, {count} GPUs" for count in _COUNTS), "one GPU, the same work: measured",
        *(f"whole layer, {count} GPUs" for count in _COUNTS), *(f"measured on {count}" for count in measured),
    )  # fmt: skip
    return table(columns, cells)


def parallel_overlap(results: Path) -> str:
    """The layer with and without combine under the down GEMM."""
    return _table(read(results, "overlap-h200.json")["rows"], _LAYER | _GPUS | _TOKENS | _OVERLAP)


def other_ranks(num_ranks: int, top_k: int) -> float:
    """How many other ranks a token goes to, on average, if all experts are equally likely."""
    return float((num_ranks - 1) * (1 - (1 - 1 / num_ranks) ** top_k))


def link_microseconds(tokens: int, num_ranks: int) -> tuple[float, float]:
    """The time that the first layer's rows of a GPU's tokens take over NVLink: there in FP8, back in bf16."""
    layer = LAYERS[0]
    rows, h = tokens * other_ranks(num_ranks, layer.top_k), layer.hidden_size
    rate = NVLINK_BYTES_PER_US[num_ranks]
    return rows * (h + h // 128 * 4) / rate, rows * 2 * h / rate


def _table(rows: Sequence[Row], columns: dict[str, Cell]) -> str:
    """The columns for which any row has a value."""
    shown = {name: each for name, each in columns.items() if any(cell(each, row, "-") != "-" for row in rows)}
    return lines(rows, shown, "-")


def _contents(results: Path) -> dict[int, dict[str, Any]]:
    """The results for each number of GPUs, the fewest first."""
    contents = [read(results, file.name) for file in results.glob("parallel-*xh200.json")]
    return dict(sorted((content["about"]["ranks"], content) for content in contents))


def _all_rows(results: Path, section: str) -> list[Row]:
    """A section's rows for all numbers of GPUs, by layer."""
    rows = [row for content in _contents(results).values() for row in content.get(section, [])]
    names = list(dict.fromkeys(row["layer"] for row in rows))
    return sorted(rows, key=lambda row: names.index(row["layer"]))


SECTIONS: dict[str, Section] = {
    function.__name__.replace("_", "-"): function
    for function in (
        parallel_machine, parallel, parallel_headline, parallel_skewed, parallel_uneven, parallel_growth,
        parallel_expected, parallel_overlap,
    )
}  # fmt: skip
