"""Runs one layer for batches of requests, on its device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from expertd.service.memory import host_view, is_on_gpu
from expertd.service.moe.batch import Batch
from expertd.service.moe.capture import GraphPool
from expertd.service.moe.device_step import DeviceSteps
from expertd.service.moe.graphs import StepGraphs
from expertd.service.moe.host_step import HostSteps
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest, StepResult
from expertd.service.moe.running import DoneStep, RunningStep
from expertd.service.moe.staging import Staging

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions

_FEW_IDS = 32  # up to here, Python checks them faster than NumPy
_MANY_TOKENS = 512  # from here on, columns are compared faster than rows are sorted
_INTEGERS: dict[str, type[np.signedinteger]] = {"INT32": np.int32, "INT64": np.int64}


class LayerRunner:
    """Begins steps of one layer. Call `begin` from one thread at a time, `validate` from any.

    staging  memory for steps on a GPU, shared by all layers there; None: made here
    """

    def __init__(
        self,
        layer: MoELayer,
        device: torch.device | str,
        partitions: "SMPartitions | None" = None,
        partition: str | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.layer = layer
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._partitions = partitions
        self._partition = partition
        self._graphs: StepGraphs | None = None
        if self._on_gpu:
            self._staging = staging or Staging(torch.device("cuda", self._device.index or 0))
            self._on_device = DeviceSteps(layer, self._staging)
            # Copies of the weights may still be running on a stream other than the partition's.
            torch.cuda.synchronize(self._device)
        else:
            self._on_host = HostSteps(layer)

    def validate(self, request: LayerRequest) -> None:
        """Raise ValueError (name, expected, got) for invalid routing, unless it lies in a GPU's memory."""
        if request.topk_ids is None and request.topk_weights is None:
            return
        if request.topk_ids is None or request.topk_weights is None:
            given = "topk_weights" if request.topk_ids is None else "topk_ids"
            raise ValueError(f"topk_ids and topk_weights: expected both or neither, got {given} alone")
        if not is_on_gpu(request.topk_ids):
            ids = np.frombuffer(host_view(request.topk_ids), _INTEGERS[request.topk_ids_datatype])
            self._validate_ids(ids.reshape(-1, self.layer.shape.top_k))
        if not is_on_gpu(request.topk_weights):
            weights = np.frombuffer(host_view(request.topk_weights), np.float32)
            self._validate_weights(weights.reshape(-1, self.layer.shape.top_k))

    def begin(self, requests: Sequence[LayerRequest]) -> RunningStep | DoneStep:
        """Start all requests, which have passed `validate`, as one step. At most one other may be running."""
        batch = Batch(requests)
        if not self._on_gpu:
            with torch.inference_mode():
                return DoneStep(self._on_host.run(batch))
        with self._stream():
            if self._graphs is not None and self._graphs.fits(batch):
                return self._graphs.begin(batch)
            stream = torch.cuda.current_stream(self._device)
            with torch.inference_mode():
                return self._on_device.begin(batch, stream, self._num_sms())

    def run(self, requests: Sequence[LayerRequest]) -> StepResult:
        """Run all requests as one step, and wait for the result."""
        return self.begin(requests).finish()

    def capture(self, pool: GraphPool) -> None:
        """Capture CUDA graphs of small steps, which `begin` replays until the partition changes."""
        stream = torch.cuda.current_stream(self._device)
        if self._partitions is not None:
            stream = self._partitions.stream(self._partition)
        with torch.inference_mode(), torch.cuda.stream(stream):
            self._graphs = StepGraphs(self.layer, stream, self._num_sms(), pool, self._staging)
            self._staging.allow_graphs()

    def release_graphs(self) -> None:
        """Run without graphs from now on."""
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None
            self._on_device.release_graphs()
            self._staging.release_graphs()

    def _stream(self) -> AbstractContextManager[object]:
        if self._partitions is None or self._partition is None:
            return nullcontext()
        return torch.cuda.stream(self._partitions.stream(self._partition))

    def _num_sms(self) -> int | None:
        return None if self._partitions is None else self._partitions.num_sms(self._partition)

    def _validate_ids(self, ids: NDArray[Any]) -> None:
        num_experts = self.layer.shape.num_experts
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
            raise ValueError(
                f"topk_ids: expected distinct experts, got {ids[token].tolist()} in token {token}"
            )

    def _validate_weights(self, weights: NDArray[Any]) -> None:
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
