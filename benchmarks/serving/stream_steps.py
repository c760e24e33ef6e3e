"""Decode steps with remote experts, on a GPU's stream: `python -m benchmarks stream_steps [--json FILE]`.

A server has MoE layers of Qwen3-30B-A3B's shape, with random weights, on the first GPU. A caller, on the
second GPU if there is one, computes steps of `--layers` layers: in each, the GPU is busy for `--between` us,
as attention would keep it, and a request is made. In each row, outputs must have the bits of those by HTTP.

way       stream: `enqueue` and `enqueue_wait`, with copies to the channel's memory and from it; host: the
          same with `submit` and `wait`, which wait for the GPU; graph: calls of a device channel, all of a
          step in one CUDA graph, which is replayed
callers   at the same time, each with a channel and a stream of its own; more than one only of graph
step      ms, between the ends of two steps of a caller, with the host as far ahead as it gets; median and
          99th percentile
layer     us of it, without what is between
calls     per second, of all callers together
host      us that the caller's thread takes for a layer, while the GPU is busy with something else: copies
          in, enqueue, enqueue_wait, copy out; of graph: the replay of a step, by its layers
exchange  us of the stream, by CUDA events, from before it writes the request's word to after it has seen the
          answer's
queue     us of it that the server says the request waited; compute: that its step took; other: the rest
pair      us of the stream for a write of a word and a wait for what is there already
own       us of a layer on the server's GPU alone, by a CUDA graph of all layers that has no caller
over      us of a layer above own, if there is one caller
link      us of a call's hidden states there and of its output back, at the rate of a copy of 256 MiB to the
          server's GPU; absent if that is the caller's
server    us of a step at the server, by its metrics: from when its GPU has seen calls until it has answered
          them. What exceeds own is the server's share of over; the rest is the caller's and the link's;
          absent with --lanes

--lanes  the server has two lanes, so its host launches the steps of calls, as those with ranks do
"""

import argparse
import itertools
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import expect_gpu, header
from benchmarks.serving.rows import counted, server
from expertd.kernels import fused_experts
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, random_weights
from expertd_client import ExpertClient

Row = dict[str, Any]
WAYS = "stream", "host", "graph"
HIDDEN, TOP_K, NUM_EXPERTS = 2048, 8, 128
SHAPE = LayerShape(HIDDEN, 768, NUM_EXPERTS, TOP_K)
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
STEPS, WARM_UP, AHEAD = 200, 50, 4
MAX_CALLERS = 32  # streams that torch has
CALL_STEPS = "expertd_device_call_seconds_total", "expertd_device_call_steps_total"
COPIED_BYTES = 256 << 20
BUSY_CYCLES = 40_000_000  # of the GPU, while the host's time is measured: some 20 ms
CONFIG = """
models: [{models}]
channels: {{socket: {folder}/channels}}
"""
LANES = "lanes: {decode_max_tokens: 512, decode_batch_tokens: 512}\n"
LAYER = "{{name: {name}, hidden_size: 2048, intermediate_size: 768, num_experts: 128, top_k: 8}}"


class Case(NamedTuple):
    """One row."""

    way: str  # of `WAYS`
    tokens: int
    between_us: float
    callers: int


class Alone(NamedTuple):
    """What a call is made of.

    own_us             of a layer, by the tokens
    link_bytes_per_us  None: the caller is on the server's GPU
    """

    own_us: dict[int, float]
    link_bytes_per_us: float | None = None

    def beside(self, row: Row) -> Row:
        """More columns of a row."""
        own = self.own_us[row["tokens"]]
        columns = {"own_us": own}
        if row["callers"] == 1:
            columns["over_us"] = row["layer_us"] - own
        if self.link_bytes_per_us is not None:
            columns["link_us"] = 2 * row["tokens"] * HIDDEN * torch.bfloat16.itemsize / self.link_bytes_per_us
        return columns


def model_names(layers: int) -> list[str]:
    """The models of the server's layers."""
    return [f"qwen3.layers.{number}" for number in range(layers)]


def config(layers: int, folder: str) -> str:
    """The server's settings, as YAML."""
    models = ", ".join(LAYER.format(name=name) for name in model_names(layers))
    return CONFIG.format(models=models, folder=folder)


