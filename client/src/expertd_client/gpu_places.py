"""Copies between tensors of a GPU and memory of a GPU that is shared with a server."""

from typing import TYPE_CHECKING

import numpy as np

from expertd_client.arrays import FLOATS
from expertd_client.calls import LayerCall
from expertd_client.outputs import TorchOutput
from expertd_client.places import CallLayout, narrow_ids

if TYPE_CHECKING:
    import torch

_NAMES = {datatype: name for name, datatype in FLOATS.items()}


class GpuPlaces:
    """`data`: uint8 [n] on a GPU. Copies run on the current stream."""

    def __init__(self, data: "torch.Tensor") -> None:
        self.data = data
        self._copied: dict[int, torch.cuda.Event] = {}  # start of a place -> its last output has been copied

    def copy_in(self, start: int, call: LayerCall, where: CallLayout) -> None:
        """Copy a call's inputs to the place at `start`, and wait for it. Raises InvalidRequestError."""
        import torch

        with torch.cuda.device(self.data.device):
            stream = torch.cuda.current_stream()
            if start in self._copied:  # maybe on another stream
                stream.wait_event(self._copied[start])
            value = call.inputs[0].value
            rows = typed(self.data, start + where.hidden_states, value.dtype, value.shape)
            rows.copy_(value.detach(), non_blocking=True)
            if len(call.inputs) > 1:
                self._copy_routing(start, call, where)
            stream.synchronize()

    def copy_out(self, start: int, call: LayerCall, where: CallLayout) -> None:
        """Copy a call's output from the place at `start`; on a GPU, the current stream has it."""
        import torch

        assert isinstance(call.output, TorchOutput)
        dtype = getattr(torch, _NAMES[call.output.datatype])
        target = call.output.tensor()
        with torch.cuda.device(self.data.device):
            stream = torch.cuda.current_stream()
            target.copy_(typed(self.data, start + where.output, dtype, call.shape), non_blocking=True)
            if target.device.type != "cuda":
                stream.synchronize()
            self._copied[start] = stream.record_event(self._copied.get(start))

    def _copy_routing(self, start: int, call: LayerCall, where: CallLayout) -> None:
        import torch

        _, ids, weights = call.inputs
        experts = torch.as_tensor(ids.value)
        if experts.device.type == "cpu":
            experts = torch.from_numpy(np.array(narrow_ids(ids), np.int32))
        # What int32 cannot hold names no expert, and neither does -1.
        experts = experts.clamp(-1, 2**31 - 1)
        typed(self.data, start + where.topk_ids, torch.int32, ids.shape).copy_(experts)
        shares = torch.as_tensor(weights.value).detach()
        typed(self.data, start + where.topk_weights, torch.float32, weights.shape).copy_(shares)


def typed(data: "torch.Tensor", start: int, dtype: "torch.dtype", shape: tuple[int, int]) -> "torch.Tensor":
    """The tensor at `start` of `data`, uint8 [n] on any device."""
    size = shape[0] * shape[1] * dtype.itemsize
    return data[start : start + size].view(dtype).view(shape)
