"""Which published models the service understands: `python -m tests.service.checkpoints.published`.

published.json has, of 65 MoE models, what decides that: the values that a family's rule reads, as they are in
their config.json and hf_quant_config.json (those that ai-dynamo/aiconfigurator bundles, August 2026). Given a
document, the command writes the table between its markers.
"""

import json
import sys
import tempfile
from collections.abc import Set
from pathlib import Path
from typing import Any

from expertd.service.checkpoints import CheckpointError, MoEModel, read_model
from expertd.service.checkpoints.encodings import Encoding
from expertd.service.settings.spans import spans

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
BEGIN, END = "<!-- published -->", "<!-- /published -->"


def understood(name: str) -> MoEModel:
    """The layers of a published model. Raises CheckpointError."""
    return described(PUBLISHED[name])


def described(files: dict[str, Any]) -> MoEModel:
    """The layers of a model by the values in its files, by their names. Raises CheckpointError."""
    with tempfile.TemporaryDirectory() as temporary:
        for file, values in files.items():
            (Path(temporary) / file).write_text(json.dumps(values))
        try:
            return read_model(Path(temporary))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(f"{temporary}/", "")) from error


def report() -> str:
    """The count, and a Markdown table with a row for the models with the same result."""
    rows: dict[tuple[str, str], list[str]] = {}
    served = 0
    for name in sorted(PUBLISHED, key=str.lower):
        try:
            model = understood(name)
        except CheckpointError as error:
            rows.setdefault(("refused", _shortened(str(error))), []).append(name)
            continue
        served += 1
        rows.setdefault((_how(model), _what(model)), []).append(name)
    head = f"{served} of {len(PUBLISHED)} are understood.\n\n"
    lines = (f"| {', '.join(names)} | {how} | {what} |\n" for (how, what), names in rows.items())
    return head + "| models | | layers, or the reason |\n|---|---|---|\n" + "".join(lines)


def _how(model: MoEModel) -> str:
    if has_four_bits(model):
        return "in four bits"
    return "understood" if stated_of(model) & _AS_THEY_ARE else "with `requantize: allow`"


_AS_THEY_ARE = {Encoding.FLOAT, Encoding.BLOCKS, Encoding.TENSOR}


def stated_of(model: MoEModel) -> Set[Encoding]:
    """The encodings that the experts may have, by what is said of them."""
    names = model.names
    stated = model.quantization.of(f"layers.{model.layers[0]}.{names.experts}.0.{names.projections[0]}")
    return {Encoding.FLOAT} if stated is None else stated.allowed


def has_four_bits(model: MoEModel) -> bool:
    """Whether experts have four bits, which a backend serves as they are."""
    return all(encoding.four_bits is not None for encoding in stated_of(model))


def _what(model: MoEModel) -> str:
    shared = f"+{model.num_shared_experts}" if model.num_shared_experts else ""
    experts = f"{model.num_experts}{shared} of {model.intermediate_size}, top {model.top_k}"
    return f"{spans(model.layers)}: {experts}" + (
        f"; not {spans(tuple(model.refused))}" if model.refused else ""
    )


def _shortened(text: str) -> str:
    return text.replace("|", "/").removeprefix("config.json: model_type: expected another one, got ")


def replaced(document: str) -> str:
    """`document` with the current report. Raises ValueError if the markers are missing."""
    before, begin, rest = document.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}, each on a line of its own")
    return f"{before}{begin}{report()}{end}{after}"


def main(arguments: list[str]) -> None:
    """Print the report, or write it to a document."""
    if not arguments:
        print(report(), end="")
    for name in arguments:
        path = Path(name)
        path.write_text(replaced(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
