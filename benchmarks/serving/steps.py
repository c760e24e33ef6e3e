"""What a step costs besides the GPU's work: `python -m benchmarks steps [--tokens N ...] [--json FILE]`.

DeepSeek-V3's layer with all 256 experts, bf16, driven through the executor as the server does, without HTTP.
For each number of tokens: the GPU's time for the layer with its router (up to 256 tokens a CUDA graph, else
its launches; CUDA events, median), and the mean of compute_seconds with the rows in pinned memory of the
host, in the GPU's memory, and as bytes. Then streams of large steps, of which some are always queued.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.lib.run import Result, line_of, new_parser
from benchmarks.lib.timing import expect_gpu, header
from expertd.kernels import Routing, resolve_backend
from expertd.service.device import device_of
from expertd.service.engine.executor import Executor
from expertd.service.engine.lane import StepLane
from expertd.service.engine.local_models import capture_graphs
from expertd.service.engine.steps import Submission
from expertd.service.memory import Buffer, Span
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.staging import Staging
from expertd.service.moe.weights import random_weights
from expertd.service.settings.parts import Limits

Row = dict[str, Any]
TOKENS = (1, 8, 64, 256, 512, 1024, 4096)
SHAPE = LayerShape(7168, 2048, 256, 8)
ROUTING = Routing("sigmoid", True, 2.5, num_expert_groups=8, topk_group=4)
PCIE_BYTES_PER_SECOND = 50e9  # each way, of the goal
MEMORIES = ("pinned", "device", "bytes")
REPEATS, STREAM = 30, 40
GPU_SECONDS = 1.5  # as long as its callers keep it busy: its clock depends on that


class Steps:
    """Observes the executor's steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        self.seconds.append(result.compute_seconds)

    def step_failed(self, model: str, num_requests: int) -> None:
        raise RuntimeError("a step failed: see the log")


def place(tensor: torch.Tensor, memory: str) -> Buffer | Span:
    """A copy of `tensor` in this kind of memory."""
    data = tensor.contiguous().view(torch.uint8).view(-1)
    if memory == "device":
        copy = data.cuda()
        return Span(copy.data_ptr(), copy.numel(), 0, None, copy)
    if memory == "pinned":
        copy = data.cpu().pin_memory()
        return Span(copy.data_ptr(), copy.numel(), None, memoryview(copy.numpy()), copy)  # type: ignore[arg-type]
    return data.cpu().numpy().tobytes()


def tokens_of(num_tokens: int) -> torch.Tensor:
    """Random tokens, the same at every call: others would choose more experts, or fewer."""
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, SHAPE.hidden_size, generator=generator).to(torch.bfloat16)


def request(num_tokens: int, memory: str) -> LayerRequest:
    """Tokens routed by the layer, with their output in the same kind of memory."""
    rows = tokens_of(num_tokens)
    out = place(torch.empty_like(rows), memory)
    return LayerRequest(
        num_tokens, place(rows, memory), "BF16", None, "INT32", None, "BF16",
        out if isinstance(out, Span) else None,
    )  # fmt: skip


async def stream(executor: Executor, requests: Sequence[LayerRequest], count: int, depth: int) -> float:
    """Seconds for `count` requests, of which `depth` are always queued or running."""
    loop = asyncio.get_running_loop()
    done, left, started = loop.create_future(), count, min(depth, count)

    def answered(output: OutputMemory | Exception) -> None:
        nonlocal left, started
        if isinstance(output, Exception):
            done.set_exception(output)
        left -= 1
        if left == 0:
            done.set_result(None)
        elif started < count:
            started += 1
            executor.submit(Submission("layer", requests[started % len(requests)], answered))

    begin = time.perf_counter()
    for index in range(depth):
        executor.submit(Submission("layer", requests[index % len(requests)], answered))
    await done
    return time.perf_counter() - begin


def make_layer() -> MoELayer:
    """DeepSeek-V3's layer with random weights."""
    weights = random_weights(SHAPE, 0, torch.device("cuda", 0))
    return MoELayer(SHAPE, weights, resolve_backend("hopper"), routing=ROUTING)


@torch.inference_mode()
def gpu_microseconds(layer: MoELayer, num_tokens: int) -> float:
    """The layer's own time with its router, replayed as a graph up to 256 tokens; the median of many."""
    rows = tokens_of(num_tokens).cuda()
    out = torch.empty_like(rows)
    call: Any = lambda: layer(rows, out=out)  # noqa: E731
    call()
    if num_tokens <= 256:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(rows, out=out)
        call = graph.replay
    times = []
    until = time.perf_counter() + GPU_SECONDS
    while time.perf_counter() < until:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return float(statistics.median(times))


async def measure(tokens: Sequence[int], result: Result) -> list[Row]:
    """The rows of steps, one by one, and all of streams."""
    device = device_of("cuda:0")
    layer = make_layer()
    staging = Staging(device)
    staging.prepare(4096, SHAPE.hidden_size, SHAPE.top_k, 2)
    runner = LayerRunner(layer, device, staging=staging)
    capture_graphs([runner], device, lambda: False)
    steps = Steps()
    executor = Executor(StepLane(Limits(), steps))
    executor.set_runners({"layer": runner})
    executor.start()
    for num_tokens in tokens:
        row: Row = {"tokens": num_tokens, "gpu_us": gpu_microseconds(layer, num_tokens)}
        for memory in MEMORIES:
            requests = [request(num_tokens, memory) for _ in range(2)]
            await stream(executor, requests, 3, 1)
            await asyncio.sleep(0.05)
            steps.seconds.clear()
            took = await stream(executor, requests, REPEATS, 1)
            await asyncio.sleep(0.05)
            row[f"{memory}_us"] = 1e6 * statistics.mean(steps.seconds)
            row[f"{memory}_caller_us"] = 1e6 * took / REPEATS
        copied = 2 * num_tokens * SHAPE.hidden_size * 2 / PCIE_BYTES_PER_SECOND * 1e6
        row["goal_us"] = (
            row["gpu_us"] * (1 if num_tokens <= 256 else 1.05) + copied + (60 if num_tokens <= 256 else 0)
        )
        result.put(row)
    streams = []
    for memory in MEMORIES:
        for num_tokens in (1024, 4096):
            requests = [request(num_tokens, memory) for _ in range(4)]
            await stream(executor, requests, 4, 2)
            seconds = await stream(executor, requests, STREAM, 4)
            gpu = gpu_microseconds(layer, num_tokens)
            streams.append(
                {"memory": memory, "tokens": num_tokens, "us": 1e6 * seconds / STREAM, "gpu_us": gpu}
            )
            print(line_of(streams[-1]), flush=True)
    executor.stop(10)
    return streams


def main() -> int:
    """Print both tables, and write them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--only-gpu", action="store_true", help="print the GPU's times alone, by tokens")
    arguments = parser.parse_args()
    expect_gpu("benchmarks steps")
    if arguments.only_gpu:
        layer = make_layer()
        print(json.dumps({tokens: gpu_microseconds(layer, tokens) for tokens in arguments.tokens}))
        return 0
    result = Result(arguments.json, header())
    result.write(streams=asyncio.run(measure(arguments.tokens, result)))
    return 0
