"""Draws pictures of results; `python -m benchmarks.report --pictures` draws those in the documents."""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from benchmarks.engines.engines import LOCAL
from benchmarks.gemm import heat_map
from benchmarks.gemm.grouped_gemm import PEAK_TFLOPS
from benchmarks.layer.moe_layer import STAGES

OURS, THEIRS, ROOF = "#0b6e4f", "#c1666b", "#555555"
COLOURS = dict(zip(STAGES, ("#f2c14e", "#f78154", "#0b6e4f", "#5fad56", "#4d9078"), strict=True))
LANES = "all SMs", "gemms", "communication"
LAUNCH_COLOURS = {
    "permutation": "#f2c14e", "dispatch": "#f78154", "gate/up GEMM": "#0b6e4f", "down GEMM": "#5fad56",
    "combine": "#3d5a80",
}  # fmt: skip
MARK = "#555555"
Draw = Callable[[Path, Path], None]
SERVING_STYLES = {
    ("http", None): "o-C3", ("shared memory", None): "s--C0", ("shared memory", "cuda:0"): "^--C1",
    ("channel", None): "s-C0", ("channel", "cuda:0"): "^-C1", ("channel", "cuda:1"): "v-C2",
}  # fmt: skip
OUTCOME_COLOURS = {"in time": "#3b76af", "refused": "#c8c8c8", "late": "#c44e52"}
LANES_STYLES = {"turns": "o-C3", "joined": "s-C1", "lanes": "^-C2", "no server": "x:C7"}
"""Markers by the first word of a way."""
_MEMORIES = {None: "the host", "cuda:0": "the server's GPU", "cuda:1": "another GPU"}


def picture(of: Callable[[dict[str, Any]], Any]) -> Draw:
    """Draws a result, by a function of its content, as SVG; the same result gives the same file."""

    @functools.wraps(of)
    def draw(result: Path, picture: Path) -> None:
        figure = of(json.loads(result.read_text()))
        with mpl.rc_context({"svg.hashsalt": "expertd"}):
            figure.savefig(picture, format="svg", metadata={"Date": None, "Source": digest(result)})
        plt.close(figure)

    return draw


