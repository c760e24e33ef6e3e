"""Steps of the calls that callers' GPUs make by themselves: graphs of all sizes, and the one that chooses."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from expertd.device_calls import CallCounts, CallSlot
from expertd.kernels.device_calls import MAX_TOKENS, CallGraph, CallTable
from expertd.kernels.request_table import MAX_GIVEN_TOP_K
from expertd.layout import Layout
from expertd.service.device import Device
from expertd.service.moe.base import Layer
from expertd.service.moe.needs import TOKEN_COUNTS

MAX_CALL_TOKENS = MAX_TOKENS
CALL_TOKEN_COUNTS = (*TOKEN_COUNTS, 384, MAX_CALL_TOKENS)
"""The tokens of graphs; a step is padded to the next one."""
_MAX_LAYERS = 1024
_NO_LAYER = 2**32 - 1
_NO_GRAPHS: Sequence[Any] = (0,) * len(CALL_TOKEN_COUNTS)  # of a layer that was removed
_FIRST = -1  # priority of the stream: calls are the shortest steps


def why_not(layer: Layer) -> str | None:
    """Why a layer answers no calls; None if it does."""
    capabilities = layer.backend.capabilities
    if not capabilities.device_calls:
        return f"expected a backend with device calls, got {layer.backend.name!r}"
    if not layer.is_capturable:
        return "expected a layer whose experts are all on the GPU, got one with weights_budget"
    if layer.shape.top_k > MAX_GIVEN_TOP_K:
        return f"expected top_k at most {MAX_GIVEN_TOP_K}, got {layer.shape.top_k}"
    if any(layer.layout(count) is not Layout.CONTIGUOUS for count in CALL_TOKEN_COUNTS):
        return "expected the contiguous layout, got the masked one"
    return None


class CallSteps:
    """Slots of callers, and the graph that answers their calls while it is started.

    For one thread, and while no other step runs: but for `counts`, and `has_fault`.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._table = CallTable(device.tensors, _MAX_LAYERS)
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the hidden size, for `_launch`
        self._stream = device.new_stream(_FIRST)
        self._pool = device.new_graph_pool()
        # By layer, in the order of their numbers. One that is added again has its number, and so its counts.
        self._graphs: dict[str, Sequence[Any]] = {}
        self._slots: dict[int, tuple[str, ...]] = {}  # -> the models that its caller may name
        self._backend: Any = None
        self._graph: CallGraph | None = None
        self._is_complete = False  # the graph has all layers
        self.is_started = False
        device.synchronize()

    def add(self, name: str, layer: Layer, num_sms: int | None) -> None:
        """Capture the steps of a layer, unless it is known; for slots that are opened later."""
        if self._has(name):
            return
        graphs = []
        with torch.inference_mode(), self._device.on(self._stream):
            self._table.clear()  # of the last step's calls, whose callers may be gone
            for count in reversed(CALL_TOKEN_COUNTS):  # largest first: others reuse its memory in the pool
                work = partial(self._launch, layer, num_sms, count)
                work()
                self._stream.synchronize()
                graphs.append(self._pool.capture(work, self._stream, as_part=True))
        self._backend = layer.backend
        self._graphs[name], self._is_complete = graphs[::-1], False
        number = list(self._graphs).index(name)
        self._table.add_layer(number, layer.shape.top_k, layer.shape.num_experts)

    def _launch(self, layer: Layer, num_sms: int | None, count: int) -> None:
        """A step of at most `count` tokens, which answers its calls."""
        if layer.call_experts(self._table, count, num_sms):
            return
        size, where = layer.shape.hidden_size, self._device.tensors
        if size not in self._rows:
            self._rows[size] = (
                torch.zeros(MAX_CALL_TOKENS, size, dtype=torch.bfloat16, device=where),
                torch.empty(MAX_CALL_TOKENS, size, dtype=torch.float32, device=where),
            )
        hidden_states, out = (rows[:count] for rows in self._rows[size])
        layer.backend.gather_rows(self._table.requests, hidden_states, None, None)
        layer(hidden_states, *self._table.routing(count, layer.shape.top_k), num_sms, out)
        layer.backend.answer_calls(out, self._table)

    def remove(self, name: str) -> None:
        """Forget a layer; calls to it are refused."""
        if not self._has(name):
            return
        self._graphs[name], self._graph = _NO_GRAPHS, None
        for index, models in self._slots.items():
            self._table.set_layers(index, self._numbers(models))
        self._device.synchronize()  # the graph's stream does not wait for these copies

    def open(self, slots: Sequence[CallSlot], models: tuple[str, ...]) -> list[int]:
        """Take slots, whose layers are those of `models`; their numbers. Raises ValueError without room."""
        free = [index for index in range(self._table.num_slots) if index not in self._slots]
        if len(free) < len(slots):
            raise ValueError(f"num_slots: expected at most {len(free)} for device calls, got {len(slots)}")
        taken = free[: len(slots)]
        for index, slot in zip(taken, slots, strict=True):
            self._table.set(index, slot._replace(layers=self._numbers(models)))
            self._slots[index] = models
        if not self._is_complete:
            self._graph = None
        self._made()  # now, as it takes a while
        self._device.synchronize()
        return taken

    def close(self, indices: Sequence[int]) -> None:
        """Give slots back; later writes of their callers are not read."""
        for index in indices:
            self._table.set(index, None)
            self._slots.pop(index, None)
        self._device.synchronize()

    @property
    def are_made(self) -> bool:
        """Whether there are callers; on any thread."""
        return bool(self._slots)

    def start(self) -> None:
        """Answer calls until `stop`."""
        if self._slots and not self.is_started:
            self._made().start(self._stream)
            self.is_started = True

    def stop(self) -> None:
        """End after the step that runs, and wait for it."""
        if self.is_started:
            self.is_started = False
            self._made().stop()

    def run(self) -> None:
        """Answer the calls that are there, and wait for that."""
        if self._slots:
            self.stop()
            self._made().run(self._stream)

    def counts(self) -> Mapping[str, CallCounts]:
        """What steps of calls have done so far, by layer, also to those that were removed; on any thread."""
        return {name: self._table.counts_of(number) for number, name in enumerate(list(self._graphs))}

    def num_calls(self, index: int) -> int:
        """The number of calls that a slot's caller has made; on any thread."""
        return self._table.num_calls(index)

    def has_fault(self, indices: Sequence[int]) -> bool:
        """Whether the caller of these slots has sent an invalid header; on any thread."""
        return any(map(self._table.has_fault, indices))

    def _has(self, name: str) -> bool:
        return self._graphs.get(name, _NO_GRAPHS) is not _NO_GRAPHS

    def _numbers(self, models: Sequence[str]) -> list[int]:
        names = list(self._graphs)
        return [names.index(name) if self._has(name) else _NO_LAYER for name in models]

    def _made(self) -> CallGraph:
        if self._graph is None:
            raw = [[graph and graph.raw_cuda_graph() for graph in graphs] for graphs in self._graphs.values()]
            self._graph = self._backend.call_graph(self._table, CALL_TOKEN_COUNTS, raw)
            self._is_complete = True
        return self._graph
