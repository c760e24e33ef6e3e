"""Graphs that wait for calls: csrc/take_calls.cu, the step that it chooses, which answers them, and again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from expertd.device_calls import MAX_SLOTS
from expertd.kernels.backends.hopper.launch import Kernels, named_source, no_shared_bytes
from expertd.kernels.backends.streams import cuda_core
from expertd.kernels.device_calls import FOREVER, NO_CALLS, STOPPED, CallTable
from expertd.kernels.jit import Variant

TAKE = Variant(named_source("take_calls"), MAX_SLOTS, no_shared_bytes)


class HopperCallGraph:
    """See `CallGraph`.

    sizes   tokens of the graphs of each layer, ascending, at most 32
    graphs  handles (CUgraph) of the steps of each layer, by size; they are copied, but the memory that they
            use must stay. 0: there is none, and no slot names the layer
    """

    def __init__(
        self, kernels: Kernels, calls: CallTable, sizes: Sequence[int], graphs: Sequence[Sequence[int]]
    ) -> None:
        from cuda.bindings import driver
        from cuda.core.graph import GraphDefinition

        device = calls.slots.get_device()
        self._calls = calls
        self._sizes = torch.tensor(sizes, dtype=torch.int32, device=calls.slots.device)
        config = cuda_core().LaunchConfig(grid=1, block=MAX_SLOTS)
        definition = GraphDefinition()
        again = definition.create_condition(1)
        body = definition.while_loop(again).body
        chosen = body.create_condition(0)
        take = body.launch(
            config, kernels.get(device, TAKE),
            calls.slots.data_ptr(), calls.requests.address, calls.step.data_ptr(),
            calls.topk_ids.data_ptr(), calls.topk_weights.data_ptr(), self._sizes.data_ptr(),
            np.uint32(len(sizes)), np.uint32(calls.num_layers), calls.faults.data_ptr(), chosen, again,
        )  # fmt: skip
        every = [graph for layer in graphs for graph in layer]
        switch = take.switch(chosen, len(every))
        for branch, graph in zip(switch.branches, every, strict=True):
            if not graph:
                continue
            status, _ = driver.cuGraphAddChildGraphNode(branch.handle, None, 0, graph)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"cuGraphAddChildGraphNode: expected a step's graph, got {status.name}")
        self._graph: Any = definition.instantiate()
        self._ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def start(self, stream: torch.cuda.Stream) -> None:
        """See `CallGraph.start`."""
        self._launch(stream, FOREVER)

    def stop(self) -> None:
        """See `CallGraph.stop`."""
        self._calls.until.fill_(STOPPED)
        self._ended.synchronize()

    def run(self, stream: torch.cuda.Stream) -> None:
        """See `CallGraph.run`."""
        self._launch(stream, NO_CALLS)
        self._ended.synchronize()

    def _launch(self, stream: torch.cuda.Stream, until: int) -> None:
        self._calls.until.fill_(until)
        self._graph.launch(cuda_core().Stream.from_handle(stream.cuda_stream))
        self._ended.record(stream)
