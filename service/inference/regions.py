"""Tensors in shared memory: the parameters of inputs and outputs that name a region."""

from collections.abc import Callable, Iterable
from typing import Any

from expertd.service.engine.spec import LayerSpec
from expertd.service.inference.errors import RequestError, memory_full
from expertd.service.memory import Buffer, NoBlockError, RegionError, RegionSlice, RegionUses, Span, is_on_gpu
from expertd.service.util.sentences import shown

REGION, BYTE_SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_ROW_ALIGNMENT = 16  # of hidden states: the device reads and writes them in pieces of 16 bytes

NewUses = Callable[[], RegionUses | None]
"""Makes what holds the regions of one request; None: shared memory is off."""


def no_regions() -> None:
    """Shared memory is off."""


def place_of(parameters: dict[str, Any], where: str) -> RegionSlice | None:
    """The place that `parameters` of the tensor `where` name; None if none. Raises RequestError."""
    name = parameters.get(REGION)
    if name is None:
        if alone := [other for other in (BYTE_SIZE, OFFSET) if other in parameters]:
            raise RequestError(f"parameters of {where}: expected {REGION} too, got {alone[0]} alone")
        return None
    if not isinstance(name, str) or not name:
        raise RequestError(f"parameter {REGION} of {where}: expected a name, got {shown(name)}")
    return RegionSlice(
        where, name, _number(parameters, OFFSET, where, 0), _number(parameters, BYTE_SIZE, where)
    )


def uses_of(tensors: Iterable[object], new_uses: NewUses) -> RegionUses | None:
    """What holds the regions of the places among `tensors`; None if there is none. Raises RequestError."""
    place = next((tensor for tensor in tensors if isinstance(tensor, RegionSlice)), None)
    if place is None:
        return None
    if (uses := new_uses()) is None:
        got = f"{shown(place.name)} while the setting shared_memory.enabled is false"
        raise RequestError(f"parameter {REGION} of {place.what}: expected none, got {got}")
    return uses


def hidden_states_at(place: RegionSlice, uses: RegionUses) -> Buffer | Span:
    """The hidden states at `place`. Raises RequestError, also without memory for a copy."""
    return _input(place, uses, _ROW_ALIGNMENT, copied=False)


def routing_at(place: RegionSlice, uses: RegionUses, element_bytes: int) -> Buffer | Span:
    """topk_ids or topk_weights at `place`: a private copy of host memory, so that they can be validated.

    A GPU's memory is not copied, nor is it validated. Raises as `hidden_states_at`.
    """
    return _input(place, uses, element_bytes, copied=True)


def check_routing(
    topk_ids: Buffer | Span | None, topk_weights: Buffer | Span | None, spec: LayerSpec
) -> None:
    """Raise RequestError if one of the two is in a GPU's memory alone, or the host must see them."""
    ids_on_gpu = is_on_gpu(topk_ids)
    where = "inputs topk_ids and topk_weights"
    if ids_on_gpu != is_on_gpu(topk_weights):
        got = "topk_ids" if ids_on_gpu else "topk_weights"
        raise RequestError(f"{where}: expected both in CUDA memory or neither, got {got} alone")
    if ids_on_gpu and spec.host_routing:
        why = f"because model {spec.name} has masked_max_tokens"
        raise RequestError(f"{where}: expected host memory, {why}, got CUDA memory")


def output_at(place: RegionSlice, uses: RegionUses, needed: int, later: bool) -> Span | None:
    """Where the device writes the output of `needed` bytes; None: `uses` stores it. Raises RequestError.

    later  see `RegionUses.output`
    """
    try:
        return uses.output(place, _ROW_ALIGNMENT, needed, later)
    except RegionError as error:
        raise RequestError(f"{place.what}: {error}") from error


def _input(place: RegionSlice, uses: RegionUses, alignment: int, copied: bool) -> Buffer | Span:
    try:
        return uses.input(place, alignment, copied)
    except RegionError as error:
        raise RequestError(f"{place.what}: {error}") from error
    except NoBlockError as error:
        raise memory_full() from error


def _number(parameters: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = parameters.get(name, default)
    if type(value) is not int or not 0 <= value < 2**63:
        raise RequestError(f"parameter {name} of {where}: expected a number of bytes, got {shown(value)}")
    return value
