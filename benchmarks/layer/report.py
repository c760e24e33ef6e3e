"""The sections about a layer: its speed, its errors, and how its weights are read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gemm.grouped_gemm import PEAK_TFLOPS
from benchmarks.layer.moe_layer import BANDS
from benchmarks.layer.numerics import by_step
from benchmarks.layer.problem import LAYERS, Layer
from benchmarks.lib.markdown import (
    Cell,
    Row,
    Section,
    about,
    by,
    machine,
    mean,
    paragraph,
    pivot,
    read,
    span,
    table,
    written,
)

LAYER, MODELS, NEWEST = "moe_layer-h200.json", "moe_layer_models-h200.json", "moe_layer_newest-h200.json"
_PEERS = "over_two_gemms", "over_mega_moe"
_DEEP_GEMM = "https://github.com/deepseek-ai/DeepGEMM"
_COLUMNS: dict[str, Cell] = {
    "layer": "{layer}",
    "tokens": "{tokens}",
    "ours": "{us:.1f}",
    "two GEMMs alone": "{two_gemms_us:.1f}",
    "ours over them": "{over_two_gemms:.2f}",
    "Mega MoE": "{mega_moe_us:.1f}",
    "ours over it": "{over_mega_moe:.2f}",
}


def headline(results: Path) -> str:
    """The whole layer against the newest Mega MoE, in a sentence each."""
    content = read(results, NEWEST)
    rows, what = content["rows"], machine(content["about"])
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
    over_gemms = mean(row["over_two_gemms"] for row in rows)
    return paragraph(
        f"On one {what['gpu']}, a whole MoE layer runs **{mean(speeds):.2f} times as "
        f"fast as SM90 Mega MoE of [DeepGEMM]({_DEEP_GEMM}) {what['deep_gemm']}**, and "
        f"{1 / over_gemms:.2f} times as fast as its two grouped GEMMs alone. These are "
        f"geometric means of {len(rows)} cases: {', '.join(sizes)}; {min(tokens)} to {max(tokens)} tokens. "
        f"Against Mega MoE they range from {span(speeds)} times; slower: {', '.join(cases) or 'none'}."
    )


def layer_around(results: Path) -> str:
    """The share of permuting and the weighted sum in long steps."""
    content = read(results, LAYER)
    long = [row for row in content["rows"] if row["tokens"] >= 1024]
    shares = [(row["stages_us"]["quantize"] + row["stages_us"]["combine"]) / row["us"] for row in long]
    sizes = {layer.name: layer for layer in LAYERS}
    rates = [
        moved / row["stages_us"][stage] / 1e6 / content["about"]["copy_tbps"]
        for row in long
        for stage, moved in _moved(sizes[row["layer"]], row["tokens"]).items()
    ]
    taken, rate = (f"{100 * min(each):.0f} to {100 * max(each):.0f}%" for each in (shares, rates))
    return paragraph(
        "From 1024 tokens on, writing each token's permuted rows and the weighted sum take "
        f"{taken} of the whole, at {rate} of the copy's bandwidth."
    )


def layer_models(results: Path) -> str:
    """A line for each layer, a cell for each number of tokens."""
    rows = read(results, MODELS)["rows"]
    tokens = [number for (number,) in by(rows, "tokens")]

    def shown(row: Row) -> str:
        return f"{row['us']:.1f} ({', '.join(f'{row[key]:.2f}' for key in _PEERS if key in row)})"

    cells = pivot(rows, ["layer"], ["tokens"], shown)
    return table(("layer", *(f"{number} token{'s' if number > 1 else ''}" for number in tokens)), cells)


def layer_peers(results: Path) -> str:
    """Our time over the floor and over the other layers, by band of tokens; and these layers' versions."""
    content = read(results, LAYER)
    rows, described = content["rows"], content["about"].get("peers", {})
    names = list(dict.fromkeys(name for row in rows for name in row.get("peers_us", {})))
    if not names:
        return ""

    def over(name: str, rows: list[Row]) -> str:
        found = [row["us"] / row["peers_us"][name] for row in rows if name in row.get("peers_us", {})]
        return _spread(found)

    bands = {name: [row for row in rows if row["tokens"] in band] for name, band in BANDS.items()}
    cells = [
        (
            band,
            _spread([over_floor(content["about"], row) for row in of]),
            *(over(name, of) for name in names),
        )
        for band, of in {**bands, "all": rows}.items()
        if of
    ]
    said = []
    for name in names:
        tuned = described[name].get("tuned")
        of_layers = "" if tuned is None else f", tuned for {', '.join(tuned) or 'none of these layers'}"
        said.append(f"{name}: {described[name]['version']}{of_layers}")
    return f"{table(('tokens', 'the floor', *names), cells)}\n\n{paragraph('; '.join(said) + '.')}"