class Caller(ABC):
    """Steps of one number of tokens, the same each time, on a stream.

    between_cycles  for which the GPU is busy before each layer
    host_parts      of a layer, on the host
    """

    host_parts: tuple[str, ...]

    def __init__(self, names: Sequence[str], tokens: int, between_cycles: int, stream: Any) -> None:
        self.names, self.tokens, self.between, self.stream = names, tokens, between_cycles, stream
        self.given = inputs(tokens)
        self.outs = [torch.empty_like(self.given[0]) for _ in names]
        self.times = [0.0] * len(self.host_parts)  # seconds of the host so far

    @abstractmethod
    def enqueue_step(self) -> None:
        """Have the current stream compute all layers."""

    def step(self) -> Any:
        """A step, enqueued, and an event at its end."""
        with torch.cuda.stream(self.stream):
            self.enqueue_step()
            return recorded()

    def host_us(self) -> dict[str, float]:
        """Of each part of a layer, while the GPU is busy, so that nothing is there to wait for."""
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                keep_busy(BUSY_CYCLES)
            self.times = [0.0] * len(self.host_parts)
            self.step()
            samples.append([1e6 * seconds / len(self.names) for seconds in self.times])
        torch.cuda.synchronize()
        return dict(zip(self.host_parts, map(statistics.median, zip(*samples, strict=True)), strict=True))


class ChannelCaller(Caller):
    """By a channel on the current stream, as `expertd-vllm` makes requests. way: stream or host."""

    host_parts = "copy in", "enqueue", "enqueue_wait", "copy out"

    def __init__(self, channel: Any, way: str, tokens: int, between_cycles: int) -> None:
        super().__init__(channel.models, tokens, between_cycles, torch.cuda.current_stream())
        self.channel, self.way = channel, way
        self.exchanges: list[Any] | None = None  # events around them, and requests, if they are recorded

    def enqueue_step(self) -> None:
        """See `Caller`."""
        channel, now = self.channel, time.perf_counter
        send, wait = channel.enqueue, channel.enqueue_wait
        if self.way == "host":
            send, wait = channel.submit, channel.wait
        for number, (model, out) in enumerate(zip(self.names, self.outs, strict=True)):
            slot = channel.slots[number % 2]
            if self.between:
                keep_busy(self.between)
            begin = now()
            for target, source in zip(slot.first(self.tokens), self.given, strict=False):
                target.copy_(source)
            copied = now()
            before = recorded() if self.exchanges is not None else None
            request = send(slot, self.tokens, routed=True, model=model)
            sent = now()
            output = wait(request)
            if self.exchanges is not None:
                self.exchanges.append((before, recorded(), request))
            waited = now()
            out.copy_(output)
            end = now()
            for part, seconds in enumerate((copied - begin, sent - copied, waited - sent, end - waited)):
                self.times[part] += seconds

    def exchange_us(self) -> dict[str, float]:
        """Medians of an exchange and its parts."""
        samples: list[tuple[float, float, float]] = []
        for _ in range(20):
            self.exchanges = []
            self.step()
            torch.cuda.synchronize()
            time.sleep(2e-3)  # the server writes times a little later
            for before, after, request in self.exchanges:
                if (times := request.times()) is not None:
                    samples.append((1e3 * before.elapsed_time(after), 1e6 * times[0], 1e6 * times[1]))
        self.exchanges = None
        exchange, queue, compute = (statistics.median(part) for part in zip(*samples, strict=True))
        return {"exchange": exchange, "queue": queue, "compute": compute, "other": exchange - queue - compute}

    def pair_us(self) -> float:
        """Microseconds of the stream for a write and a wait that is over at once."""
        enqueuer = self.channel._enqueuer
        stream, address = enqueuer._stream, next(iter(enqueuer._addresses.values())) + 208
        begin = recorded()
        for _ in range(100):
            stream.write(address, 0)
            stream.wait(address, 0)
        end = recorded()
        torch.cuda.synchronize()
        return 10 * float(begin.elapsed_time(end))


