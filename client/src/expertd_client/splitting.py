"""A layer whose experts are divided among servers: who has which, and a call to all, whose outputs add up."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from expertd_client.calls import LayerCall, layer_call
from expertd_client.errors import InvalidRequestError, ServerUnreachableError
from expertd_client.metadata import ModelMetadata
from expertd_client.outputs import NumpyOutput, TorchOutput
from expertd_client.steps import Begun, Steps


class Named(Protocol):
    """A server, as errors name it."""

    @property
    def url(self) -> str: ...


M = TypeVar("M", bound=Named)


def owners_of(model: str, known: dict[M, ModelMetadata]) -> dict[frozenset[int] | None, list[M]]:
    """Servers by the experts that they hold (None: all), which together are all, each once.

    Raises ServerUnreachableError without servers for some.
    """
    by_experts: dict[frozenset[int] | None, list[M]] = {}
    for member, told in known.items():
        by_experts.setdefault(told.local_experts, []).append(member)
    if None in by_experts:
        return {None: by_experts[None]}
    total = next(iter(known.values())).num_experts or 0
    parts = _cover(total, [experts for experts in by_experts if experts is not None])
    if not parts:
        held = frozenset().union(*(experts for experts in by_experts if experts is not None))
        text = f"expected servers with all {total} experts, each once, got {len(held)} of them"
        raise ServerUnreachableError(f"pool: model {model}: {text}")
    return {experts: by_experts[experts] for experts in parts}


def check_same(model: str, found: dict[M, ModelMetadata]) -> None:
    """Raise InvalidRequestError if servers have different layers of one name."""
    first, told = next(iter(found.items()))
    for member, other in found.items():
        for name in ("hidden_size", "top_k", "num_experts", "weights_id"):
            one, two = getattr(told, name), getattr(other, name)
            if one != two and None not in (one, two):
                got = f"{one} at {first.url}, {two} at {member.url}"
                raise InvalidRequestError(f"{name} of {model}: expected the same at all servers, got {got}")
    shared: dict[frozenset[int] | None, str | None] = {}
    for member, other in found.items():
        if shared.setdefault(other.local_experts, other.shared_experts) != other.shared_experts:
            got = f"{shared[other.local_experts]} and {other.shared_experts}"
            text = f"expected the same of servers with the same experts, got {got}, at {member.url}"
            raise InvalidRequestError(f"shared_experts of {model}: {text}")
    if list(shared.values()).count("included") > 1 and None not in shared:
        text = "expected them to be included by one part of the layer, got several"
        raise InvalidRequestError(f"shared_experts of {model}: {text}")


def _cover(total: int, parts: Iterable[frozenset[int]]) -> list[frozenset[int]] | None:
    """Disjoint parts that are all of `total` experts, by their first; None: there are none."""
    ordered = sorted(parts, key=min)

    def extend(held: frozenset[int], chosen: list[frozenset[int]]) -> list[frozenset[int]] | None:
        if len(held) == total:
            return chosen
        first = next(expert for expert in range(total) if expert not in held)
        for part in ordered:
            if min(part) == first and not part & held:
                found = extend(held | part, [*chosen, part])
                if found is not None:
                    return found
        return None

    return extend(frozenset(), [])


class ExpertOwner(NamedTuple):
    """Servers that hold some experts.

    takes_all  they add something of every token, its shared experts
    """

    experts: frozenset[int]
    takes_all: bool
    infer: Callable[[LayerCall], Steps[None]]


def split(call: LayerCall, owners: Sequence[ExpertOwner]) -> Steps[None]:
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


def _rows_of(call: LayerCall, owners: Sequence[ExpertOwner]) -> "list[npt.NDArray[np.intp] | None]":
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
