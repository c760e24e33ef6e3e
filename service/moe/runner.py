"""Converts the bytes of a step's requests to tensors, runs the layer, and converts its output to bytes."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.graphs import GraphPool, StepGraphs
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest, StepResult

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions

_FLOATS = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}
_INTEGERS: dict[str, type[np.signedinteger]] = {"INT32": np.int32, "INT64": np.int64}


class LayerRunner:
    """Runs one layer for batches of requests. Call `run` from one thread at a time, `validate` from any."""

    def __init__(
        self,
        layer: MoELayer,
        device: torch.device | str,
        partitions: "SMPartitions | None" = None,
        partition: str | None = None,
    ) -> None:
        self.layer = layer
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._partitions = partitions
        self._partition = partition
        self._graphs: StepGraphs | None = None
        if self._on_gpu:
            # Copies of the weights may still be running on a stream other than the partition's.
            torch.cuda.synchronize(self._device)

    def validate(self, request: LayerRequest) -> None:
        """Raise ValueError (name, expected, got) for invalid routing."""
        if request.topk_ids is None and request.topk_weights is None:
            return
        if request.topk_ids is None or request.topk_weights is None:
            given = "topk_weights" if request.topk_ids is None else "topk_ids"
            raise ValueError(f"topk_ids and topk_weights: expected both or neither, got {given} alone")
        self._validate_ids(self._routing(request.topk_ids, _INTEGERS[request.topk_ids_datatype]))
        weights = self._routing(request.topk_weights, np.float32)
        bad = ~np.isfinite(weights)
        if bad.any():
            token, slot = np.argwhere(bad)[0]
            raise ValueError(
                f"topk_weights: expected finite numbers, got {weights[token, slot]} in token {token}"
            )

    def run(self, requests: Sequence[LayerRequest]) -> StepResult:
        """Run all requests as one batch and wait for the result. Requests must have passed `validate`."""
        start = time.perf_counter()
        bounds = list(accumulate((request.num_tokens for request in requests), initial=0))
        parts = [slice(begin, end) for begin, end in pairwise(bounds)]
        with torch.inference_mode(), self._stream():
            out, topk_ids = self._step(requests, parts)
            ids = self._to_host(topk_ids)
            datatypes = {request.output_datatype for request in requests}
            by_datatype = {datatype: self._to_host(out.to(_FLOATS[datatype])) for datatype in datatypes}
            if self._on_gpu:
                torch.cuda.current_stream(self._device).synchronize()
        num_experts = self.layer.shape.num_experts
        return StepResult(
            outputs=[
                _bytes(by_datatype[request.output_datatype][part]).data
                for request, part in zip(requests, parts, strict=True)
            ],
            layout=self.layer.layout(bounds[-1]),
            num_tokens=bounds[-1],
            tokens_per_expert=np.bincount(ids.numpy().ravel(), minlength=num_experts).tolist(),
            compute_seconds=time.perf_counter() - start,
        )

    def begin(self, requests: Sequence[LayerRequest]) -> "RunningStep":
        """Run a step; see `Runner.begin`."""
        return RunningStep(self.run(requests))

    def capture(self, pool: GraphPool) -> None:
        """Capture CUDA graphs of small steps, which `run` replays until the partition changes."""
        stream = torch.cuda.current_stream(self._device)
        if self._partitions is not None:
            stream = self._partitions.stream(self._partition)
        with torch.inference_mode(), torch.cuda.stream(stream):
            self._graphs = StepGraphs(self.layer, stream, self._num_sms(), pool)

    def release_graphs(self) -> None:
        """Run without graphs from now on."""
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None

    def _step(self, requests: Sequence[LayerRequest], parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """(out fp32 [T, H], topk_ids int32 [T, top_k]) on the device."""
        hidden_states = self._hidden_states(requests, parts)
        given = [request.topk_ids is not None for request in requests]
        if self._graphs is not None and self._graphs.fits(hidden_states) and any(given) == all(given):
            topk_ids, topk_weights = self._given(requests, parts) if given[0] else (None, None)
            return self._graphs.run(hidden_states, topk_ids, topk_weights)
        hidden_states = hidden_states.to(self._device, non_blocking=True)
        ids, weights = self._given_or_routed(requests, parts, hidden_states)
        return self.layer(hidden_states, ids, weights, self._num_sms()), ids

    def _stream(self) -> AbstractContextManager[object]:
        if self._partitions is None or not self._on_gpu:
            return nullcontext()
        return torch.cuda.stream(self._partitions.stream(self._partition))

    def _num_sms(self) -> int | None:
        return None if self._partitions is None else self._partitions.num_sms(self._partition)

    def _routing(self, buffer: Buffer | Span, dtype: type[np.generic]) -> NDArray[Any]:
        return np.frombuffer(host_view(buffer), dtype).reshape(-1, self.layer.shape.top_k)

    def _validate_ids(self, ids: NDArray[Any]) -> None:
        num_experts = self.layer.shape.num_experts
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
            raise ValueError(
                f"topk_ids: expected distinct experts, got {ids[token].tolist()} in token {token}"
            )

    def _hidden_states(self, requests: Sequence[LayerRequest], parts: Sequence[slice]) -> Tensor:
        datatypes = {request.datatype for request in requests}
        dtype = _FLOATS[datatypes.pop()] if len(datatypes) == 1 else torch.float32
        staged = self._host((parts[-1].stop, self.layer.shape.hidden_size), dtype)
        for request, part in zip(requests, parts, strict=True):
            if _FLOATS[request.datatype] == dtype:
                _fill(staged[part], request.hidden_states)
            else:
                rows = torch.empty(staged[part].shape, dtype=_FLOATS[request.datatype])
                _fill(rows, request.hidden_states)
                staged[part] = rows
        return staged

    def _given(self, requests: Sequence[LayerRequest], parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
        """The routing that requests supply, on the host; rows of other requests stay uninitialized."""
        shape = (parts[-1].stop, self.layer.shape.top_k)
        staged_ids, staged_weights = self._host(shape, torch.int32), self._host(shape, torch.float32)
        for request, part in zip(requests, parts, strict=True):
            if request.topk_ids is not None and request.topk_weights is not None:
                ids = self._routing(request.topk_ids, _INTEGERS[request.topk_ids_datatype])
                np.copyto(staged_ids[part].numpy(), ids, casting="same_kind")
                _fill(staged_weights[part], request.topk_weights)
        return staged_ids, staged_weights

    def _given_or_routed(
        self, requests: Sequence[LayerRequest], parts: Sequence[slice], hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        given = [part for request, part in zip(requests, parts, strict=True) if request.topk_ids is not None]
        if not given:
            return self.layer.route(hidden_states)
        ids_in, weights_in = (
            staged.to(self._device, non_blocking=True) for staged in self._given(requests, parts)
        )
        if len(given) == len(requests):
            return ids_in, weights_in
        topk_ids, topk_weights = self.layer.route(hidden_states)
        for part in given:
            topk_ids[part] = ids_in[part]
            topk_weights[part] = weights_in[part]
        return topk_ids, topk_weights

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._on_gpu)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._on_gpu:
            return tensor
        return self._host(tuple(tensor.shape), tensor.dtype).copy_(tensor, non_blocking=True)


class RunningStep:
    """A step that is done."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def finish(self) -> StepResult:
        return self._result


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous host tensor, without a copy."""
    return tensor.view(torch.uint8).reshape(-1).numpy()


def _fill(tensor: Tensor, buffer: Buffer | Span) -> None:
    np.copyto(_bytes(tensor), np.frombuffer(host_view(buffer), np.uint8))
