"""Calls that a GPU makes by itself, answered by a graph on another one."""

import itertools
import struct
import time
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.device_calls import MAX_SLOTS, CallSlot, header
from expertd.kernels import ExpertBiases, fused_experts, quantize_blocks, resolve_backend
from expertd.kernels.device_calls import CallGraph, CallTable
from expertd.kernels.ops.activation import SILU
from tests.kernels.helpers import fresh_generator
from tests.paths import ROOT

# On one GPU, the first launch of a kernel would wait for a graph that has no end.
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

H, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 512, 256, 16, 4, 3
SIZES = (1, 8, 64, 512)
PTX = ROOT / "client/src/expertd_client/channel/device_call.ptx"
PLACE = struct.Struct("<10QI12x")  # nothing holds the stream after a failure
LIMIT_SECONDS = 20
SERVER = torch.device("cuda", 0)
CALLER = torch.device("cuda", torch.cuda.device_count() - 1 if torch.cuda.is_available() else 0)


class Layers:
    """Of random weights, the second one with biases; `expected` computes one without calls."""

    def __init__(self) -> None:
        generator = fresh_generator("cuda")
        randn = partial(torch.randn, generator=generator, device="cuda")
        self.weights = [
            (
                quantize_blocks(randn(EXPERTS, 2 * INTERMEDIATE, H)),
                quantize_blocks(randn(EXPERTS, H, INTERMEDIATE)),
            )
            for _ in range(LAYERS)
        ]
        biases = randn(EXPERTS, 2 * INTERMEDIATE).bfloat16(), randn(EXPERTS, H).bfloat16()
        self.biases = [None, ExpertBiases(*biases), None]
        self.backend = resolve_backend("hopper")

    def expected(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        inside = torch.where((ids >= 0) & (ids < EXPERTS), ids, -1)
        x, inside, weights = (tensor.to(SERVER) for tensor in (x, inside, weights))
        gate_up, down = self.weights[layer]
        with torch.cuda.device(SERVER):
            operands, biases = (x, inside, weights, gate_up, down), self.biases[layer]
            out = fused_experts(*operands, biases=biases, backend=self.backend)
        return out.bfloat16().to(CALLER)


class Server:
    """Three layers' steps of four sizes, those of the last with gathered rows, and the graph that chooses."""

    def __init__(self, layers: Layers) -> None:
        self.calls = CallTable(SERVER, LAYERS)
        most = SIZES[-1]
        x = torch.zeros(most, H, dtype=torch.bfloat16, device=SERVER)
        out = torch.empty(most, H, device=SERVER)
        backend = layers.backend
        for layer in range(LAYERS):
            self.calls.add_layer(layer, TOP_K, EXPERTS)

        def step(layer: int, count: int) -> None:
            if layer < LAYERS - 1:
                gate_up, down = layers.weights[layer]
                biases = layers.biases[layer]
                backend.call_experts(self.calls, count, TOP_K, gate_up, down, SILU, None, biases)
                return
            backend.gather_rows(self.calls.requests, x[:count], None, None)
            routing = self.calls.routing(count, TOP_K)
            fused_experts(x[:count], *routing, *layers.weights[layer], backend=backend, out=out[:count])
            backend.answer_calls(out[:count], self.calls)

        self._graphs = [[capture(partial(step, layer, count)) for count in SIZES] for layer in range(LAYERS)]
        self._kept = x, out
        raw = [[graph.raw_cuda_graph() for graph in graphs] for graphs in self._graphs]
        self.graph: CallGraph = backend.call_graph(self.calls, SIZES, raw)
        self.stream = torch.cuda.Stream(SERVER)  # type: ignore[no-untyped-call]
        self.is_started = False

    def start(self) -> None:
        torch.cuda.synchronize(SERVER)
        self.graph.start(self.stream)
        self.is_started = True

    def stop(self) -> None:
        if self.is_started:
            self.graph.stop()
        self.is_started = False


def word(value: int) -> Tensor:
    """A u64 on the host."""
    return torch.frombuffer(bytearray(struct.pack("<Q", value)), dtype=torch.int64)


def capture(work: Any) -> Any:
    work()
    torch.cuda.synchronize(SERVER)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream(SERVER)  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):  # torch's own is of the GPU that had the first capture
        work()
    return graph


