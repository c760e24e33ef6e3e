"""Steps on a CPU, done when they begin."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.kernels import as_floats
from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.base import Layer
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult
from expertd.service.moe.step.batch import FLOATS, Batch, rows_of
from expertd.service.moe.step.stages import HostStages
from expertd.service.moe.step.step_counts import HostCopies

_ALIGNMENT = 16  # bytes, of an output that the layer writes in place


class HostSteps:
    """Runs the steps of one layer, and counts what it copies in `copies`."""

    def __init__(self, layer: Layer, copies: HostCopies) -> None:
        self._layer = layer
        self.copies = copies

    def run(self, batch: Batch, stages: HostStages | None = None) -> StepResult:
        """A whole step; `stages`, only of a MoELayer, are notified of its stages."""
        began = time.perf_counter()
        layer: Callable[..., Tensor] = self._layer
        offsets = torch.zeros(self._layer.shape.num_groups + 1, dtype=torch.int32)
        hidden_states = self._hidden_states(batch)
        if stages is not None:
            stages.mark("copy_in")
            layer = partial(layer, stages=stages)
        topk_ids, topk_weights = self._routing(batch, hidden_states)
        if stages is not None and topk_ids is not None and batch.needs_router:
            stages.mark("router")
        out = layer(hidden_states, topk_ids, topk_weights, None, self._out(batch), offsets)
        outputs = _outputs(batch, out, self.copies)
        if stages is not None:
            stages.mark("copy_out")
        return StepResult(
            outputs=outputs,
            layout=self._layer.layout(batch.num_tokens),
            num_tokens=batch.num_tokens,
            count_tokens=partial(self._layer.tokens_per_expert, offsets.numpy()),
            compute_seconds=time.perf_counter() - began,
            empty_slots=0 if topk_ids is None or not self._layer.shape.is_part else int((topk_ids < 0).sum()),
        )

    def _hidden_states(self, batch: Batch) -> Tensor:
        """[T, H] of `batch.dtype`; the only request's own memory if it is a span."""
        h, first = self._layer.shape.hidden_size, batch.requests[0].hidden_states
        if len(batch.requests) == 1 and isinstance(first, Span):
            return self._rows(batch.requests[0])
        staged = torch.empty((batch.num_tokens, h), dtype=batch.dtype)
        for request, part in zip(batch.requests, batch.parts, strict=True):
            if FLOATS.get(request.datatype) == batch.dtype:
                self.copies.copy(_bytes(staged[part]).data, host_view(request.hidden_states))
            else:
                staged[part] = self._rows(request)
        return staged

    def _rows(self, request: LayerRequest) -> Tensor:
        """A request's hidden states as floats; its own memory unless they are FP8."""
        h = self._layer.shape.hidden_size
        memory = host_view(request.hidden_states)
        if memory.readonly:
            memory = memoryview(bytearray(memory))  # torch wants to be able to write
        return as_floats(rows_of(torch.frombuffer(memory, dtype=torch.uint8), request.datatype, h))

    def _routing(self, batch: Batch, hidden_states: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The step's routing; None: the layer routes all tokens."""
        if not batch.with_routing:
            return None, None
        if batch.needs_router:
            topk_ids, topk_weights = self._layer.route(hidden_states)
        else:
            shape = batch.num_tokens, self._layer.shape.top_k
            topk_ids = torch.empty(shape, dtype=torch.int32)
            topk_weights = torch.empty(shape, dtype=torch.float32)
        for request, part in zip(batch.requests, batch.parts, strict=True):
            if request.topk_ids is not None and request.topk_weights is not None:
                ids = _array(request.topk_ids, np.dtype(request.topk_ids_datatype.lower()))
                np.copyto(topk_ids[part].numpy(), ids.reshape(topk_ids[part].shape), casting="same_kind")
                np.copyto(_bytes(topk_weights[part]), _array(request.topk_weights, np.uint8))
        return topk_ids, topk_weights

    def _out(self, batch: Batch) -> Tensor:
        """[T, H] of `batch.out_dtype`; the only request's own memory for its output if it has such."""
        wanted, h = batch.requests[0].output, self._layer.shape.hidden_size
        if len(batch.requests) > 1 or wanted is None or wanted.address % _ALIGNMENT:
            return torch.empty((batch.num_tokens, h), dtype=batch.out_dtype)
        return torch.frombuffer(host_view(wanted), dtype=batch.out_dtype).view(-1, h)


def _outputs(batch: Batch, out: Tensor, copies: HostCopies) -> list[OutputMemory]:
    by_datatype = {request.output_datatype: out for request in batch.requests}
    by_datatype = {datatype: rows.to(FLOATS[datatype]) for datatype, rows in by_datatype.items()}
    outputs: list[OutputMemory] = []
    for request, part in zip(batch.requests, batch.parts, strict=True):
        rows = _bytes(by_datatype[request.output_datatype][part])
        if request.output is None:
            outputs.append(rows.data)
            continue
        target = _array(request.output, np.uint8)
        if target.ctypes.data != rows.ctypes.data:  # else the layer has written it
            copies.copy(target.data, rows.data)
        outputs.append(request.output)
    return outputs


def _array(memory: Buffer | Span, dtype: Any) -> NDArray[Any]:
    return np.frombuffer(host_view(memory), dtype)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.view(torch.uint8).reshape(-1).numpy()
