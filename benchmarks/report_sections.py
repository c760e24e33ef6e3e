"""Writes benchmarks/results as Markdown: one function for each section of the documents."""

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gemm.grouped_gemm import PEAK_TFLOPS
from benchmarks.gemm.sweep_sections import (
    gemm_sweep,
    gemm_sweep_machine,
    gemm_sweep_worst,
    grouped_gemm_peers,
    grouped_gemm_power,
    grouped_gemm_power_cold,
)
from benchmarks.layer.moe_layer import BANDS, means
from benchmarks.layer.peer_sections import layer_peers
from benchmarks.layer.problem import LAYERS, Layer
from benchmarks.layer.weights_sections import weights, weights_machine
from benchmarks.lib.markdown import paragraph, percent, span, table
from benchmarks.ranks.parallel_sections import (
    parallel,
    parallel_expected,
    parallel_growth,
    parallel_headline,
    parallel_machine,
    parallel_overlap,
    parallel_skewed,
    parallel_uneven,
)
from benchmarks.serving.lanes_sections import lanes, lanes_machine
from benchmarks.serving.open_loop_sections import (
    beside,
    beside_machine,
    fuzz,
    open_loop,
    open_loop_machine,
    soak,
    soak_gpu,
    soak_gpu_machine,
    soak_machine,
    timeouts,
    timeouts_machine,
)
from benchmarks.serving.serving_ranks_sections import serving_ranks, serving_ranks_callers
from benchmarks.serving.serving_sections import (
    ping_pong,
    serving,
    serving_callers,
    serving_cpu,
    serving_cpu_machine,
    serving_headline,
    serving_machine,
    serving_workers,
    steps,
)

_PEERS = {"over_two_gemms": "DeepGEMM's two GEMMs alone", "over_mega_moe": "SM90 Mega MoE"}
_NEWEST = "moe_layer_newest-h200.json"
_DEEP_GEMM = "https://github.com/deepseek-ai/DeepGEMM"
Section = Callable[[Path], str]


def headline(results: Path) -> str:
    """The whole layer against the newest Mega MoE, in a sentence each."""
    about, rows = _layer(results, _NEWEST)
    speeds = [1 / row["over_mega_moe"] for row in rows]
    slower: dict[str, list[str]] = {}
    for row in rows:
        if row["over_mega_moe"] > 1:
            slower.setdefault(row["layer"], []).append(str(row["tokens"]))
    cases = [f"{name} at {' and '.join(tokens)} tokens" for name, tokens in slower.items()]
    tokens, names = [row["tokens"] for row in rows], {row["layer"] for row in rows}
    sizes = [
        f"{layer.name} with {layer.num_experts} experts of {layer.hidden_size} x {layer.intermediate_size}"
        for layer in LAYERS
        if layer.name in names
    ]
    return paragraph(
        f"On one {_gpu(about)}, a whole MoE layer runs **{statistics.geometric_mean(speeds):.2f} times as "
        f"fast as SM90 Mega MoE of [DeepGEMM]({_DEEP_GEMM}) {about['deep_gemm']}**, and "
        f"{1 / _mean(rows, 'over_two_gemms'):.2f} times as fast as its two grouped GEMMs alone. These are "
        f"geometric means of {len(rows)} cases: {', '.join(sizes)}; {min(tokens)} to {max(tokens)} tokens. "
        f"Against Mega MoE they range from {span(speeds)} times; slower: {', '.join(cases) or 'none'}."
    )


def layer_newest_machine(results: Path) -> str:
    """The machine and versions of the measurement beside the newest DeepGEMM."""
    about, _ = _layer(results, _NEWEST)
    return paragraph(
        f"{_gpu(about)}; a copy moved {about['copy_tbps']:.2f} TB/s; DeepGEMM: sgl-deep-gemm "
        f"{about['deep_gemm']}; this project at {about['commit']}."
    )


def layer_newest(results: Path) -> str:
    """Every row of the measurement beside the newest DeepGEMM."""
    return _layer_table(_layer(results, _NEWEST)[1])


def layer_machine(results: Path) -> str:
    """The machine and versions of the layer's benchmark."""
    about, _ = _layer(results)
    return paragraph(f"{_machine(about)}; DeepGEMM: sgl-deep-gemm {about['deep_gemm']}.")


def layer(results: Path) -> str:
    """Every row of the layer's benchmark, with its time over the shortest possible one."""
    about, rows = _layer(results)
    return _layer_table([row | {"over_floor": _over_floor(about, row)} for row in rows])


def layer_models_machine(results: Path) -> str:
    """The machine and versions of the further models' benchmark."""
    about, _ = _layer(results, "moe_layer_models-h200.json")
    return paragraph(f"{_machine(about)}; DeepGEMM: sgl-deep-gemm {about['deep_gemm']}.")


def layer_models(results: Path) -> str:
    """Every row of the further models' benchmark."""
    return _layer_table(_layer(results, "moe_layer_models-h200.json")[1])