@cache
def caller_kernels() -> tuple[Any, Any]:
    from cuda.core import Device, ObjectCode

    with torch.cuda.device(CALLER):
        Device(CALLER.index).set_current()
        code = ObjectCode.from_ptx(PTX.read_bytes())
        return code.get_kernel("send_call"), code.get_kernel("wait_call")


class Caller:
    """One slot, with what the client keeps for it."""

    def __init__(
        self, server: Server, index: int, max_tokens: int, layers: list[int], sequence: int = 0
    ) -> None:
        self.server, self.index = server, index
        there, here = partial(torch.zeros, device=SERVER), partial(torch.zeros, device=CALLER)
        self.header = there(1, dtype=torch.int64)
        self.rows = (
            there(max_tokens, H, dtype=torch.bfloat16), there(max_tokens, TOP_K, dtype=torch.int32),
            there(max_tokens, TOP_K),
        )  # fmt: skip
        self.answer, self.out = here(1, dtype=torch.int64), here(max_tokens, H, dtype=torch.bfloat16)
        self.failure, self.on_host = (
            here(1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64).pin_memory(),
        )
        addresses = [self.header, *self.rows, self.answer, self.out, self.failure, self.on_host]
        packed = PLACE.pack(*(t.data_ptr() for t in addresses), int(LIMIT_SECONDS * 1e9), sequence, 0)
        self.place = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(CALLER)
        at, x, ids, weights, answer, out = (
            tensor.data_ptr() for tensor in (self.header, *self.rows, self.answer, self.out)
        )
        self.header.copy_(word(header(sequence, 0, 0)))
        torch.cuda.synchronize(SERVER)
        slot = CallSlot(at, x, ids, weights, answer, out, max_tokens, sequence, layers)
        server.calls.set(index, slot)
        self._send, self._wait = caller_kernels()

    def call(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, model: int = 0) -> None:
        """On the current stream of the caller's GPU."""
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(torch.cuda.current_stream(CALLER).cuda_stream)
        count, row = len(x), H // 8
        config = LaunchConfig(grid=1 if count <= 2 else 16, block=256)
        pointers = (tensor.data_ptr() for tensor in (self.place, x, ids, weights))
        launch(
            stream, config, self._send, *pointers,
            np.uint32(count), np.uint32(row), np.uint32(TOP_K), np.uint32(model),
        )  # fmt: skip
        launch(stream, config, self._wait, self.place.data_ptr(), out.data_ptr(), np.uint32(count * row))

    def failed(self) -> int:
        return int(self.on_host)


@pytest.fixture(scope="module")
def layers() -> Layers:
    torch.zeros(1, device=CALLER).copy_(torch.zeros(1, device=SERVER))  # they reach each other's memory now
    torch.zeros(1, device=SERVER).copy_(torch.zeros(1, device=CALLER))
    torch.cuda.set_device(SERVER)
    return Layers()


@pytest.fixture
def server(layers: Layers) -> Iterator[Server]:
    server = Server(layers)
    try:
        yield server
    finally:
        server.stop()


def inputs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, H, generator=generator, device=CALLER).bfloat16()
    ids = torch.rand(count, EXPERTS, generator=generator, device=CALLER).argsort(1)[:, :TOP_K].int()
    for none in (-1, EXPERTS, -(2**31)):
        ids[torch.rand(ids.shape, generator=generator, device=CALLER) < 0.05] = none
    return x, ids, torch.rand(count, TOP_K, generator=generator, device=CALLER)


def poisoned(count: int) -> Tensor:
    return torch.full((count, H), torch.nan, dtype=torch.bfloat16, device=CALLER)


