"""Writes the results of `benchmarks parallel` as Markdown."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.layer.problem import LAYERS
from benchmarks.lib.markdown import paragraph, span, table

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], object]]
NOT_MEASURED = "Not measured yet."
# Each way, by the number of GPUs: measured, of 450e3 by name; for eight assumed.
NVLINK_BYTES_PER_US = {2: 370e3, 4: 345e3, 8: 345e3}


def parallel_machine(results: Path) -> str:
    """The machine and versions, for each number of GPUs."""
    counts: dict[str, list[str]] = {}
    for count, content in _contents(results).items():
        about = content["about"]
        name, driver = about["gpu"].split("\n")[0].split(", ")[:2]
        versions = [f"{label} {about[key]}" for key, label in _VERSIONS.items() if key in about]
        counts.setdefault(f"{name}, driver {driver}, {', '.join(versions)}", []).append(str(count))
    return paragraph(" ".join(f"{' and '.join(of)} GPUs of one host: {what}." for what, of in counts.items()))


def parallel(results: Path) -> str:
    """Every row, in a table for each number of GPUs."""
    return "\n\n".join(
        f"{count} GPUs:\n\n" + _table(content["rows"], [_LAYER, _TOKENS, *_TIMES])
        for count, content in _contents(results).items()
    )


def parallel_headline(results: Path) -> str:
    """The whole layer against its peers, in a sentence each."""
    sentences = []
    for count, content in _contents(results).items():
        for key, peer in _PEERS.items():
            ratios = [row[f"over_{key}"] for row in content["rows"] if f"over_{key}" in row]
            if ratios:
                slower = sum(ratio > 1 for ratio in ratios) or "none"
                mean = f"{statistics.geometric_mean(ratios):.2f} times as long as {peer}"
                sentences.append(
                    f"On {count} GPUs the whole layer takes {mean} (the geometric mean of {len(ratios)} "
                    f"rows, {span(ratios)}); it is slower in {slower} of them."
                )
    return paragraph(" ".join(sentences))


def parallel_skewed(results: Path) -> str:
    """The rows whose experts are drawn by Zipf's law."""
    columns = [_LAYER, _GPUS, _TOKENS, ("Zipf", _number("zipf")), _IMBALANCE, *_TIMES_BRIEF]
    return _table(_all_rows(results, "skewed"), columns)


def parallel_uneven(results: Path) -> str:
    """The rows with other numbers of tokens on each rank."""
    columns = [_LAYER, _GPUS, ("tokens of ranks 0, 1, ...", _number("uneven")), *_TIMES_BRIEF]
    return _table(_all_rows(results, "uneven"), columns)


def parallel_growth(results: Path) -> str:
    """The layer's time by the number of GPUs, measured on the most of them."""
    rows = growth(results)
    counts = sorted({row["gpus"] for row in rows})
    times = {(row["layer"], row["tokens"], row["gpus"]): row["layer_us"] for row in rows}
    cases = list(dict.fromkeys((row["layer"], row["tokens"]) for row in rows))
    if not cases:
        return NOT_MEASURED
    cells = []
    for case in cases:
        of_case = [times.get((*case, count)) for count in counts]
        first, last = of_case[0], of_case[-1]
        ratio = "-" if first is None or last is None else f"{last / first:.2f}"
        cells.append((*case, *("-" if us is None else f"{us:.0f}" for us in of_case), ratio))
    names = [f"{count} GPU{'s' if count > 1 else ''}" for count in counts]
    return table(("layer", "tokens a GPU", *names, f"{counts[-1]} over {counts[0]}"), cells)


def parallel_expected(results: Path) -> str:
    """The layer's time on more GPUs by arithmetic, and on those that were measured beside it."""
    name = LAYERS[0].name
    measured = {
        count: {row["tokens"]: row for row in content["rows"] if row["layer"] == name}
        for count, content in _contents(results).items()
    }
    rows = measured[min(measured)]
    if not all({1, *_EXPECTED} <= of_count.keys() for of_count in measured.values()):
        return NOT_MEASURED
    fixed = rows[1]["layer_us"] - rows[1]["one_gpu_us"]
    cells = []
    for tokens in _EXPECTED:
        alone = rows[tokens]["one_gpu_us"]
        links = [sum(link_microseconds(tokens, count)) for count in _COUNTS]
        times = [f"{alone + fixed + link:.0f}" for link in links]
        seen = [f"{of_count[tokens]['layer_us']:.0f}" for of_count in measured.values()]
        cells.append((tokens, *(f"{link:.0f}" for link in links), f"{alone:.0f}", *times, *seen))
    columns = (
        "tokens a GPU", *(f"link, {count} GPUs" for count in _COUNTS), "one GPU, the same work: measured",
        *(f"whole layer, {count} GPUs" for count in _COUNTS), *(f"measured on {count}" for count in measured),
    )  # fmt: skip
    return table(columns, cells)


