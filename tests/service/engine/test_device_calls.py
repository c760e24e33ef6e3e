"""Counts of device calls, by layers that come and go; the graph and its table are made up."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from expertd.device_calls import CallCounts, CallSlot
from expertd.kernels import resolve_backend
from expertd.kernels.ops.activation import SILU
from expertd.service.engine import device_calls
from expertd.service.engine.device_calls import DeviceCalls
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step import calls
from expertd.service.moe.weights import random_weights
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
        self.sizes: dict[int, tuple[int, int]] = {}
        self.calls: list[tuple[int, int, int]] = []
        self.refused = 0

    def clear(self) -> None:
        self.requests.clear()

    def add_layer(self, number: int, top_k: int, num_experts: int) -> None:
        assert self.sizes.setdefault(number, (top_k, num_experts)) == (top_k, num_experts)

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
                assert layer in self._table.sizes
                self._table.rows[layer] += (1, 1, num_tokens, NANOSECONDS)
        self._table.calls.clear()


class Pool:
    def capture(self, work: Callable[[], object], stream: Any, as_part: bool = False) -> Any:
        return SimpleNamespace(raw_cuda_graph=lambda: 1)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> DeviceCalls:
    """Of layers "a" and "b"."""
    monkeypatch.setattr(calls, "_MAX_LAYERS", NUM_LAYERS)
    monkeypatch.setattr(calls, "CallTable", Table)
    monkeypatch.setattr(device_calls, "why_not", lambda layer: None)
    stream = SimpleNamespace(synchronize=lambda: None)
    device: Any = SimpleNamespace(
        tensors=torch.device("cpu"), new_stream=lambda priority: stream, new_graph_pool=Pool,
        synchronize=lambda: None, on=lambda stream: nullcontext(), uuids=lambda: ("GPU-1",),
        is_shared_at_once=False,
    )  # fmt: skip
    backend = SimpleNamespace(call_graph=lambda table, sizes, graphs: Graph(table, graphs))

    def call_experts(table: Table, num_tokens: int, num_sms: int | None) -> bool:
        assert not table.requests, "nobody may see this step, for which no caller has asked"
        return True

    shape = SimpleNamespace(hidden_size=128, top_k=2, num_experts=4)
    layer = SimpleNamespace(shape=shape, backend=backend, call_experts=call_experts)
    runner: Any = SimpleNamespace(layer=layer, num_sms=None)
    return DeviceCalls(device, {"a": runner, "b": runner})


def test_layers_that_are_answered(served: DeviceCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [served.answers(name) for name in ("a", "b", "unloaded")] == [True, True, False]
    monkeypatch.setattr(device_calls, "why_not", lambda layer: "expected another one")
    assert not served.answers("a")


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


SHAPE = LayerShape(hidden_size=128, intermediate_size=128, num_experts=6, top_k=2)


@pytest.mark.parametrize(
    ("shape", "num_sms", "is_whole"),
    [
        (SHAPE, None, True),
        (SHAPE, 1, False),
        (replace(SHAPE, num_shared_experts=1), None, False),
        (replace(SHAPE, local_experts=range(2, 5)), None, False),
    ],
)
def test_steps_of_layers(
    shape: LayerShape, num_sms: int | None, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend computes those of experts alone where callers have them; others gather rows first."""
    generator, backend, answered = fresh_generator(), resolve_backend("reference"), list[Any]()
    layer = MoELayer(shape, random_weights(shape, 7, "cpu"), backend)
    x = torch.randn(5, shape.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(5, shape.num_experts, generator=generator).topk(shape.top_k).indices.int()
    routing = ids, torch.rand(5, shape.top_k, generator=generator)
    table: Any = SimpleNamespace(requests=None, routing=lambda num_tokens, top_k: routing)
    steps: Any = SimpleNamespace(_table=table, _rows={}, _device=SimpleNamespace(tensors="cpu"))
    monkeypatch.setattr(backend, "gather_rows", lambda table, rows, *_: rows.copy_(x))
    monkeypatch.setattr(backend, "answer_calls", lambda rows, calls: answered.append(rows))
    monkeypatch.setattr(backend, "call_experts", lambda *given: answered.append(given))
    calls.CallSteps._launch(steps, layer, num_sms, 5)
    (answer,) = answered
    if is_whole:
        weights = layer.weights
        assert answer == (table, 5, 2, weights.gate_up, weights.down, SILU, None, None)
    else:
        assert torch.equal(answer, layer(x, *routing))