@pytest.mark.parametrize("count", [1, 2, 8, 9, 63, 64, 65, 512])
def test_one_call_after_another(server: Server, layers: Layers, count: int) -> None:
    """Each has the bits of a step without calls, whatever the layer."""
    caller, generator = Caller(server, 7, 512, [2, 0, 1]), fresh_generator(str(CALLER))
    server.start()
    with torch.cuda.device(CALLER):
        made = [(model, inputs(count, generator), poisoned(count)) for model in (0, 1, 2, 0, 0)]
        torch.cuda.synchronize(CALLER)
        for model, given, out in made:
            caller.call(*given, out, model)
        torch.cuda.current_stream(CALLER).synchronize()
    server.stop()
    assert caller.failed() == 0
    for model, given, out in made:
        assert torch.equal(out, layers.expected([2, 0, 1][model], *given))
    counts = [server.calls.counts_of(layer) for layer in range(LAYERS)]
    assert [(each.steps, each.calls, each.tokens) for each in counts] == [
        (1, 1, count), (1, 1, count), (3, 3, 3 * count)
    ]  # fmt: skip
    assert all(each.seconds > 0 for each in counts)


def test_calls_in_a_graph(server: Server, layers: Layers) -> None:
    """Of all layers in a row, replayed with new inputs."""
    count, generator = 5, fresh_generator(str(CALLER))
    caller = Caller(server, 0, 64, list(range(LAYERS)))
    with torch.cuda.device(CALLER):
        x, ids, weights = inputs(count, generator)
        outs = [poisoned(count) for _ in range(LAYERS)]
        torch.cuda.synchronize(CALLER)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(CALLER)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream):  # torch's own is of the GPU that had the first capture
            given = x
            for layer, out in enumerate(outs):
                caller.call(given, ids, weights, out, layer)
                given = out
        server.start()
        for _ in range(50):
            for target, source in zip((x, ids, weights), inputs(count, generator), strict=True):
                target.copy_(source)
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.current_stream(CALLER).synchronize()
            given = x
            for layer, out in enumerate(outs):
                assert caller.failed() == 0
                expected = expected_beside(server, layers, layer, given, ids, weights)
                assert torch.equal(out, expected)
                given = out


def test_sequences_begin_again(server: Server, layers: Layers) -> None:
    """After 2^40 calls of a slot."""
    last = 2**40 - 1
    caller, generator = Caller(server, 0, 64, [0], last - 2), fresh_generator(str(CALLER))
    server.start()
    with torch.cuda.device(CALLER):
        made = [(inputs(3, generator), poisoned(3)) for _ in range(5)]
        for given, out in made:
            caller.call(*given, out)
        torch.cuda.current_stream(CALLER).synchronize()
    server.stop()
    assert (caller.failed(), int(caller.answer)) == (0, 2)
    assert all(torch.equal(out, layers.expected(0, *given)) for given, out in made)


def expected_beside(server: Server, layers: Layers, *operands: Any) -> Tensor:
    """By the server's GPU, between two of its graph's runs."""
    server.stop()
    expected = layers.expected(*operands)
    server.start()
    return expected


def test_many_callers_at_once(server: Server, layers: Layers) -> None:
    """Steps take the calls of one layer that are there, up to the largest graph, and all get their turn."""
    generator = fresh_generator(str(CALLER))
    indices = [0, 1, 31, 32, 100, 254, 255]
    callers = [Caller(server, index, 128, list(range(LAYERS))) for index in indices]
    made: list[tuple[int, tuple[Tensor, Tensor, Tensor], Tensor]] = []
    with torch.cuda.device(CALLER):
        streams = [torch.cuda.Stream(CALLER) for _ in callers]  # type: ignore[no-untyped-call]
        for number in range(len(callers)):
            for turn in range(20):
                layer, count = (number + turn) % LAYERS, int(torch.randint(0, 129, ()))
                made.append((layer, inputs(count, generator), poisoned(count)))
        torch.cuda.synchronize(CALLER)
        # A kernel's first launch loads it, which waits for kernels that run: have one before those that wait.
        server.start()
        callers[0].call(*inputs(1, generator), poisoned(1))
        torch.cuda.synchronize(CALLER)
        server.stop()
        remaining = iter(made)
        for caller, stream in zip(callers, streams, strict=True):
            with torch.cuda.stream(stream):
                for layer, (x, ids, weights), out in itertools.islice(remaining, 20):
                    caller.call(x, ids, weights, out, layer)
        server.start()
        for stream in streams:
            stream.synchronize()
    server.stop()
    assert not any(caller.failed() for caller in callers)
    for layer, given, out in made:
        if len(out):
            assert torch.equal(out, layers.expected(layer, *given))
    counts = [server.calls.counts_of(layer) for layer in range(LAYERS)]
    assert sum(each.calls for each in counts) == 1 + len(made)
    assert sum(each.tokens for each in counts) == 1 + sum(len(out) for _, _, out in made)
    assert sum(each.steps for each in counts) < len(made)