@picture
def draw_speed(content: dict[str, Any]) -> Any:
    """A panel for each layer: its time over Mega MoE's by tokens, and that of the two GEMMs alone."""
    layers = list(dict.fromkeys(row["layer"] for row in content["rows"]))
    figure, panels = plt.subplots(
        1, len(layers), figsize=(9, 3), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, layer in zip(panels[0], layers, strict=True):
        rows = [row for row in content["rows"] if row["layer"] == layer]
        places = range(len(rows))
        ours = [row["over_mega_moe"] for row in rows]
        bare = [row["two_gemms_us"] / row["mega_moe_us"] for row in rows]
        axes.bar(places, ours, width=0.7, color=OURS, label="expertd, the whole layer")
        axes.scatter(
            places, bare, marker="_", s=260, color="#f2c14e", zorder=3, label="DeepGEMM's two GEMMs alone"
        )
        axes.axhline(1, color=THEIRS, linewidth=1.5, label="DeepGEMM's SM90 Mega MoE = 1")
        for place, over in zip(places, ours, strict=True):
            axes.annotate(f"{over:.2f}", (place, 0.03), color="white", fontsize=8, ha="center")
        axes.set_xticks(places, [str(row["tokens"]) for row in rows], fontsize=8)
        axes.set_title(layer, fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
    panels[0][0].set_ylabel("time over Mega MoE's", fontsize=8)
    version = content["about"]["deep_gemm"]
    title = f"A whole MoE layer on one {_gpu(content)}, DeepGEMM {version}, lower is faster"
    figure.suptitle(title, fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    return figure


@picture
def draw_stages(content: dict[str, Any]) -> Any:
    """A bar for every layer and number of tokens, divided into stages.

    Stages are relative to the time of DeepGEMM's two GEMMs alone on the same rows, or, if the result does not
    have DeepGEMM, to the whole layer's.
    """
    rows = content["rows"]
    figure, axes = plt.subplots(figsize=(8, 0.5 + 0.28 * len(rows)), layout="constrained")
    beside_peer = all("two_gemms_us" in row for row in rows)
    whole = [row["two_gemms_us" if beside_peer else "us"] for row in rows]
    left = [0.0] * len(rows)
    places = range(len(rows))
    for stage, colour in COLOURS.items():
        shares = [row["stages_us"][stage] / of for row, of in zip(rows, whole, strict=True)]
        axes.barh(places, shares, left=left, color=colour, label=stage, height=0.7)
        left = [begin + share for begin, share in zip(left, shares, strict=True)]
    if beside_peer:
        axes.axvline(1, color=MARK, linewidth=1)
    axes.set_yticks(places, [f"{row['layer']}, {row['tokens']}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    measure = "that of DeepGEMM's two GEMMs alone" if beside_peer else "the whole layer's"
    axes.set_xlabel(f"time over {measure}", fontsize=9)
    axes.set_title(f"Stages of a layer by tokens, {_gpu(content)}", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=len(STAGES), loc="upper center", bbox_to_anchor=(0.5, -0.08))
    return figure


@picture
def draw_roofline(content: dict[str, Any]) -> Any:
    """TFLOPS over operations per byte of grouped GEMMs, ours and DeepGEMM's, under the machine's limits."""
    rows, bandwidth = content["rows"], content["about"]["copy_tbps"]
    intensity = [row["tflops"] / row["tbps"] for row in rows]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    knee = PEAK_TFLOPS / bandwidth
    ends = [min(intensity) / 1.3, knee, max(intensity) * 1.3]
    axes.plot(ends, [min(x * bandwidth, PEAK_TFLOPS) for x in ends], color=ROOF, linewidth=1)
    axes.annotate(
        f"{bandwidth:.2f} TB/s", (knee / 4, knee / 4 * bandwidth * 1.35), color=ROOF, fontsize=8, ha="right"
    )
    axes.annotate(f"{PEAK_TFLOPS:.0f} TFLOPS", (knee * 3, PEAK_TFLOPS * 1.05), color=ROOF, fontsize=8)
    if all("deep_gemm_us" in row for row in rows):
        theirs = [row["tflops"] * row["us"] / row["deep_gemm_us"] for row in rows]
        axes.scatter(intensity, theirs, s=16, color=THEIRS, marker="x", linewidths=1, label="DeepGEMM")
    axes.scatter(intensity, [row["tflops"] for row in rows], s=14, color=OURS, label="expertd")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOPS over real rows")
    axes.set_title(f"Grouped FP8 GEMMs, {_gpu(content)}, {len(rows)} shapes", fontsize=10)
    axes.grid(which="both", linewidth=0.3)
    axes.legend(frameon=False)
    return figure


@picture
def draw_serving(content: dict[str, Any]) -> Any:
    """One caller's median time over the GPU's, by tokens and way."""
    rows = [row for row in content["rows"] if row["callers"] == row.get("http_workers", 1) == 1]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for (way, device), style in SERVING_STYLES.items():
        of = [row for row in rows if (row["way"], row["device"]) == (way, device)]
        name = "HTTP" if way == "http" else f"{way}, memory of {_MEMORIES[device]}"
        over = [row["p50_us"] / row["gpu_us"] for row in of]
        axes.plot([row["tokens"] for row in of], over, style, label=name, markersize=4, linewidth=1.2)
    axes.axhline(1, color=ROOF, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="tokens of a request", ylabel="caller's time over the GPU's")
    axes.set_xticks(tokens := sorted({row["tokens"] for row in rows}), [str(n) for n in tokens])
    axes.set_yticks([1, 1.5, 2, 4, 8], ["1", "1.5", "2", "4", "8"])
    axes.minorticks_off()
    axes.grid(linewidth=0.3)
    axes.set_title(
        f"DeepSeek-V3's layer, 256 experts, one {_gpu(content)}, one caller, lower is faster", fontsize=10
    )
    axes.legend(frameon=False, fontsize=8)
    return figure


@picture
def draw_growth(content: dict[str, Any]) -> Any:
    """A panel for each layer: its time over one GPU's by GPUs, with a line for each number of tokens."""
    rows = content["growth"]
    times = {(row["layer"], row["tokens"], row["gpus"]): row["layer_us"] for row in rows}
    layers, tokens, gpus = (sorted({row[key] for row in rows}) for key in ("layer", "tokens", "gpus"))
    figure, panels = plt.subplots(
        1, len(layers), figsize=(9, 3), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, layer in zip(panels[0], layers, strict=True):
        for number, count in enumerate(tokens):
            over = [times[layer, count, n] / times[layer, count, 1] for n in gpus]
            axes.plot(gpus, over, f"o-C{number}", label=f"{count}", markersize=4, linewidth=1.2)
        axes.set_xticks(gpus, [str(n) for n in gpus], fontsize=8)
        axes.set_title(layer, fontsize=9)
        axes.set_xlabel("GPUs, each with as much work", fontsize=8)
        axes.grid(linewidth=0.3)
    panels[0][0].set_ylabel("time over one GPU's", fontsize=8)
    panels[0][0].set_ylim(bottom=0)
    figure.suptitle(f"A whole MoE layer on several {_gpu(content)}, by tokens a GPU", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(tokens), loc="outside lower center")
    return figure


@picture
def draw_overlap(content: dict[str, Any]) -> Any:
    """When the launches of an overlapped step ran, on the most GPUs: a line for each rank and lane."""
    gpus = max(content["timeline"], key=int)
    step = content["timeline"][gpus]
    lines = sorted({(event["rank"], LANES.index(event["lane"])) for event in step["events"]})
    figure, axes = plt.subplots(figsize=(9, 1.1 + 0.24 * len(lines)), layout="constrained")
    for name, colour in LAUNCH_COLOURS.items():
        of_name = [event for event in step["events"] if event["name"] == name]
        axes.barh(
            [lines.index((event["rank"], LANES.index(event["lane"]))) for event in of_name],
            [event["end_us"] - event["start_us"] for event in of_name],
            left=[event["start_us"] for event in of_name],
            color=colour, edgecolor="white", linewidth=0.5, height=0.8, label=name,
        )  # fmt: skip
    axes.set_yticks(range(len(lines)), [f"rank {rank}, {LANES[lane]}" for rank, lane in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("µs", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(
        f"{step['layer']}, {step['tokens']} tokens on each of {gpus} GPUs ({_gpu(content)}): "
        f"gemms on {step['gemm_sms']} SMs, communication on {step['communication_sms']}",
        fontsize=9,
    )
    figure.legend(frameon=False, fontsize=8, ncols=len(LAUNCH_COLOURS), loc="outside lower center")
    return figure


@picture
def draw_sweep(content: dict[str, Any]) -> Any:
    """Speed over DeepGEMM by rows of a group and (N, K), for each layout and number of groups."""
    rows = content["rows"]
    title = f"Grouped FP8 GEMMs, speed over DeepGEMM, {_gpu(content)}, {len(rows)} points, higher is faster"
    return heat_map.draw(rows, title, OURS, THEIRS)


@picture
def draw_open_loop(content: dict[str, Any]) -> Any:
    """What became of the requests, by the rate at which they arrived."""
    header, rows, capacity = content["about"], content["rows"], content["capacity"]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    loads = [f"{row['load']:g}" for row in rows]
    seconds = header["seconds"]
    rates = {
        "in time": [row["goodput"] for row in rows],
        "refused": [row["refused"] / seconds for row in rows],
        "late": [row["late"] / seconds for row in rows],
    }
    base = [0.0] * len(rows)
    for name, values in rates.items():
        axes.bar(loads, values, bottom=base, color=OUTCOME_COLOURS[name], label=name, width=0.6)
        base = [low + value for low, value in zip(base, values, strict=True)]
    axes.axhline(capacity, color="black", linewidth=0.8, linestyle=":", label="capacity")
    axes.set_xlabel("requests that arrive, over capacity", fontsize=8)
    axes.set_ylabel("requests/s", fontsize=8)
    axes.tick_params(labelsize=8)
    about = f"deadline {header['deadline_ms']:g} ms, demo layer on {header['cpus']} CPU cores"
    axes.set_title(f"Open loop, {about}", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    return figure


@picture
def draw_decode_beside_prefill(content: dict[str, Any]) -> Any:
    """A panel for each layer and number of decode tokens: p99 by the prefill's share."""
    rows = [row for row in content["rows"] if row["decode_tokens"] and row["prefill_share"]]
    panels = list(dict.fromkeys((row["layer"], row["decode_tokens"]) for row in rows))
    columns = min(2, len(panels))
    count = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        count, columns, figsize=(9, 2.6 * count + 0.6), squeeze=False, layout="constrained"
    )
    for axes, (layer, tokens) in zip(grid.flat, panels, strict=False):
        for kind, style in LANES_STYLES.items():
            of_kind = [
                row
                for row in rows
                if (row["layer"], row["decode_tokens"]) == (layer, tokens) and row["way"].startswith(kind)
            ]
            of_kind.sort(key=lambda row: float(row["prefill_share"]))
            shares = [row["prefill_share"] for row in of_kind]
            axes.plot(shares, [row["p99_us"] / 1e3 for row in of_kind], style, label=kind, markersize=4)
        axes.set_title(f"{layer}, decode steps of {tokens}", fontsize=9)
        axes.set_yscale("log")
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("prefill's rate over its rate alone", fontsize=8)
        axes.set_ylabel("decode p99, ms", fontsize=8)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.suptitle(
        f"Decode beside prefill on one {_gpu(content)}: lower and further right is better", fontsize=10
    )
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=len(labels), loc="outside lower center")
    return figure


@picture
def draw_engines(content: dict[str, Any]) -> Any:
    """A panel for each case: a decode step over vLLM's alone by sequences, a line for each prompt."""
    rows = [row for row in content["rows"] if row["way"] not in LOCAL]
    cases = list(dict.fromkeys((row["shape"], row["layers"], row["way"]) for row in rows))
    prompts = sorted({row["prompt"] for row in rows})
    figure, panels = plt.subplots(
        1, len(cases), figsize=(9, 3), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, case in zip(panels[0], cases, strict=True):
        of = [row for row in rows if (row["shape"], row["layers"], row["way"]) == case]
        batches = sorted({row["batch"] for row in of})
        for number, prompt in enumerate(prompts):
            over = {row["batch"]: row["decode_ratio"] for row in of if row["prompt"] == prompt}
            places = [batches.index(batch) for batch in over]
            axes.plot(places, list(over.values()), f"o-C{number}", label=f"prompts of {prompt} tokens")
        axes.axhline(1, color=THEIRS, linewidth=1.5, label="vLLM alone = 1")
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches], fontsize=8)
        shape, layers, way = case
        axes.set_title(f"{shape}, {layers} MoE layers, {way}", fontsize=9)
        axes.set_xlabel("sequences", fontsize=8)
        axes.grid(linewidth=0.3)
    panels[0][0].set_ylabel("time of a decode step over vLLM's alone", fontsize=8)
    panels[0][0].set_ylim(0, 1.08 * max(1, *(row["decode_ratio"] for row in rows)))
    version = content["about"]["versions"].get("vllm")
    title = f"vLLM {version} with its experts on a second {_gpu(content)}, lower is faster"
    figure.suptitle(title, fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    return figure


PICTURES: dict[str, tuple[str, Draw]] = {
    "docs/serving-h200.svg": ("serving-h200.json", draw_serving),
    "docs/moe_layer_speed-h200.svg": ("moe_layer_newest-h200.json", draw_speed),
    "docs/moe_layer-h200.svg": ("moe_layer-h200.json", draw_stages),
    "docs/grouped_gemm-h200.svg": ("grouped_gemm-h200.json", draw_roofline),
    "docs/parallel_growth-h200.svg": ("parallel-4xh200.json", draw_growth),
    "docs/gemm_sweep-h200.svg": ("gemm_sweep-h200.json", draw_sweep),
    "docs/overlap-h200.svg": ("overlap-h200.json", draw_overlap),
    "docs/open_loop-cpu.svg": ("open_loop-cpu.json", draw_open_loop),
    "docs/engines-2xh200.svg": ("engines-2xh200.json", draw_engines),
    "docs/lanes-h200.svg": ("lanes-h200.json", draw_decode_beside_prefill),
}
"""Pictures in the documents, by path: the result, and the function that draws it."""


def measured(results: Path) -> dict[str, tuple[str, Draw]]:
    """The pictures whose results exist."""
    return {name: picture for name, picture in PICTURES.items() if (results / picture[0]).exists()}


def digest(result: Path) -> str:
    """The result's SHA-256, which is written into its picture: pixels differ between library versions."""
    return f"{result.name} sha256:{hashlib.sha256(result.read_bytes()).hexdigest()}"


def _gpu(content: dict[str, Any]) -> str:
    return str(content["about"]["gpu"]).split(",")[0]