class GraphCaller(Caller):
    """By a device channel with one slot, in a CUDA graph on a stream of its own."""

    host_parts = ("replay",)

    def __init__(self, channel: Any, names: Sequence[str], tokens: int, between_cycles: int) -> None:
        super().__init__(names, tokens, between_cycles, torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self.channel, self.graph = channel, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for name, out in zip(names, self.outs, strict=True):
                if between_cycles:
                    keep_busy(between_cycles)
                channel.call(*self.given, out, model=name)

    def enqueue_step(self) -> None:
        """See `Caller`. Raises ServerUnreachableError after a failure of an earlier step."""
        self.channel.check()
        begin = time.perf_counter()
        self.graph.replay()
        self.times[0] += time.perf_counter() - begin


def inputs(tokens: int) -> Given:
    """Random hidden states, topk_ids and topk_weights; the same each time, as the experts they name count."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda", generator=generator)
    ids = torch.rand(tokens, NUM_EXPERTS, device="cuda", generator=generator).topk(TOP_K).indices
    return x, ids.to(torch.int32), torch.rand(tokens, TOP_K, device="cuda", generator=generator)


def alone_us(weights: Sequence[ExpertWeights], tokens: int) -> float:
    """Of a layer on the current GPU: the median of a CUDA graph of these, by their number."""
    given, out = inputs(tokens), torch.empty(tokens, HIDDEN, device="cuda")

    def step() -> None:
        for each in weights:
            fused_experts(*given, each.gate_up, each.down, out=out, backend="hopper")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        step()
    ends = []
    for _ in range(WARM_UP + STEPS):
        graph.replay()
        ends.append(recorded())
    torch.cuda.synchronize()
    steps = [one.elapsed_time(other) for one, other in itertools.pairwise(ends[WARM_UP:])]
    median: float = statistics.median(steps)
    return 1e3 * median / len(weights)


def copied_per_us(index: int) -> float:
    """Bytes of a copy from a GPU to the first one: the median of some large ones."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    target = torch.empty_like(source, device="cuda:0")
    ends = []
    with torch.cuda.device(index):
        for _ in range(20):
            target.copy_(source, non_blocking=True)
            ends.append(recorded())
        torch.cuda.synchronize()
    times = [one.elapsed_time(other) for one, other in itertools.pairwise(ends)]
    return COPIED_BYTES / 1e3 / float(statistics.median(times))


def recorded() -> Any:
    """An event that the current stream comes to."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def keep_busy(cycles: int) -> None:
    """Keep the current stream busy for this many cycles of the GPU."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def cycles_per_us() -> float:
    """The cycles in which `keep_busy` keeps the GPU busy for a microsecond."""
    for _ in range(2):
        begin = recorded()
        keep_busy(BUSY_CYCLES)
        end = recorded()
        torch.cuda.synchronize()
    cycles: float = BUSY_CYCLES / begin.elapsed_time(end) / 1e3
    return cycles


def ends_of_steps(callers: Sequence[Caller]) -> list[list[Any]]:
    """Of each caller, `STEPS` events; the host is at most `AHEAD` steps ahead, as vLLM is."""
    ends: list[list[Any]] = [[] for _ in callers]
    for _ in range(WARM_UP + STEPS):
        for caller, own in zip(callers, ends, strict=True):
            own.append(caller.step())
            if len(own) > AHEAD:
                own[-AHEAD - 1].synchronize()
    torch.cuda.synchronize()
    return [own[WARM_UP:] for own in ends]


def rates(ends: Sequence[Sequence[Any]], layers: int, between_us: float) -> Row:
    """Columns of times, from each caller's events at the ends of steps."""
    steps = sorted(one.elapsed_time(other) for own in ends for one, other in itertools.pairwise(own))
    median = statistics.median(steps)
    total_ms = max(first[0].elapsed_time(last[-1]) for first in ends for last in ends)
    return {
        "step_ms": median,
        "p99_ms": steps[int(0.99 * len(steps))],
        "layer_us": 1e3 * median / layers - between_us,
        "calls_per_s": 1e3 * layers * len(steps) / total_ms,
    }


def check(callers: Sequence[Caller], client: ExpertClient) -> None:
    """Compare the outputs of a step of all callers at once with those by HTTP. Raises RuntimeError."""
    for caller in callers:
        for out in caller.outs:
            out.fill_(torch.nan)
    torch.cuda.synchronize()
    for caller in callers:
        caller.step()
    torch.cuda.synchronize()
    for number, caller in enumerate(callers):
        given = [tensor.cpu() for tensor in caller.given]
        for name, out in zip(caller.names, caller.outs, strict=True):
            if not torch.equal(out.cpu(), client.infer(name, *given)):
                raise RuntimeError(f"caller {number}, {name}: expected the bits by HTTP, got others")


def measure(case: Case, url: str, client: ExpertClient, names: list[str], device: str) -> Row:
    """One row."""
    with ExitStack() as stack:
        callers = [make_caller(case, client, names, device, stack) for _ in range(case.callers)]
        before = counted(url, *CALL_STEPS)
        row = case._asdict() | rates(ends_of_steps(callers), len(names), case.between_us)
        if case.way == "graph":
            seconds, steps = (now - then for then, now in zip(before, counted(url, *CALL_STEPS), strict=True))
            if steps:
                row["server_us"] = 1e6 * seconds / steps
        check(callers, client)
        if case.way != "host":
            row["host_us"] = callers[0].host_us()
        if case.way == "stream" and isinstance(caller := callers[0], ChannelCaller):
            row |= {"exchange_us": caller.exchange_us(), "pair_us": caller.pair_us()}
    return row


def make_caller(case: Case, client: ExpertClient, names: list[str], device: str, stack: ExitStack) -> Caller:
    """A caller, whose channel is closed with `stack`."""
    cycles = int(case.between_us * cycles_per_us())
    options: Row = {"max_tokens": max(64, case.tokens), "device": device}
    if case.way == "graph":
        calls = stack.enter_context(client.open_device_channel(names, num_slots=1, **options))
        return GraphCaller(calls, names, case.tokens, cycles)
    channel = stack.enter_context(client.open_channel(names, num_slots=2, datatype="BF16", **options))
    return ChannelCaller(channel, case.way, case.tokens, cycles)


def main() -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", default="1,16,64", help="of a step, separated by commas")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--between", default="0,100", help="us for which the GPU is busy before each request")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--callers", default="1", help="of graph, at the same time, separated by commas")
    parser.add_argument("--lanes", action="store_true")
    parser.add_argument("--url", help="of a server that is there, with the same layers")
    options = parser.parse_args()
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways: expected some of {', '.join(WAYS)}, got {', '.join(sorted(unknown))}")
    callers = [int(number) for number in options.callers.split(",")]
    for number in callers:
        if not 1 <= number <= MAX_CALLERS:
            parser.error(f"--callers: expected 1 to {MAX_CALLERS}, got {number}")
    if max(callers) > 1:  # a stream that waits must not hold up others in the same hardware queue
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    expect_gpu("benchmarks stream_steps")
    index = 1 if torch.cuda.device_count() > 1 else 0
    with torch.cuda.device(0):  # before there is a server on the GPU
        weights = [random_weights(SHAPE, number, "cuda") for number in range(options.layers)]
        alone = Alone({tokens: alone_us(weights, tokens) for tokens in map(int, options.tokens.split(","))})
        del weights
    if index:
        alone = alone._replace(link_bytes_per_us=copied_per_us(index))
    torch.cuda.empty_cache()
    torch.cuda.set_device(index)
    result = Result(options.json, header() | {"caller": f"GPU {index}", "lanes": options.lanes})
    if options.url:
        run(options, options.url, f"cuda:{index}", alone, result)
    else:
        more = LANES if options.lanes else ""
        with server(1, layers=options.layers, make_config=lambda *given: config(*given) + more) as (url, _):
            run(options, url, f"cuda:{index}", alone, result)


def run(options: argparse.Namespace, url: str, device: str, alone: Alone, result: Result) -> None:
    """All rows."""
    given = options.ways.split(","), options.tokens.split(","), options.between.split(",")
    with ExpertClient(url, transport="http", retry_seconds=10) as client:
        for way, tokens, between in itertools.product(*given):
            for callers in options.callers.split(",") if way == "graph" else "1":
                case = Case(way, int(tokens), float(between), int(callers))
                row = measure(case, url, client, model_names(options.layers), device)
                result.put(row | alone.beside(row))