def parallel_overlap(results: Path) -> str:
    """The layer with and without combine under the down GEMM."""
    file = results / "overlap-h200.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return _table(rows, [_LAYER, _GPUS, _TOKENS, *_OVERLAP])


def growth(results: Path) -> list[Row]:
    """The layer's rows by the number of GPUs, measured on the most of them."""
    contents = _contents(results)
    rows: list[Row] = contents[max(contents)].get("growth", [])
    return rows


def other_ranks(num_ranks: int, top_k: int) -> float:
    """How many other ranks a token goes to, on average, if all experts are equally likely."""
    return float((num_ranks - 1) * (1 - (1 - 1 / num_ranks) ** top_k))


def link_microseconds(tokens: int, num_ranks: int) -> tuple[float, float]:
    """The time that the first layer's rows of a GPU's tokens take over NVLink: there in FP8, back in bf16."""
    layer = LAYERS[0]
    rows, h = tokens * other_ranks(num_ranks, layer.top_k), layer.hidden_size
    rate = NVLINK_BYTES_PER_US[num_ranks]
    return rows * (h + h // 128 * 4) / rate, rows * 2 * h / rate


def _number(key: str, digits: int = -1) -> Callable[[Row], object]:
    """The value of a row, rounded; None: it has none."""

    def value(row: Row) -> object:
        found = row.get(key)
        return found if found is None or digits < 0 else f"{found:.{digits}f}"

    return value


_VERSIONS = {"nvrtc": "NVRTC", "torch": "torch", "nccl": "NCCL", "deep_gemm": "DeepGEMM: sgl-deep-gemm"}
_PEERS = {"two_gemms": "DeepGEMM's two GEMMs alone", "mega_moe": "SM90 Mega MoE"}
_COUNTS, _EXPECTED = (2, 4, 8), (128, 1024, 4096)  # GPUs, and tokens of each
_LAYER: Column = "layer", _number("layer")
_GPUS: Column = "GPUs", _number("gpus")
_TOKENS: Column = "tokens a GPU", _number("tokens")
_IMBALANCE: Column = "max/mean of the GPUs' rows", _number("imbalance", 2)
_BRIEF = {"dispatch and combine alone", "one GPU, the same work", "whole layer", "whole layer over Mega MoE"}
_TIMES: Sequence[Column] = (
    ("dispatch and combine alone", _number("exchange_us", 0)),
    ("in a row", _number("exchange_next_us", 0)),
    ("by NCCL", _number("nccl_us", 0)),
    ("one GPU, the same work", _number("one_gpu_us", 0)),
    ("whole layer", _number("layer_us", 0)),
    ("whole layer over two GEMMs", _number("over_two_gemms", 2)),
    ("whole layer over Mega MoE", _number("over_mega_moe", 2)),
)
_TIMES_BRIEF = [column for column in _TIMES if column[0] in _BRIEF]
_OVERLAP: Sequence[Column] = (
    ("SMs for communication", _number("communication_sms")),
    ("dispatch and combine alone", _number("exchange_us", 0)),
    ("one GPU, the same work", _number("one_gpu_us", 0)),
    ("whole layer", _number("layer_us", 0)),
    ("overlapped", _number("overlapped_us", 0)),
    ("exposed without", lambda row: f"{100 * row['exposed_without']:.0f}%"),
    ("exposed", lambda row: f"{100 * row['exposed']:.0f}%"),
)


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The columns for which any row has a value."""
    if not rows:
        return NOT_MEASURED
    shown = [(name, value) for name, value in columns if any(value(row) is not None for row in rows)]
    cells = [["-" if (cell := value(row)) is None else cell for _, value in shown] for row in rows]
    return table([name for name, _ in shown], cells)


def _contents(results: Path) -> dict[int, dict[str, Any]]:
    """The results for each number of GPUs, the fewest first."""
    contents = [json.loads(file.read_text()) for file in results.glob("parallel-*xh200.json")]
    return dict(sorted((content["about"]["ranks"], content) for content in contents))


def _all_rows(results: Path, section: str) -> list[Row]:
    """A section's rows for all numbers of GPUs, by layer."""
    rows = [row for content in _contents(results).values() for row in content.get(section, [])]
    names = list(dict.fromkeys(row["layer"] for row in rows))
    return sorted(rows, key=lambda row: names.index(row["layer"]))
