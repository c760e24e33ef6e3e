"""Runs one layer for batches of requests, on its device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from expertd.kernels import as_floats
from expertd.service.device import Device, GraphPool, Stream
from expertd.service.memory import host_view
from expertd.service.moe.base import Layer
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest, StepResult
from expertd.service.moe.routing_checks import check_routing
from expertd.service.moe.step.batch import Batch, rows_of
from expertd.service.moe.step.device_step import DeviceSteps
from expertd.service.moe.step.graphs import StepGraphs
from expertd.service.moe.step.host_step import HostSteps
from expertd.service.moe.step.running import DoneStep, RunningStep
from expertd.service.moe.step.stages import GpuStages, HostStages, StageTimer, TimedStep
from expertd.service.moe.step.staging import Staging
from expertd.service.moe.step.step_counts import HostCopies, Launches

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions


class LayerRunner:
    """Begins steps of one layer. Call `begin` from one thread at a time, `validate` from any.

    staging      memory for steps on a GPU, shared by all layers whose steps take turns; None: made here
    stream       of the steps of a layer without a partition; None: the current one
    partition    where steps run; None: on the whole device
    with_graphs  whether small steps are graphs, once `capture` is called
    timer        of the steps whose requests want their stages timed; then layer is a MoELayer. None: of none
    launches     counts those of its steps; None: made here
    copies       counts what the host copies if there is no GPU; None: made here. On a GPU, the staging does
    """

    def __init__(
        self,
        layer: Layer,
        device: Device,
        partitions: "SMPartitions | None" = None,
        partition: str | None = None,
        staging: Staging | None = None,
        stream: Stream | None = None,
        with_graphs: bool = True,
        timer: StageTimer | None = None,
        launches: Launches | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self.layer = layer
        self._device = device
        self._partitions = partitions
        self.partition = partition
        self._own_stream = stream
        self._with_graphs = with_graphs
        self._timer = timer
        self._graphs: StepGraphs | None = None
        self.launches = launches or Launches()
        if device.is_host:
            self._on_host = HostSteps(layer, copies or HostCopies())
        else:
            self.staging = staging or Staging(device)
            self._on_device = DeviceSteps(layer, device, self.staging, self.launches)
            # Copies of the weights may still be running on a stream other than the partition's.
            device.synchronize()

    def validate(self, request: LayerRequest) -> None:
        """Raise ValueError (name, expected, got) for invalid routing, unless it lies in a GPU's memory."""
        check_routing(request, self.layer.shape.num_experts, self.layer.shape.top_k)

    def begin(self, requests: Sequence[LayerRequest]) -> RunningStep | DoneStep:
        """Start all requests, which have passed `validate`, as one step. At most one other may be running."""
        if self._timer is not None:
            timed = [request.timed for request in requests if request.timed is not None]
            if timed and (stages := self._timer.new()):
                return self._timed(requests, stages, timed)
        if self._device.is_host:
            self.launches.host += 1
            with torch.inference_mode():
                return DoneStep(self._on_host.run(Batch(requests)))
        with self.on_stream():
            if len(requests) == 1 and (step := self._again(requests[0])):
                return step
            batch = Batch(requests)
            if self._graphs is not None and self._graphs.fits(batch):
                self.launches.graph += 1
                return self._graphs.begin(batch)
            stream = self._device.current_stream()
            with torch.inference_mode():
                return self._on_device.begin(batch, stream, self.num_sms)

    def _timed(
        self, requests: Sequence[LayerRequest], stages: HostStages | GpuStages, timed: list[list[TimedStep]]
    ) -> RunningStep | DoneStep:
        """`begin` launch by launch, for only so each stage can be timed; then add `stages` to `timed`."""
        step: RunningStep | DoneStep
        with self.on_stream(), torch.inference_mode():
            if isinstance(stages, HostStages):
                self.launches.host += 1
                step = DoneStep(self._on_host.run(Batch(requests), stages))
            else:
                stream = self._device.current_stream()
                step = self._on_device.begin(Batch(requests), stream, self.num_sms, stages)
        for steps in timed:
            steps.append(stages)
        return step

    def replay(self, requests: Sequence[LayerRequest], padded: int, routed: bool) -> RunningStep | None:
        """`begin` by the graph for `padded` tokens, which all ranks of the layer replay; None: there is none.

        The requests are bf16, with routing unless `routed`; there may be none. No other step is running.
        """
        if self._graphs is None or not self._graphs.has(padded, routed):
            return None
        self.launches.graph += 1
        with self.on_stream():
            if len(requests) == 1 and (step := self._graphs.again(requests[0])):
                return step
            return self._graphs.begin(Batch(requests), padded, routed)

    def launch(self, requests: Sequence[LayerRequest]) -> RunningStep:
        """`begin` launch by launch, as all ranks of the layer do.

        A request that has recurred may have a graph of these launches, which is replayed.
        """
        with self.on_stream(), torch.inference_mode():
            if len(requests) == 1 and (step := self._on_device.again(requests[0])):
                return step
            stream = self._device.current_stream()
            return self._on_device.begin(Batch(requests), stream, self.num_sms)

    def route(self, request: LayerRequest) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(topk_ids [T, top_k], topk_weights [T, top_k]) that the layer's router chooses; no step begins.

        request  without routing, its hidden states in the host's memory
        """
        data = torch.frombuffer(bytearray(host_view(request.hidden_states)), dtype=torch.uint8)
        rows = rows_of(data, request.datatype, self.layer.shape.hidden_size)
        with self.on_stream(), torch.inference_mode():
            topk_ids, topk_weights = self.layer.route(as_floats(rows).to(self._device.tensors))
            return topk_ids.cpu().numpy(), topk_weights.cpu().numpy()

    def run(self, requests: Sequence[LayerRequest]) -> StepResult:
        """Run all requests as one step, and wait for the result."""
        return self.begin(requests).finish()

    @property
    def can_capture(self) -> bool:
        """Whether some of the layer's steps can be graphs."""
        layer = self.layer
        has_store = isinstance(layer, MoELayer) and layer.store is not None
        return layer.is_capturable or (has_store and layer.backend.capabilities.captures)

    def capture(self, pool: GraphPool) -> None:
        """Capture CUDA graphs of small steps, which `begin` replays until the partition changes.

        From now on, large steps that recur are captured, too.
        """
        stream = self._stream() or self._device.current_stream()
        with torch.inference_mode(), self._device.on(stream):
            if self._with_graphs and self.layer.backend.capabilities.request_table:
                self._graphs = StepGraphs(self.layer, stream, self.num_sms, pool, self.staging)
            self.staging.allow_graphs()

    def release_graphs(self) -> None:
        """Run without graphs from now on."""
        if self._graphs is not None:
            self._graphs.release()
            self._graphs = None
        if not self._device.is_host:
            self._on_device.release_graphs()
            self.staging.release_graphs()

    def _again(self, request: LayerRequest) -> RunningStep | None:
        """The step of a request that has recurred, with what is known from before."""
        if request.plan is None:
            return None
        if self._graphs is not None and (step := self._graphs.again(request)):
            self.launches.graph += 1
            return step
        return self._on_device.again(request)

    def on_stream(self) -> AbstractContextManager[object]:
        """Makes the stream of this layer's steps the current one."""
        stream = self._stream()
        return nullcontext() if stream is None else self._device.steps_on(stream)

    def _stream(self) -> Stream | None:
        """The stream of this layer's steps; None: the current one."""
        if self._partitions is None or self.partition is None:
            return self._own_stream
        return self._partitions.stream(self.partition)

    @property
    def num_sms(self) -> int | None:
        """The SMs of this layer's steps; None: those of the whole device."""
        return None if self._partitions is None else self._partitions.num_sms(self.partition)
