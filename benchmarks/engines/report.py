"""The sections about engines: vLLM alone, and with its experts on expertd."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engines.engines import LOCAL
from benchmarks.lib.markdown import Columns, Row, Section, by, lines, machine, paragraph, read

RESULT = "engines-2xh200.json"
PIECES = "engines-pieces-2xh200.json"  # calls between CUDA graphs, measured without a caller of device calls
MODELS = {"qwen3-30b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3"}
PICTURE = "![time of a decode step over vLLM's alone, by sequences and length of prompts](engines-2xh200.svg)"


def headline(results: Path) -> str:
    """A decode step with short prompts, in a sentence."""
    content = read(results, RESULT)
    short = min(row["prompt"] for row in content["rows"])
    cases = [
        f"{_listed('{decode_ratio:.2f}', rows)} times as long for {_listed('{batch}', rows)} sequences with "
        f"{rows[0]['layers']} MoE layers of {MODELS[rows[0]['shape']]}'s shape, by {rows[0]['way']} calls"
        for rows in by(_remote(content["rows"]), "shape", "layers", "way", "prompt").values()
        if rows[0]["prompt"] == short
    ]
    what = machine(content["about"])
    return paragraph(
        f"A decode step of an unmodified vLLM {what['versions']['vllm']} on one {what['gpu']}, with its "
        f"experts on another one, **takes, compared to vLLM alone on one,** {'; '.join(cases)}. Prompts have "
        f"{short} tokens, and weights are random."
    )


def engines(results: Path) -> str:
    """The machine, the picture, and a line for each case, prompt and batch."""
    content = read(results, RESULT)
    what = machine(content["about"])
    versions = ", ".join(f"{name} {version}" for name, version in what["versions"].items())
    rows, turns = _beside_alone(content["rows"]), f"Medians of {what['turns']} turns"
    with contextlib.suppress(FileNotFoundError):
        pieces = read(results, PIECES)
        rows += _beside_alone(pieces["rows"])
        turns += f", but {pieces['about']['turns']} of *channel* and *pieces*, which ran without *device*"
    text = (
        f"{what['gpus']} {what['gpu']}; {versions}. {turns}; {what['tokens']} "
        "tokens after the first. Times are in ms, those of vLLM alone in brackets; tokens/s are for each "
        "GPU, of which vLLM alone has one, in pieces, too; *idle* is the share of decode in which the "
        "attention GPU, and that of experts, ran no kernel."
    )
    return f"{paragraph(text)}\n\n{PICTURE}\n\n{lines(rows, _COLUMNS)}"


def _beside_alone(rows: Sequence[Row]) -> list[Row]:
    """Those of the other ways, each with that of vLLM alone in the same run."""
    alone = {_point(row): row for row in rows if row["way"] == "alone"}
    return [row | {"alone": alone[_point(row)]} for row in rows if row["way"] != "alone"]


def _remote(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["way"] not in LOCAL]


def _point(row: Row) -> tuple[object, ...]:
    return row["shape"], row["layers"], row["prompt"], row["batch"]


def _listed(of: str, rows: Sequence[Row]) -> str:
    words = [of.format_map(row) for row in rows]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _idle(row: Row) -> str:
    return " and ".join(f"{1 - share:.0%}" for share in row["busy"][:2])


_COLUMNS: Columns = {
    "shape": lambda row: MODELS[row["shape"]],
    "MoE layers": "{layers}",
    "calls": "{way}",
    "prompt": "{prompt}",
    "sequences": "{batch}",
    "time per output token": "{decode_ms:.2f} ({alone[decode_ms]:.2f})",
    "over alone": "{decode_ratio:.2f}",
    "first token": "{ttft_ms:.1f} ({alone[ttft_ms]:.1f})",
    "over it": "{ttft_ratio:.2f}",
    "tokens/s": "{per_gpu:.0f} ({alone[per_gpu]:.0f})",
    "idle": _idle,
}
SECTIONS: dict[str, Section] = {"engines": engines}
