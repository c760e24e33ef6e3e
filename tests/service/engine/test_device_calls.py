"""Counts of device calls, by layers that come and go; the graph and its table are made up."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from expertd.device_calls import CallCounts, CallSlot
from expertd.service.engine import device_calls
from expertd.service.engine.device_calls import DeviceCalls
from expertd.service.moe.step import calls
from tests.kernels.helpers import fresh_generator

NUM_LAYERS = 3
NANOSECONDS = 1500  # of a step


class Table:
    """A `CallTable` without a GPU, whose calls are given as (slot, model of it, tokens)."""

    num_slots = 8

    def __init__(self, device: torch.device, num_layers: int) -> None:
        self.requests: set[int] = set()  # of the last step: the slots that it took
        self.rows = np.zeros((num_layers, 4), np.int64)
        self.layers: dict[int, Sequence[int]] = {}
        self.calls: list[tuple[int, int, int]] = []
        self.refused = 0

    def set(self, index: int, slot: CallSlot | None) -> None:
        self.layers[index] = slot.layers if slot else ()

    def set_layers(self, index: int, layers: Sequence[int]) -> None:
        self.layers[index] = layers

    def counts_of(self, layer: int) -> CallCounts:
        steps, calls, tokens, nanoseconds = self.rows[layer].tolist()
        return CallCounts(calls, tokens, steps, nanoseconds * 1e-9)


class Graph:
    """Takes one call a step."""

    def __init__(self, table: Table, graphs: Sequence[Sequence[Any]]) -> None:
        self._table, self._graphs = table, graphs

    def start(self, stream: Any) -> None: ...

    def stop(self) -> None: ...

    def run(self, stream: Any) -> None:
        for index, model, num_tokens in self._table.calls:
            self._table.requests.add(index)
            layer = self._table.layers[index][model]
            if layer >= len(self._table.rows):
                self._table.refused += 1
            else:
                assert all(self._graphs[layer])
                self._table.rows[layer] += (1, 1, num_tokens, NANOSECONDS)
        self._table.calls.clear()


class Tensors:
    """`StepTensors` whose launches nobody may see: no caller has asked for one."""

    def __init__(self, *given: Any) -> None:
        self._requests = given[-1]

    def launch(self, *_: object, routed: bool) -> None:
        assert not self._requests


class Pool:
    def capture(self, work: Callable[[], object], stream: Any, as_part: bool = False) -> Any:
        return SimpleNamespace(raw_cuda_graph=lambda: 1)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> DeviceCalls:
    """Of layers "a" and "b"."""
    monkeypatch.setattr(calls, "_MAX_LAYERS", NUM_LAYERS)
    monkeypatch.setattr(calls, "CallTable", Table)
    monkeypatch.setattr(calls, "StepTensors", Tensors)
    monkeypatch.setattr(device_calls, "why_not", lambda layer: None)
    stream = SimpleNamespace(synchronize=lambda: None)
    device: Any = SimpleNamespace(
        tensors=torch.device("cpu"), new_stream=lambda priority: stream, new_graph_pool=Pool,
        synchronize=lambda: None, on=lambda stream: nullcontext(),
    )  # fmt: skip
    backend = SimpleNamespace(call_graph=lambda table, sizes, graphs: Graph(table, graphs))
    layer = SimpleNamespace(shape=SimpleNamespace(hidden_size=128, top_k=2), backend=backend)
    runner: Any = SimpleNamespace(layer=layer, num_sms=None)
    return DeviceCalls(device, {"a": runner, "b": runner})


def table_of(served: DeviceCalls) -> Table:
    assert served._steps is not None
    table: Any = served._steps._table
    assert isinstance(table, Table)
    return table


def test_a_layer_that_comes_again_goes_on_counting(served: DeviceCalls) -> None:
    """Also more often than the table has layers; and the other layer's counts stay its own."""
    assert served.counts() == {}
    tokens = torch.randint(1, 512, (NUM_LAYERS + 2,), generator=fresh_generator()).tolist()
    places = CallSlot(0, 0, 0, 0, 0, 0, max_tokens=512, sequence=0)
    for times, num_tokens in enumerate(tokens, 1):
        served.prepare("a")
        served.prepare("b")
        (slot,) = served.connect(("a", "b"), [places])
        table = table_of(served)
        table.calls = [(slot, 0, num_tokens), (slot, 1, 7)]
        served.run()
        seconds = times * NANOSECONDS * 1e-9
        expected = {
            "a": CallCounts(times, sum(tokens[:times]), times, seconds),
            "b": CallCounts(times, 7 * times, times, seconds),
        }
        assert served.counts() == expected
        served.forget("a")
        served.forget("a")
        table.calls = [(slot, 0, num_tokens)]
        served.run()
        assert (served.counts(), table.refused) == (expected, times)
        served.disconnect([slot])
