"""Times the MoE layer in both layouts over token counts, to find where to switch layouts.

`python -m benchmarks.layouts [--backend NAME] [--shape NAME] [--tokens N ...] [--graph] [--runs N]`.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import cpu_name
from expertd.kernels import resolve_backend
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights

SHAPES = {
    "demo": LayerShape(512, 256, 16, 4),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 8),
    "deepseek-v3": LayerShape(7168, 2048, 256, 8),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    """Print the machine, the method and one row per number of tokens."""
    arguments = _arguments()
    shape, backend = SHAPES[arguments.shape], resolve_backend(arguments.backend)
    device = backend.device
    print(f"{_machine(device)}; torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{arguments.shape}: {shape}; backend {backend.name}; bfloat16 in, routed by the layer's router")
    print(
        f"milliseconds per {'graph replay' if arguments.graph else 'call'} on the host clock, "
        f"device idle before and after: median of {arguments.runs}"
    )
    backend.warm_up()
    weights = random_weights(shape, 0, device)
    masked, contiguous = (
        MoELayer(shape, weights, backend, masked_max_tokens=most) for most in (max(arguments.tokens), 0)
    )
    generator = torch.Generator(device).manual_seed(0)
    print(f"{'tokens':>8}{'masked':>12}{'contiguous':>12}{'ratio':>8}")
    for num_tokens in arguments.tokens:
        size = (num_tokens, shape.hidden_size)
        hidden_states = torch.randn(size, device=device, generator=generator).to(torch.bfloat16)
        times = _interleaved(
            [_call(layer, hidden_states, arguments.graph) for layer in (masked, contiguous)],
            arguments.runs,
            device,
        )
        print(f"{num_tokens:>8}{times[0]:>12.3f}{times[1]:>12.3f}{times[0] / times[1]:>8.2f}", flush=True)


def _call(layer: MoELayer, hidden_states: Tensor, graph: bool) -> Callable[[], object]:
    if not graph:
        return lambda: layer(hidden_states)
    with torch.inference_mode():
        layer(hidden_states)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            layer(hidden_states)
    return captured.replay


def _interleaved(calls: list[Callable[[], object]], runs: int, device: torch.device) -> list[float]:
    """Median milliseconds of each call, taken in turns so that a busy moment affects all of them."""
    seconds: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for run in range(runs + 3):
            for call, taken in zip(calls, seconds, strict=True):
                start = _now(device)
                call()
                if run >= 3:
                    taken.append(_now(device) - start)
    return [1e3 * statistics.median(taken) for taken in seconds]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto", help="auto, hopper or reference")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--graph", action="store_true", help="GPU: replay a CUDA graph, without launch costs")
    parser.add_argument("--runs", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
