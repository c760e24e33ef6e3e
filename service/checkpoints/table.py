"""Generates the tables of families and of encodings in docs/checkpoints.md.

`python -m expertd.service.checkpoints.table docs/checkpoints.md` writes them between their markers; `--check`
only compares.
"""

import sys
from pathlib import Path

from expertd.service.checkpoints.encodings import (
    FLOATS,
    FORMS,
    Encoding,
    TensorLayout,
    WeightTensors,
    find_encoded,
    scale_shapes,
    stored_shapes,
)
from expertd.service.checkpoints.families import FAMILIES, REFUSED
from expertd.service.checkpoints.family import Family, silu
from expertd.service.checkpoints.files import Stored
from expertd.service.checkpoints.model import Matrix
from expertd.service.util import tables


def families_table() -> str:
    """A Markdown table with a row for each family, and one of the model types that are refused."""
    rows = "".join(
        f"| {family.models} | `{name}` | {_routing(family)} | {_experts(family)} | {_shared(family)} |\n"
        for name, family in FAMILIES.items()
    )
    refused = "".join(f"| `{name}` | {why} |\n" for name, why in sorted(REFUSED.items()))
    return (
        "| models | `model_type` | routing | experts | shared expert |\n|---|---|---|---|---|\n"
        f"{rows}\nThese are refused:\n\n| model type | because |\n|---|---|\n{refused}"
    )


def _routing(family: Family) -> str:
    router = family.router
    parts: list[str] = [router.scoring]
    if family.names.router_bias is not None:
        parts.append("bias on the logits" if router.bias_on == "logits" else "bias")
    if router.groups is not None and router.groups != (1, 1):
        parts.append("expert groups")
    if "group_limited_greedy" in family.methods:
        parts.append("expert groups by their best")
    if router.scale is not None:
        parts.append("scaling factor")
    if family.weighs_input:
        parts.append("weights on the input")
    return ", ".join(parts)


def _experts(family: Family) -> str:
    text = (family.activation.__doc__ or "").strip()
    if family.names.biases is not None:
        text += ", with biases"
    return f"`{text}`" if family.activation is silu else text


def _shared(family: Family) -> str:
    if family.shared is None:
        return "no"
    return "yes" if family.names.shared_gate is None else "with a gate"


_N, _K, _EXPERTS = 512, 256, 8
_LAYOUTS = {
    "a tensor each": (TensorLayout(), 1),
    "`[E, n, k]`": (TensorLayout(_EXPERTS), 1),
    "`[E, k, n]`": (TensorLayout(_EXPERTS, transposed=True), 1),
    "`[E, k, n]`, gate and up rows interleaved": (TensorLayout(_EXPERTS, transposed=True), 2),
}


def encodings_table() -> str:
    """A Markdown table with a row for each encoding, and a column for each layout: what is found in it."""
    head = ["weights", "values", "scales", *_LAYOUTS]
    rows = [
        [encoding.value, *_tensors(encoding), *(_served(encoding, *layout) for layout in _LAYOUTS.values())]
        for encoding in Encoding
    ]
    lines = [f"| {' | '.join(row)} |\n" for row in (head, *rows)]
    return "".join([lines[0], "|---" * len(head), "|\n", *lines[1:]])


def _tensors(encoding: Encoding) -> tuple[str, str]:
    """The dtypes of values, and the shape of the scales of one matrix."""
    if encoding is Encoding.FLOAT:
        return _code(FLOATS), "none"
    form = FORMS[encoding]
    n, k = (
        "1" if unit == 0 else name if unit == 1 else "groups" if unit < 0 else f"{name}/{unit}"
        for name, unit in zip("nk", form.unit, strict=True)
    )
    return _code(form.dtypes), f"`[{n}, {k}]` {_code(form.scales)}"


def _code(dtypes: tuple[str, ...]) -> str:
    return " ".join(f"`{dtype}`" for dtype in dtypes)


def _served(encoding: Encoding, layout: TensorLayout, step: int) -> str:
    """How such weights are served, by what is found in headers of them."""
    if encoding is Encoding.FLOAT:
        found = {"w.weight": (FLOATS[0], stored_shapes(FLOATS[0], (_N, _K), layout)[0])}
    else:
        form = FORMS[encoding]
        rows, columns = form.unit
        unit = rows or _N, _K // 2 if columns < 0 else columns or _K
        found = {
            "w.weight": (form.dtypes[0], stored_shapes(form.dtypes[0], (_N, _K), layout)[0]),
            "w.weight_scale": (form.scales[0], scale_shapes(unit, (_N, _K), layout)[0]),
            "w.weight_scale_2": ("F32", ()),
        }

    def find(name: str) -> Stored:
        return Stored(Path(), name, *found[name])

    encoded = find_encoded(WeightTensors(found.__contains__, find, "w"), (_N, _K), layout)
    if encoded.encoding is not encoding:
        raise AssertionError(f"{encoding}: expected to find it, got {encoded.encoding}")
    if encoding is Encoding.FLOAT:
        return "quantized"
    matrix = Matrix(encoded, range(0, _N, step), range(_K))
    if matrix.four_bits is not None:
        return "as they are"
    return "bit for bit" if matrix.is_native else "rounded"


def main(arguments: list[str] | None = None) -> int:
    """Write the tables into a document, or compare; returns the exit code."""
    written = {"families": families_table, "encodings": encodings_table}
    return tables.run(written, "expertd.service.checkpoints.table", arguments)


if __name__ == "__main__":
    sys.exit(main())
