"""Checks the values of a request's routing; imports no torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertd.service.memory import host_view, is_on_gpu
from expertd.service.moe.request import LayerRequest

_FEW_IDS = 32  # up to here, Python checks them faster than NumPy
_MANY_TOKENS = 512  # from here on, columns are compared faster than rows are sorted
_INTEGERS: dict[str, type[np.signedinteger]] = {"INT32": np.int32, "INT64": np.int64}


def check_routing(request: LayerRequest, num_experts: int, top_k: int) -> None:
    """Raise ValueError (name, expected, got) for invalid routing, unless it lies in a GPU's memory.

    Ids of -1 and num_experts name no expert, and may repeat; their weights are not checked. If there are any,
    the request gets a copy of its ids, in which all of them are -1.
    """
    if request.topk_ids is None and request.topk_weights is None:
        return
    if request.topk_ids is None or request.topk_weights is None:
        given = "topk_weights" if request.topk_ids is None else "topk_ids"
        raise ValueError(f"topk_ids and topk_weights: expected both or neither, got {given} alone")
    if is_on_gpu(request.topk_ids) or is_on_gpu(request.topk_weights):  # callers have checked that both are
        return
    ids = np.frombuffer(host_view(request.topk_ids), _INTEGERS[request.topk_ids_datatype])
    weights = np.frombuffer(host_view(request.topk_weights), np.float32)
    ids, weights = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
    empty = _empty_slots(ids, num_experts)
    bad = ~np.isfinite(weights)
    if empty is not None:
        bad &= ~empty
    if bad.any():
        token, slot = np.argwhere(bad)[0]
        got = f"{weights[token, slot]} in token {token}, slot {slot}"
        raise ValueError(f"topk_weights: expected finite numbers, got {got}")
    if empty is not None:
        request.topk_ids = np.where(empty, -1, ids).astype(np.int32).tobytes()
        request.topk_ids_datatype = "INT32"


def _empty_slots(ids: NDArray[Any], num_experts: int) -> NDArray[np.bool_] | None:
    """Which slots name no expert; None: all name one. Raises ValueError for other ids, and repeated ones."""
    if _are_plainly_valid(ids, num_experts):
        return None
    empty = (ids < 0) | (ids >= num_experts)
    outside = empty & (ids != -1) & (ids != num_experts)
    if outside.any():
        token, slot = np.argwhere(outside)[0]
        expected = f"0 to {num_experts - 1}, or for no expert -1 or {num_experts}"
        got = f"{ids[token, slot]} in token {token}, slot {slot}"
        raise ValueError(f"topk_ids: expected {expected}, got {got}")
    ordered = np.sort(np.where(empty, -1, ids), axis=1)
    repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if repeated.any():
        token = int(repeated.argmax())
        raise ValueError(f"topk_ids: expected distinct experts, got {ids[token].tolist()} in token {token}")
    return empty if empty.any() else None


def _are_plainly_valid(ids: NDArray[Any], num_experts: int) -> bool:
    """Whether all ids name experts, distinct ones in each row, if that can be seen sooner than by sorting."""
    if ids.size <= _FEW_IDS:
        return all(
            len(set(row)) == len(row) and min(row) >= 0 and max(row) < num_experts for row in ids.tolist()
        )
    if len(ids) < _MANY_TOKENS or ids.min() < 0 or ids.max() >= num_experts:
        return False
    columns = np.empty(ids.shape[::-1], np.int16)  # MAX_EXPERTS fits
    columns[:] = ids.T
    return not any((columns[slot:] == columns[slot - 1]).any() for slot in range(1, len(columns)))