@pytest.mark.parametrize(
    "lie", [(1, 65, 0), (1, 4095, 0), (1, 1, LAYERS), (1, 1, 4095), (2, 1, 0), (2**40 - 1, 1, 0)]
)
def test_a_lying_header_ends_its_slot_alone(
    server: Server, layers: Layers, lie: tuple[int, int, int]
) -> None:
    """It is answered without output, and told to the host; another slot's calls go on."""
    liar, other = (Caller(server, index, 64, list(range(LAYERS))) for index in (3, 4))
    generator = fresh_generator(str(CALLER))
    server.start()
    lying = word(header(*lie)).to(CALLER)
    with torch.cuda.device(CALLER):
        stream = torch.cuda.Stream(CALLER)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            liar.header.copy_(lying, non_blocking=True)
            stream.synchronize()
            end = time.monotonic() + LIMIT_SECONDS
            while not server.calls.has_fault(3) and time.monotonic() < end:
                pass
            given, out = inputs(9, generator), poisoned(9)
            other.call(*given, out, 1)
            stream.synchronize()
    server.stop()
    assert [server.calls.has_fault(index) for index in (3, 4, 5)] == [True, False, False]
    assert int(liar.answer) == lie[0] - 2**63
    assert torch.equal(out, layers.expected(1, *given))


def test_a_call_waits_for_the_graph(server: Server, layers: Layers) -> None:
    """What is made while it does not run is answered once it does."""
    caller, generator = Caller(server, 0, 64, [0]), fresh_generator(str(CALLER))
    server.start()
    server.stop()
    with torch.cuda.device(CALLER):
        given, out = inputs(3, generator), poisoned(3)
        torch.cuda.synchronize(CALLER)
        caller.call(*given, out)
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(torch.cuda.current_stream(CALLER))
        time.sleep(0.05)
        assert not ended.query()  # type: ignore[no-untyped-call]
        server.start()
        ended.synchronize()
    server.stop()
    assert torch.equal(out, layers.expected(0, *given))


def test_a_call_without_an_answer_is_nan(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are those after it, at once."""
    monkeypatch.setattr("tests.kernels.test_device_calls_gpu.LIMIT_SECONDS", 0.05)
    caller, generator = Caller(server, 0, 64, [0]), fresh_generator(str(CALLER))
    with torch.cuda.device(CALLER):
        outs = [torch.zeros(3, H, dtype=torch.bfloat16, device=CALLER) for _ in range(2)]
        for out in outs:
            caller.call(*inputs(3, generator), out)
        torch.cuda.current_stream(CALLER).synchronize()
    assert caller.failed() == 1
    assert all(bool(out.isnan().all()) for out in outs)


def test_a_refused_call_is_nan(server: Server) -> None:
    caller = Caller(server, 0, 64, [0])
    server.start()
    with torch.cuda.device(CALLER):
        out = torch.zeros(3, H, dtype=torch.bfloat16, device=CALLER)
        caller.call(*inputs(3, fresh_generator(str(CALLER))), out, model=1)
        torch.cuda.current_stream(CALLER).synchronize()
    server.stop()
    assert caller.failed() == 2
    assert bool(out.isnan().all())


def test_all_slots_are_free_at_first() -> None:
    calls = CallTable(SERVER, 1)
    assert not any(calls.has_fault(index) for index in range(MAX_SLOTS))
    assert calls.counts_of(0) == (0, 0, 0, 0)
