"""Memory that is shared with a server: where a call's tensors lie in it, and copies in and out."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_client.arrays import ITEM_BYTES, Tensor
from expertd_client.calls import LayerCall
from expertd_client.channel.layout import aligned
from expertd_client.errors import InvalidRequestError

_INT32 = np.iinfo(np.int32)


class WideIdsError(InvalidRequestError):
    """Some topk_ids do not fit in int32, as memory that is shared has them: no expert has such a number."""


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Offsets of a call's tensors, each a multiple of ALIGNMENT, and the bytes of all."""

    hidden_states: int
    topk_ids: int
    topk_weights: int
    output: int
    num_bytes: int


def layout(shape: tuple[int, int], top_k: int, in_datatype: str, out_datatype: str) -> CallLayout:
    """For hidden_states and the output of `shape`, and routing of `top_k` experts (0: none)."""
    rows, columns = shape
    routing = aligned(rows * top_k * 4)
    ids = aligned(rows * columns * ITEM_BYTES[in_datatype])
    output = ids + 2 * routing
    return CallLayout(
        0, ids, ids + routing, output, output + aligned(rows * columns * ITEM_BYTES[out_datatype])
    )


def layout_of(call: LayerCall) -> CallLayout:
    """Where the tensors of a call lie in its place."""
    top_k = call.inputs[1].shape[1] if len(call.inputs) > 1 else 0
    return layout(call.shape, top_k, call.inputs[0].datatype, call.output.datatype)


def copy_in(memory: "npt.NDArray[np.uint8]", call: LayerCall, where: CallLayout) -> None:
    """Copy a call's inputs to its place in host memory. Raises WideIdsError."""
    hidden_states = call.inputs[0]
    part = memory[where.hidden_states : where.hidden_states + hidden_states.num_bytes]
    value = hidden_states.value
    if isinstance(value, np.ndarray):
        np.copyto(part.view(value.dtype).reshape(value.shape), value)
    else:
        import torch

        torch.from_numpy(part).view(value.dtype).view(value.shape).copy_(value.detach())
    if len(call.inputs) > 1:
        _, ids, weights = call.inputs
        size = ids.shape[0] * ids.shape[1] * 4
        ids_part = memory[where.topk_ids : where.topk_ids + size].view(np.int32)
        np.copyto(ids_part.reshape(ids.shape), narrow_ids(ids), casting="unsafe")
        weights_part = memory[where.topk_weights : where.topk_weights + size].view(np.float32)
        np.copyto(weights_part.reshape(weights.shape), _on_host(weights))


def copy_out(memory: "npt.NDArray[np.uint8]", call: LayerCall, where: CallLayout) -> None:
    """Copy a call's output from its place in host memory."""
    size = call.shape[0] * call.shape[1] * ITEM_BYTES[call.output.datatype]
    call.output.store(memory[where.output : where.output + size])


def narrow_ids(ids: Tensor) -> npt.NDArray[Any]:
    """topk_ids in host memory, all within int32. Raises WideIdsError."""
    values = _on_host(ids)
    if ids.datatype == "INT64" and values.size:
        lowest, highest = int(values.min()), int(values.max())
        if lowest < _INT32.min or highest > _INT32.max:
            got = lowest if lowest < _INT32.min else highest
            raise WideIdsError(f"topk_ids: expected experts of 32 bits, got {got}")
    return values


def _on_host(tensor: Tensor) -> npt.NDArray[Any]:
    value = tensor.value
    array: npt.NDArray[Any] = value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()
    return array