def router(results: Path) -> str:
    """The time that a router in front adds."""
    rows = read(results, LAYER)["router"]
    times = [("µs more", *(f"{row['router_us']:.1f}" for row in rows))]
    return table(("tokens", *(str(row["tokens"]) for row in rows)), times)


def cpu_layer(results: Path) -> str:
    """Our time over the better of transformers', over all families, by band of tokens."""
    runs = [read(results, f"cpu_layer{name}.json")["rows"] for name in ("", "-same_input")]
    cells = []
    for first, last in ((1, 64), (128, 512), (1024, 2048)):
        ratios = ([row["ratio"] for row in rows if first <= row["tokens"] <= last] for rows in runs)
        cells.append((f"{first} to {last}", *map(_spread, ratios)))
    return table(("tokens", "new hidden states in every turn", "the same (`--same-input`)"), cells)


def numerics_machine(results: Path) -> str:
    """The machines, versions and layer of the error measurements."""
    on_cpu, on_h200 = (read(results, f"{name}.json")["about"] for name in ("numerics", "numerics-h200"))
    return paragraph(
        f"{on_cpu['cpu']}, torch {on_cpu['torch']}, transformers {on_cpu['transformers']}; the row on "
        f"Hopper: {on_h200['gpu']}, torch {on_h200['torch']}. The layer: {on_cpu['layer']}; {on_cpu['data']}."
    )


def numerics(results: Path) -> str:
    """The error of every step, by family; one step was measured on a GPU."""
    on_cpu, on_h200 = (read(results, f"{name}.json")["rows"] for name in ("numerics", "numerics-h200"))
    lines = by_step(on_cpu)
    before = [line[0] for line in lines].index("expertd, Hopper's steps in PyTorch")
    lines[before + 1 : before + 1] = [line for line in by_step(on_h200) if line[0] == "expertd on Hopper"]
    return table(("step", *(row["family"] for row in on_cpu)), lines)


def weights_machine(results: Path) -> str:
    """The machines, storages and versions of all results."""
    return "\n\n".join(paragraph(_storage(content["about"])) for content in _weights(results))


def weights(results: Path) -> str:
    """GB/s of each way, one table for each result."""
    text = "{GB/s:.2f} ({low:.2f} to {high:.2f}), {cpu:.1f}"
    tables = []
    for content in _weights(results):
        sizes = dict.fromkeys(row["sizes"] for row in content["rows"])
        cases = [(size, cache) for size in sizes for cache in ("cold", "warm")]
        rows = [row for row in content["rows"] if row["way"] not in _DIRECT]
        cells = pivot(rows, ["way"], ["sizes", "cache"], text, order=cases)
        tables.append(table(("GB/s, s of processor", *map(", ".join, cases)), cells))
    return "\n\n".join(tables)