def layer_means(results: Path) -> str:
    """The layer's ratios as geometric means over bands of tokens."""
    _, rows = _layer(results)
    cells = [
        (name, *(f"{mean:.2f}" for mean in means(rows, key).values()), f"{_mean(rows, key):.2f}")
        for key, name in _PEERS.items()
    ]
    return table(("ours over", *(f"{band} tokens" for band in BANDS), "all"), cells)


def layer_around(results: Path) -> str:
    """The share of permuting and the weighted sum in long steps."""
    about, rows = _layer(results)
    long = [row for row in rows if row["tokens"] >= 1024]
    shares = [(row["stages_us"]["quantize"] + row["stages_us"]["combine"]) / row["us"] for row in long]
    sizes = {layer.name: layer for layer in LAYERS}
    rates = [
        moved / row["stages_us"][stage] / 1e6 / about["copy_tbps"]
        for row in long
        for stage, moved in _moved(sizes[row["layer"]], row["tokens"]).items()
    ]
    return paragraph(
        "From 1024 tokens on, writing each token's permuted rows and the weighted sum take "
        f"{percent(shares)} of the whole, at {percent(rates)} of the copy's bandwidth."
    )


def router(results: Path) -> str:
    """The time that a router in front adds."""
    content = json.loads((results / "moe_layer-h200.json").read_text())
    rows = content["router"]
    return table(
        ("tokens", *(str(row["tokens"]) for row in rows)),
        [("µs more", *(f"{row['router_us']:.1f}" for row in rows))],
    )


def grouped_gemm_machine(results: Path) -> str:
    """The machine and versions of the grouped GEMM benchmark."""
    about = json.loads((results / "grouped_gemm-h200.json").read_text())["about"]
    return paragraph(
        f"{_machine(about)}; cuBLAS FP8 reached {about['cublas_fp8_tflops']:.0f} TFLOPS in the same run."
    )


def grouped_gemm(results: Path) -> str:
    """The grouped GEMMs, by band of shapes."""
    rows = json.loads((results / "grouped_gemm-h200.json").read_text())["rows"]
    cells = []
    for band in dict.fromkeys(row["band"] for row in rows):
        of_band = [row for row in rows if row["band"] == band]
        speeds = [row["speed"] for row in of_band]
        cells.append(
            (
                band, len(of_band), f"{_mean(of_band, 'speed'):.2f}", span(speeds),
                f"{_mean(of_band, 'over_floor'):.2f}",
                f"{max(row['tflops'] for row in of_band):.0f}", f"{max(row['tbps'] for row in of_band):.2f}",
            )
        )  # fmt: skip
    columns = (
        "band", "shapes", "speed, geometric mean", "worst to best", "time over the floor", "best TFLOPS",
        "best TB/s",
    )  # fmt: skip
    return table(columns, cells)


def host_cost(results: Path) -> str:
    """The host's time for a call."""
    rows = json.loads((results / "host_cost-h200.json").read_text())["rows"]
    cases = [(tensors, out) for tensors in ("reused", "fresh") for out in ("given", "allocated")]
    cells = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = {(row["tensors"], row["out"]): f"{row['us']:.1f}" for row in rows if row["shape"] == shape}
        cells.append((shape, *(of_shape[case] for case in cases)))
    return table(("µs a call", *(f"{tensors}, `out` {out}" for tensors, out in cases)), cells)


def sm_counts(results: Path) -> str:
    """The scaling of time with the number of SMs."""
    rows = json.loads((results / "sm_counts-h200.json").read_text())["rows"]
    cells = []
    for count in dict.fromkeys(row["num_sms"] for row in rows):
        of_count = [row for row in rows if row["num_sms"] == count]
        ratios = [row["ratio"] for row in of_count]
        cells.append((count, len(ratios), f"{_mean(of_count, 'ratio'):.2f}", span(ratios)))
    return table(("SMs", "shapes", "time, with 1 for inverse to SMs: geometric mean", "least to most"), cells)


def cpu_layer_machine(results: Path) -> str:
    """The machine, versions and method of the layer's benchmark on a CPU."""
    header = json.loads((results / "cpu_layer.json").read_text())["header"]
    return paragraph(f"{header['machine']}; {header['versions']}; {header['layer']}.")


def cpu_layer(results: Path) -> str:
    """Our time over the better of transformers', by tokens and family; new hidden states in every turn."""
    return _cpu_layer(results / "cpu_layer.json")


def cpu_layer_same_input(results: Path) -> str:
    """As `cpu_layer`, with the same hidden states in every turn."""
    return _cpu_layer(results / "cpu_layer-same_input.json")


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


