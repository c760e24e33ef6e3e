"""Decode steps with remote experts, on a GPU's stream: `python -m benchmarks stream_steps [--json FILE]`.

A server has MoE layers of Qwen3-30B-A3B's shape, with random weights, on the first GPU. One caller, on the
second GPU if there is one, computes steps of `--layers` layers: in each, the GPU is busy for `--between` us,
as attention would keep it, tensors are copied to the channel's memory, a request is made, and its output is
copied back.

way       stream: `enqueue` and `enqueue_wait`; host: `submit` and `wait`, which wait for the GPU
step      ms, between the ends of two steps, with the host as far ahead as it gets; median and 99th percentile
layer     us of it, without what is between
host      us that the caller's thread takes for a layer, while the GPU is busy with something else: all, and
          copies in, enqueue, enqueue_wait, copy out
exchange  us of the stream, by CUDA events, from before it writes the request's word to after it has seen the
          answer's
queue     us of it that the server says the request waited; compute: that its step took; other: the rest
pair      us of the stream for a write of a word and a wait for what is there already
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import expect_gpu, header
from benchmarks.serving.rows import server
from expertd_client import ExpertClient

Row = dict[str, Any]
HIDDEN, TOP_K, NUM_EXPERTS = 2048, 8, 128
STEPS, WARM_UP, AHEAD = 200, 50, 4
BUSY_CYCLES = 40_000_000  # of the GPU, while the host's time is measured: some 20 ms
CONFIG = """
models: [{models}]
channels: {{socket: {folder}/channels}}
"""
LAYER = "{{name: {name}, hidden_size: 2048, intermediate_size: 768, num_experts: 128, top_k: 8}}"


def model_names(layers: int) -> list[str]:
    """Of the server's layers."""
    return [f"qwen3.layers.{number}" for number in range(layers)]


def config(layers: int, folder: str) -> str:
    """The server's settings, as YAML."""
    models = ", ".join(LAYER.format(name=name) for name in model_names(layers))
    return CONFIG.format(models=models, folder=folder)


HOST_PARTS = "copy in", "enqueue", "enqueue_wait", "copy out"


class Caller:
    """Steps of one number of tokens, through one channel, as `expertd-vllm` makes them."""

    def __init__(self, channel: Any, way: str, tokens: int, between_cycles: int) -> None:
        self.channel, self.way, self.tokens, self.between = channel, way, tokens, between_cycles
        device = channel.slots[0].hidden_states.device
        self.x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        scores = torch.rand(tokens, NUM_EXPERTS, device=device)
        self.ids = scores.topk(TOP_K).indices.to(torch.int32)
        self.weights = torch.rand(tokens, TOP_K, device=device)
        self.out = torch.empty_like(self.x)
        self.times = [0.0] * 4  # seconds of the host so far, for each part of a layer
        self.requests: list[Any] = []
        self.marks: list[tuple[Any, Any]] | None = None  # events around exchanges, if they are recorded

    def layer(self, number: int) -> None:
        """One layer, enqueued."""
        channel, now = self.channel, time.perf_counter
        slot, model = channel.slots[number % 2], channel.models[number]
        if self.between:
            torch.cuda._sleep(self.between)  # type: ignore[no-untyped-call]
        begin = now()
        views = slot.first(self.tokens)
        for target, source in zip(views, (self.x, self.ids, self.weights), strict=False):
            target.copy_(source)
        copied = now()
        if self.way == "host":
            request = channel.submit(slot, self.tokens, routed=True, model=model)
            sent = now()
            output = channel.wait(request)
        elif self.marks is None:
            request = channel.enqueue(slot, self.tokens, routed=True, model=model)
            sent = now()
            output = channel.enqueue_wait(request)
        else:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            request = channel.enqueue(slot, self.tokens, routed=True, model=model)
            sent = now()
            output = channel.enqueue_wait(request)
            after.record()
            self.marks.append((before, after))
        waited = now()
        self.out.copy_(output)
        end = now()
        for part, seconds in enumerate((copied - begin, sent - copied, waited - sent, end - waited)):
            self.times[part] += seconds
        self.requests.append(request)

    def step(self) -> Any:
        """All layers, and an event at the end."""
        for number in range(len(self.channel.models)):
            self.layer(number)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def step_seconds(self) -> list[float]:
        """Of the stream, for each step; the host is at most `AHEAD` steps ahead, as vLLM is."""
        ends: list[Any] = []
        for _ in range(WARM_UP + STEPS):
            ends.append(self.step())
            if len(ends) > AHEAD:
                ends[-AHEAD - 1].synchronize()
        torch.cuda.synchronize()
        ends = ends[WARM_UP:]
        return [one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(ends)]

    def host_us(self) -> list[float]:
        """Of each part of a layer, while the GPU is busy, so that nothing is there to wait for."""
        layers = len(self.channel.models)
        samples: list[list[float]] = []
        for _ in range(20):
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            self.times = [0.0] * 4
            between, self.between = self.between, 0
            self.step()
            self.between = between
            samples.append([1e6 * seconds / layers for seconds in self.times])
        torch.cuda.synchronize()
        return [statistics.median(part) for part in zip(*samples, strict=True)]

    def exchange_us(self) -> dict[str, float]:
        """Medians of an exchange and its parts."""
        samples: list[tuple[float, float, float]] = []
        for _ in range(20):
            self.marks, self.requests = [], []
            self.step()
            torch.cuda.synchronize()
            time.sleep(2e-3)  # the server writes times a little later
            for (before, after), request in zip(self.marks, self.requests, strict=True):
                if (times := request.times()) is not None:
                    samples.append((1e3 * before.elapsed_time(after), 1e6 * times[0], 1e6 * times[1]))
        self.marks = None
        exchange, queue, compute = (statistics.median(part) for part in zip(*samples, strict=True))
        return {"exchange": exchange, "queue": queue, "compute": compute, "other": exchange - queue - compute}