def over_floor(about: dict[str, Any], row: Row) -> float:
    """A row's time over the longer of reading the activated experts and of multiplying."""
    (found,) = (layer for layer in LAYERS if layer.name == row["layer"])
    weights = 3 * found.intermediate_size * found.hidden_size
    reading = row["activated_experts"] * weights / about["copy_tbps"] / 1e6
    multiplying = 2 * weights * row["tokens"] * found.top_k / PEAK_TFLOPS / 1e6
    return float(row["us"] / max(reading, multiplying))


def _spread(ratios: Sequence[float]) -> str:
    """Their geometric mean, and the least and the most."""
    return f"{mean(ratios):.2f} ({span(ratios)})" if ratios else ""


def _moved(layer: Layer, tokens: int) -> dict[str, int]:
    """Bytes that the stages around the GEMMs read and write: bf16 tokens, FP8 rows with scales, bf16 rows."""
    pairs, h = tokens * layer.top_k, layer.hidden_size
    return {
        "quantize": 2 * tokens * h + pairs * (h + h // 128 * 4),
        "combine": 2 * pairs * h + 2 * tokens * h,
    }


def _weights(results: Path) -> list[dict[str, Any]]:
    return [read(results, file.name) for file in sorted(results.glob("weights-*.json"))]


_DIRECT = "around the page cache", "dd iflag=direct"  # tried, and not used


def _storage(about: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    device = "to the CPU" if about["device"] == "cpu" else f"to an {about['device']}"
    return f"{about['machine']}, {about['storage']}, {device}; {versions}; {about['rounds']} rounds."


_STORE = "expert_store-h200.json"
_STORE_COLUMNS = {
    "step": "{case}",
    "tokens": "{tokens}",
    "in slots": "{hit_rate:.2f}",
    "copied, MB": "{missed_mb:.0f}",
    "a layer, µs": "{us:.0f}",
    "copies alone": "{copies_us:.0f}",
    "all on the GPU": "{resident_us:.0f}",
    "in a CUDA graph": "{graph_us:.0f}",
}
_STORE_STEPS = {
    "step": "{case}",
    "tokens": "{tokens}",
    "copied, MB": "{step_missed_mb:.0f}",
    "a served step, µs": "{step_us:.0f}",
    "all on the GPU": "{resident_step_us:.0f}",
    "its graph alone": "{slots_graph_us:.1f}",
    "that of all on the GPU": "{graph_us:.1f}",
}
_MACHINE = "{gpu}, driver {driver}, NVRTC {nvrtc}, torch {torch}; a copy moved {copy_tbps:.2f} TB/s; "
_PEER = "DeepGEMM: sgl-deep-gemm {deep_gemm}"
SECTIONS: dict[str, Section] = {
    "layer-newest-machine": about(
        NEWEST, "{gpu}; a copy moved {copy_tbps:.2f} TB/s; " + _PEER + "; this project at {commit}."
    ),
    "layer-newest": written(NEWEST, _COLUMNS, missing="-"),
    "layer-machine": about(LAYER, f"{_MACHINE}{_PEER}."),
    "layer-models-machine": about(MODELS, f"{_MACHINE}{_PEER}."),
    "layer-models": layer_models,
    "layer-around": layer_around,
    "layer-peers": layer_peers,
    "router": router,
    "cpu-layer-machine": about("cpu_layer.json", "{machine}; {versions}; {layer}."),
    "cpu-layer": cpu_layer,
    "numerics-machine": numerics_machine,
    "numerics": numerics,
    "expert-store-machine": about(
        _STORE,
        "{gpu}, driver {driver}, torch {torch}; copies at {copy_gbps:.1f} GB/s; {slots} slots a layer.",
    ),
    "expert-store": written(_STORE, _STORE_COLUMNS),
    "expert-store-steps": written("expert_store_steps-h200.json", _STORE_STEPS, missing="-"),
    "expert-store-triton": written("expert_store_triton-h200.json", _STORE_COLUMNS),
    "weights-machine": weights_machine,
    "weights": weights,
}