def numerics_machine(results: Path) -> str:
    """The machines, versions and layer of the error measurements."""
    on_cpu, on_h200 = (_numerics(results, name)["header"] for name in ("numerics", "numerics-h200"))
    return paragraph(
        f"{on_cpu['cpu']}, torch {on_cpu['torch']}, transformers {on_cpu['transformers']}; the row on "
        f"Hopper: {on_h200['gpu']}, torch {on_h200['torch']}. The layer: {on_cpu['layer']}; {on_cpu['data']}."
    )


def numerics(results: Path) -> str:
    """The error of every step, by family."""
    families, on_h200 = (_numerics(results, name)["families"] for name in ("numerics", "numerics-h200"))
    hopper = "expertd on Hopper"
    steps = list(next(iter(families.values())))
    steps.insert(steps.index("expertd, Hopper's steps in PyTorch") + 1, hopper)
    cells = [
        (
            step,
            *(
                f"{(on_h200[name] if step == hopper else figures)[step]:.2f}"
                for name, figures in families.items()
            ),
        )
        for step in steps
    ]
    return table(("step", *families), cells)


SECTIONS: dict[str, Section] = {
    function.__name__.replace("_", "-"): function
    for function in (
        headline, layer_newest_machine, layer_newest, layer_machine, layer,
        layer_models_machine, layer_models, layer_means, layer_around,
        layer_peers, router, grouped_gemm_machine, grouped_gemm, grouped_gemm_peers, grouped_gemm_power,
        grouped_gemm_power_cold, gemm_sweep_machine, gemm_sweep, gemm_sweep_worst, host_cost, sm_counts,
        cpu_layer_machine, cpu_layer, cpu_layer_same_input, layouts, numerics_machine, numerics,
        serving_headline, serving_machine, serving, serving_callers, serving_workers, steps, ping_pong,
        serving_cpu, serving_cpu_machine, serving_ranks, serving_ranks_callers, parallel_machine, parallel,
        parallel_headline, parallel_skewed, parallel_uneven, parallel_growth, parallel_expected,
        parallel_overlap, lanes_machine, lanes, open_loop, open_loop_machine, soak, soak_machine,
        soak_gpu, soak_gpu_machine, timeouts, timeouts_machine, beside, beside_machine, fuzz, weights,
        weights_machine,
    )
}  # fmt: skip
"""Section functions, by the name in the documents' markers."""


def _layer(results: Path, name: str = "moe_layer-h200.json") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = json.loads((results / name).read_text())
    return content["about"], content["rows"]


def _layer_table(rows: list[dict[str, Any]]) -> str:
    columns = ["layer", "tokens", "ours", "two GEMMs alone", "ours over them", "Mega MoE", "ours over it"]
    keys = {"us": 1, "two_gemms_us": 1, "over_two_gemms": 2, "mega_moe_us": 1, "over_mega_moe": 2}
    if "over_floor" in rows[0]:
        columns.append("over the floor")
        keys["over_floor"] = 2
    cells = [
        (
            row["layer"],
            row["tokens"],
            *(f"{row[key]:.{digits}f}" if key in row else "-" for key, digits in keys.items()),
        )
        for row in rows
    ]
    return table(columns, cells)


def _numerics(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())


def _cpu_layer(result: Path) -> str:
    families = json.loads(result.read_text())["families"]
    ratios = {name: {row["tokens"]: row["ratio"] for row in rows} for name, rows in families.items()}
    tokens = next(iter(ratios.values()))
    cells = [(count, *(f"{of_family[count]:.2f}" for of_family in ratios.values())) for count in tokens]
    return table(("tokens", *families), cells)


def _over_floor(about: dict[str, Any], row: dict[str, Any]) -> float:
    """A row's time over the longer of reading the activated experts and of multiplying."""
    (layer,) = (layer for layer in LAYERS if layer.name == row["layer"])
    weights = 3 * layer.intermediate_size * layer.hidden_size
    reading = row["activated_experts"] * weights / about["copy_tbps"] / 1e6
    multiplying = 2 * weights * row["tokens"] * layer.top_k / PEAK_TFLOPS / 1e6
    return float(row["us"] / max(reading, multiplying))


def _moved(layer: Layer, tokens: int) -> dict[str, int]:
    """Bytes that the stages around the GEMMs read and write: bf16 tokens, FP8 rows with scales, bf16 rows."""
    pairs, h = tokens * layer.top_k, layer.hidden_size
    return {
        "quantize": 2 * tokens * h + pairs * (h + h // 128 * 4),
        "combine": 2 * pairs * h + 2 * tokens * h,
    }


def _machine(about: dict[str, Any]) -> str:
    _, driver, *_ = str(about["gpu"]).split(", ")
    return (
        f"{_gpu(about)}, driver {driver}, NVRTC {about['nvrtc']}, torch {about['torch']}; "
        f"a copy moved {about['copy_tbps']:.2f} TB/s"
    )


def _gpu(about: dict[str, Any]) -> str:
    return str(about["gpu"]).split(",")[0]


def _mean(rows: Iterable[dict[str, Any]], key: str) -> float:
    return statistics.geometric_mean(row[key] for row in rows)
