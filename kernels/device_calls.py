"""Calls that callers' GPUs make by themselves: where each lies, and what steps need that wait for them.

A caller's GPU writes rows and a header to memory of this GPU. A graph that was launched ahead sees the
header, takes the calls of one layer, computes them, and writes outputs and a word to the caller's memory.
The host only starts and ends the graph.
"""

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from expertd.device_calls import MAX_SLOTS, CallCounts, CallSlot
from expertd.kernels.request_table import DATATYPES, MAX_GIVEN_TOP_K, RequestTable

_SLOT = struct.Struct("<QQQQQQQQIIIxxxx")
_LAYER = struct.Struct("<IHH")
_STEP = struct.Struct("<QQQQ")  # what the host writes of it
_OF_STEP_BYTES = 32  # which kernels write, before the answers
_STEP_BYTES = _STEP.size + _OF_STEP_BYTES + MAX_SLOTS * 16
_COUNTS = 4
MAX_TOKENS = 512
"""Tokens of a step, at most."""
FOREVER, STOPPED, NO_CALLS = range(3)
"""Until when a graph answers calls: values of `CallTable.until`."""


class CallGraph(Protocol):
    """Answers calls, one step after another, without the host."""

    def start(self, stream: Any) -> None:
        """Begin, on a stream that does nothing else until `stop`."""

    def stop(self) -> None:
        """End after the step that runs, or the next one, and wait for that.

        Calls that come later wait for the next start.
        """

    def run(self, stream: Any) -> None:
        """Answer the calls that are there, and wait for that; not between `start` and `stop`."""


class CallTable:
    """The slots of a GPU, `num_slots` of them, with the layout of csrc/device_calls.cuh, and what their
    steps write.

    requests  the table of a step's requests, which the graph's first kernel writes; see also `routing`
    """

    num_slots = MAX_SLOTS

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self.num_layers = num_layers
        self.requests = RequestTable(device)
        self.topk_ids = torch.full((MAX_TOKENS * MAX_GIVEN_TOP_K,), -1, dtype=torch.int32, device=device)
        self.topk_weights = torch.zeros(MAX_TOKENS * MAX_GIVEN_TOP_K, dtype=torch.float32, device=device)
        self.slots = torch.zeros(MAX_SLOTS, _SLOT.size, dtype=torch.uint8, device=device)
        self.counts = torch.zeros(num_layers, _COUNTS, dtype=torch.int64, device=device)
        self.until = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.faults = torch.zeros(MAX_SLOTS, dtype=torch.int32, device="cpu", pin_memory=True)
        self.taken = torch.zeros(MAX_SLOTS, dtype=torch.int64, device="cpu", pin_memory=True)
        self.host_counts = torch.zeros(num_layers, _COUNTS, dtype=torch.int64, device="cpu", pin_memory=True)
        pointers = (tensor.data_ptr() for tensor in (self.until, self.counts, self.host_counts, self.taken))
        step = bytearray(_STEP.pack(*pointers)).ljust(_STEP_BYTES, b"\0")
        self.step = torch.frombuffer(step, dtype=torch.uint8).to(device)
        self._device = device
        self._sizes: dict[int, tuple[int, int]] = {}
        self._no_header = torch.zeros(1, dtype=torch.int64, device=device)
        self._layers: dict[int, Tensor] = {}
        for index in range(MAX_SLOTS):
            self.set(index, None)

    def set(self, index: int, slot: CallSlot | None) -> None:
        """Have slot `index`; None: nobody uses it. No step may be armed."""
        if slot is None:
            packed = _SLOT.pack(self._no_header.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            self._layers.pop(index, None)
        else:
            layers = torch.empty(len(slot.layers), _LAYER.size, dtype=torch.uint8, device=self._device)
            self._layers[index] = layers
            self.set_layers(index, slot.layers)
            packed = _SLOT.pack(
                slot.header, slot.hidden_states, slot.topk_ids, slot.topk_weights, slot.answer, slot.out,
                layers.data_ptr(), slot.sequence, slot.max_tokens, len(slot.layers),
                DATATYPES[torch.bfloat16],
            )  # fmt: skip
        self.slots[index].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        self.faults[index] = self.taken[index] = 0

    def set_layers(self, index: int, layers: Sequence[int]) -> None:
        """Have other layers for the models of a slot, as many as before. No step may be armed."""
        packed = b"".join(_LAYER.pack(number, *self._sizes.get(number, (0, 0))) for number in layers)
        rows = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(len(layers), _LAYER.size)
        self._layers[index].copy_(rows)

    def clear(self) -> None:
        """Have no calls in a step that no graph has begun, by torch's current stream."""
        self.requests.clear()
        self.step[_STEP.size : _STEP.size + _OF_STEP_BYTES].zero_()

    def add_layer(self, number: int, top_k: int, num_experts: int) -> None:
        """Say what routing calls to a layer bring; before slots have it."""
        self._sizes[number] = top_k, num_experts

    def routing(self, num_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
        """Where a step of `num_tokens` has the routing of its calls: int32 and fp32 [num_tokens, top_k].

        Ids that are none of the layer's experts are -1, and those of padding.
        """
        ids, weights = self.topk_ids[: num_tokens * top_k], self.topk_weights[: num_tokens * top_k]
        return ids.view(num_tokens, top_k), weights.view(num_tokens, top_k)

    def counts_of(self, layer: int) -> CallCounts:
        """What armed steps have done; on any thread, also while they run."""
        steps, calls, tokens, nanoseconds = self.host_counts[layer].tolist()
        return CallCounts(calls, tokens, steps, nanoseconds * 1e-9)

    def num_calls(self, index: int) -> int:
        """The calls that were taken from a slot; on any thread."""
        return int(self.taken[index])

    def has_fault(self, index: int) -> bool:
        """Whether a header of the slot was invalid; on any thread."""
        return bool(self.faults[index])