def cycles_per_us() -> float:
    """Of `torch.cuda._sleep`."""
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        end.record()
        torch.cuda.synchronize()
    cycles: float = BUSY_CYCLES / begin.elapsed_time(end) / 1e3
    return cycles


def pair_us(channel: Any) -> float:
    """Of the stream, for a write and a wait that is over at once."""
    enqueuer = channel._enqueuer
    stream, address = enqueuer._stream, next(iter(enqueuer._addresses.values())) + 208
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(100):
        stream.write(address, 0)
        stream.wait(address, 0)
    end.record()
    torch.cuda.synchronize()
    return 10 * float(begin.elapsed_time(end))


def measure(make: Callable[[], Any], way: str, tokens: int, between_us: float) -> Row:
    """One row."""
    with make() as channel:
        caller = Caller(channel, way, tokens, int(between_us * cycles_per_us()))
        steps = sorted(caller.step_seconds())
        median, layers = statistics.median(steps), len(channel.models)
        row: Row = {"way": way, "tokens": tokens, "between_us": between_us, "step_ms": 1e3 * median}
        row |= {"p99_ms": 1e3 * steps[int(0.99 * len(steps))]}
        row |= {"layer_us": 1e6 * median / layers - between_us}
        if way == "stream":
            row |= {
                "host_us": dict(zip(HOST_PARTS, caller.host_us(), strict=True)),
                "exchange_us": caller.exchange_us(),
            }
            row |= {"pair_us": pair_us(channel)}
        return row


def main() -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", default="1,16,64", help="of a step, separated by commas")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--between", default="0,100", help="us for which the GPU is busy before each request")
    parser.add_argument("--ways", default="stream,host")
    parser.add_argument("--url", help="of a server that is there, with the same layers")
    options = parser.parse_args()
    expect_gpu("benchmarks stream_steps")
    index = 1 if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    result = Result(options.json, header() | {"caller": f"GPU {index}"})
    if options.url:
        run(options, options.url, index, result)
    else:
        with server(1, layers=options.layers, make_config=config) as (url, _):
            run(options, url, index, result)


def run(options: argparse.Namespace, url: str, index: int, result: Result) -> None:
    """All rows."""
    with ExpertClient(url, retry_seconds=10) as client:
        for way in options.ways.split(","):
            for tokens in map(int, options.tokens.split(",")):
                for between in map(float, options.between.split(",")):

                    def make(tokens: int = tokens) -> Any:
                        names = model_names(options.layers)
                        device = f"cuda:{index}"
                        return client.open_channel(
                            names, max_tokens=max(64, tokens), num_slots=2, datatype="BF16", device=device
                        )

                    result.put(measure(make, way, tokens, between))
