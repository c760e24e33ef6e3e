"""One call to servers that hold different experts of a layer: their outputs are parts of a sum."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from expertd_client.calls import LayerCall, layer_call
from expertd_client.outputs import NumpyOutput, TorchOutput
from expertd_client.steps import Begun, Steps


class Owner(NamedTuple):
    """Servers that hold some experts.

    takes_all  they add something of every token, its shared experts
    """

    experts: frozenset[int]
    takes_all: bool
    infer: Callable[[LayerCall], Steps[None]]


def split(call: LayerCall, owners: Sequence[Owner]) -> Steps[None]:
    """Have a call answered by all owners at once; the sum is in float32, in their order.

    Each gets the tokens with experts of its own: all of them where its server routes. The first also gets
    tokens that name nobody's, which its server refuses, or knows to be none.
    """
    parts: list[tuple[npt.NDArray[np.intp] | None, LayerCall, Begun]] = []
    for owner, rows in zip(owners, _rows_of(call, owners), strict=True):
        if rows is not None and not len(rows):
            continue
        values = (tensor.value if rows is None else _taken(tensor.value, rows) for tensor in call.inputs)
        x, ids, weights = (*values, None, None)[:3]
        part = layer_call(call.model, x, ids, weights, "float32", None, call.priority)
        parts.append((rows, part, Begun(owner.infer(part))))
    try:
        for _, _, begun in parts:
            yield from begun.begin()
        for _, _, begun in parts:
            yield from begun.finish()
    finally:  # without one part, the others are of no use
        for _, _, begun in parts:
            begun.close()
    _add_up([(rows, part.output.result()) for rows, part, _ in parts], call)


def _rows_of(call: LayerCall, owners: Sequence[Owner]) -> "list[npt.NDArray[np.intp] | None]":
    """The tokens of each owner; None: all, or nobody knows yet."""
    if len(call.inputs) < 2:
        return [None for _ in owners]
    ids = call.inputs[1].value
    ids = ids if isinstance(ids, np.ndarray) else ids.detach().cpu().numpy()
    takes = np.array([np.isin(ids, sorted(owner.experts)).any(1) | owner.takes_all for owner in owners])
    takes[0] |= ~takes.any(0)
    return [None if taken.all() else np.flatnonzero(taken) for taken in takes]


def _taken(value: Any, rows: "npt.NDArray[np.intp]") -> Any:
    if isinstance(value, np.ndarray):
        return value[rows]
    import torch

    return value[torch.from_numpy(rows).to(value.device)]


def _add_up(parts: Sequence[tuple["npt.NDArray[np.intp] | None", Any]], call: LayerCall) -> None:
    """Write the sum to the call's output."""
    output = call.output
    if isinstance(output, TorchOutput):
        import torch

        into = output.tensor()
        total = torch.zeros(into.shape, dtype=torch.float32, device=into.device)
        for rows, out in parts:
            if rows is None:
                total += out.to(total.device)
            else:
                total.index_add_(0, torch.from_numpy(rows).to(total.device), out.to(total.device))
        into.copy_(total)
        return
    assert isinstance(output, NumpyOutput)
    sums = np.zeros(call.shape, np.float32)
    for rows, out in parts:
        sums[slice(None) if rows is None else rows] += out
    output.store(_encoded(sums, output.datatype))


def _encoded(values: "npt.NDArray[np.float32]", datatype: str) -> "npt.NDArray[np.uint8]":
    """Rounded to a datatype of the protocol, as bytes."""
    if datatype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        encoded: Any = np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
    else:
        encoded = values.astype(np.float16 if datatype == "FP16" else np.float32)
    return np.ascontiguousarray(encoded).view(np.uint8).reshape(-1)
