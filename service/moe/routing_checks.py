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
    """Raise ValueError (name, expected, got) for invalid routing, unless it lies in a GPU's memory."""
    if request.topk_ids is None and request.topk_weights is None:
        return
    if request.topk_ids is None or request.topk_weights is None:
        given = "topk_weights" if request.topk_ids is None else "topk_ids"
        raise ValueError(f"topk_ids and topk_weights: expected both or neither, got {given} alone")
    if not is_on_gpu(request.topk_ids):
        ids = np.frombuffer(host_view(request.topk_ids), _INTEGERS[request.topk_ids_datatype])
        _check_ids(ids.reshape(-1, top_k), num_experts)
    if not is_on_gpu(request.topk_weights):
        _check_weights(np.frombuffer(host_view(request.topk_weights), np.float32).reshape(-1, top_k))


def _check_ids(ids: NDArray[Any], num_experts: int) -> None:
    if _are_plainly_valid(ids, num_experts):
        return
    outside = (ids < 0) | (ids >= num_experts)
    if outside.any():
        token, slot = np.argwhere(outside)[0]
        raise ValueError(
            f"topk_ids: expected 0 to {num_experts - 1}, got {ids[token, slot]} in token {token}"
        )
    ordered = np.sort(ids, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if repeated.any():
        token = int(repeated.argmax())
        raise ValueError(f"topk_ids: expected distinct experts, got {ids[token].tolist()} in token {token}")


def _check_weights(weights: NDArray[Any]) -> None:
    bad = ~np.isfinite(weights)
    if bad.any():
        token, slot = np.argwhere(bad)[0]
        raise ValueError(
            f"topk_weights: expected finite numbers, got {weights[token, slot]} in token {token}"
        )


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
