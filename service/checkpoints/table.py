"""Generates the table of encodings and layouts of docs/checkpoints.md.

`python -m expertd.service.checkpoints.table docs/checkpoints.md`; with --check, it only compares.
"""

import sys
from pathlib import Path

from expertd.service.checkpoints.encodings import (
    FLOATS,
    FORMS,
    Encoding,
    Layout,
    WeightTensors,
    find_encoded,
    scale_shapes,
    stored_shapes,
)
from expertd.service.checkpoints.files import Stored
from expertd.service.checkpoints.layer import Matrix
from expertd.service.util import tables

_N, _K, _EXPERTS = 512, 256, 8
_LAYOUTS = {
    "a tensor each": (Layout(), 1),
    "`[E, n, k]`": (Layout(_EXPERTS), 1),
    "`[E, k, n]`": (Layout(_EXPERTS, transposed=True), 1),
    "`[E, k, n]`, gate and up rows interleaved": (Layout(_EXPERTS, transposed=True), 2),
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


def _served(encoding: Encoding, layout: Layout, step: int) -> str:
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
    return "bit for bit" if Matrix(encoded, range(0, _N, step), range(_K)).is_native else "rounded"


def main(arguments: list[str] | None = None) -> int:
    """Write the table into a document, or compare; returns the exit code."""
    return tables.run("encodings", encodings_table, "expertd.service.checkpoints.table", arguments)


if __name__ == "__main__":
    sys.exit(main())
