"""Generates the table of families in docs/checkpoints.md.

`python -m expertd.service.checkpoints.families.table docs/checkpoints.md` writes it between the markers;
`--check` only compares.
"""

import sys

from expertd.service.checkpoints.families import FAMILIES, Family
from expertd.service.checkpoints.families.activations import silu
from expertd.service.checkpoints.families.refused import REFUSED
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


def replaced(document: str) -> str:
    """`document` with the current table. Raises ValueError if its markers are missing."""
    return tables.replaced(document, "families", families_table())


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


def main(arguments: list[str] | None = None) -> int:
    """Write the table into a document, or compare; returns the exit code."""
    return tables.run("families", families_table, "expertd.service.checkpoints.families.table", arguments)


if __name__ == "__main__":
    sys.exit(main())
