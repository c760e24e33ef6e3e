"""Experts spread over the GPUs of one host: `python -m benchmarks.parallel [--ranks N] [--json FILE]`.

One process a GPU. Every row has a layer's experts on each GPU, and as many tokens on each, which go to the
experts of all. The columns: dispatch and combine alone (with nothing between them), the whole layer, the
layer of one GPU with the same rows for each of its experts (as tokens that go to its experts alone), and, if
DeepGEMM's wheel is installed, its SM90 Mega MoE over the same GPUs. All are replayed as CUDA graphs. L2 is
flushed before each call, a barrier on the device lines the ranks up, and events around the call are read on
every rank: a row has the median of the slowest rank's times.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks import deep_gemm_peer, layer_peers
from benchmarks.layer_problem import LAYERS, Layer, LayerProblem, make_problem, make_weights
from benchmarks.moe_layer import FLUSH_BYTES, graph_of
from benchmarks.timing import expect_gpu, header
from expertd.kernels.backends.hopper.combine_rows import combine_rows
from expertd.kernels.backends.hopper.compute_permutation import permutation_of_ranks
from expertd.kernels.backends.hopper.dispatch_rows import dispatch_rows
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import Kernels, current_stream
from expertd.kernels.backends.hopper.layer import Layer as HopperLayer
from expertd.kernels.backends.hopper.tiles import choose
from expertd.kernels.ops.activation import SILU
from expertd.kernels.rank_memory import RankMemory, RankTokens

Row = dict[str, Any]
TOKENS = (1, 16, 64, 128, 256, 1024, 4096)
REPEATS, WARM_UP = 20, 3
TIMEOUT_SECONDS = 2.0


class RankProblem:
    """One rank's calls for a row."""

    def __init__(self, own: LayerProblem, num_ranks: int) -> None:
        layer, self._own = own.layer, own
        num_tokens = own.hidden_states.shape[0]
        group = dist.group.WORLD
        assert group is not None
        sizes = (num_tokens, num_ranks * num_tokens, layer.hidden_size, layer.top_k)
        self._memory = RankMemory(group, own.out.device, *sizes, TIMEOUT_SECONDS)
        experts = num_ranks * layer.num_experts
        places = [e // layer.num_experts << 16 | e % layer.num_experts for e in range(experts)]
        on_device = torch.tensor(places, dtype=torch.int32, device=own.out.device)
        self._tokens = RankTokens.of([num_tokens] * num_ranks, on_device)
        drawn = torch.rand(num_tokens, experts, device=own.out.device).argsort(dim=1)
        self.topk_ids = drawn[:, : layer.top_k].to(torch.int32).contiguous()
        self._kernels = Kernels()
        self._layer = HopperLayer(self._kernels, GroupedGemm(self._kernels, choose))
        pairs = num_ranks * num_tokens * layer.top_k
        self._rows = torch.zeros(pairs, layer.hidden_size, dtype=torch.bfloat16, device=own.out.device)

    def layer(self) -> None:
        """The whole layer."""
        own, on = self._own, current_stream(self._own.out.device.index)
        self._layer.parallel_experts(
            on, self._memory, self._tokens, own.hidden_states, self.topk_ids, own.topk_weights,
            own.weights.gate_up, own.weights.down, own.out, SILU, None, None,
        )  # fmt: skip

    def exchange(self) -> None:
        """Dispatch and combine, with nothing between them."""
        own, kernels, memory, tokens = self._own, self._kernels, self._memory, self._tokens
        on, num_groups = current_stream(own.out.device.index), own.layer.num_experts
        routing = self.topk_ids, own.topk_weights
        inverse = permutation_of_ranks(kernels, on, memory, tokens, *routing, num_groups, None).inverse
        dispatch_rows(kernels, on, memory, tokens, own.hidden_states, self.topk_ids, inverse, None)
        combine_rows(kernels, on, memory, tokens, *routing, self._rows, inverse, own.out, None)

    def check(self) -> None:
        """Raise RuntimeError if a rank was late."""
        torch.cuda.synchronize()
        if self._memory.late_rank is not None:
            raise RuntimeError(f"rank {self._memory.late_rank} was late")


def same_work(own: LayerProblem, topk_ids: Tensor) -> LayerProblem:
    """The pairs of all ranks' tokens that go to this GPU's experts, as tokens with `top_k` of them each."""
    every = [torch.empty_like(topk_ids) for _ in range(dist.get_world_size())]
    dist.all_gather(every, topk_ids)
    ids = torch.cat(every).flatten() - dist.get_rank() * own.layer.num_experts
    ids = ids[(ids >= 0) & (ids < own.layer.num_experts)]
    top_k, missing = own.layer.top_k, -ids.numel() % own.layer.top_k
    ids = torch.nn.functional.pad(ids, (0, missing), value=-1).view(-1, top_k)
    hidden_states = torch.randn(len(ids), own.layer.hidden_size, device="cuda").to(torch.bfloat16)
    out, weights = torch.empty_like(hidden_states), torch.rand(len(ids), top_k, device="cuda")
    return LayerProblem(own.layer, own.weights, hidden_states, ids, weights, out)


def microseconds(call: Callable[[], object], barrier: Callable[[], object]) -> float:
    """The median of the slowest rank's times; collective."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    times = torch.empty(REPEATS)
    for repeat in range(-WARM_UP, REPEATS):
        dist.barrier()
        flush.fill_(1)  # meanwhile the host enqueues the rest
        barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times[max(0, repeat)] = 1e3 * start.elapsed_time(end)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.median())


def device_barrier() -> Callable[[], object]:
    """A barrier of all ranks on the current stream."""
    import torch.distributed._symmetric_memory as symmetric_memory

    signals = symmetric_memory.empty(1, dtype=torch.uint8, device=torch.device("cuda", dist.get_rank()))
    assert dist.group.WORLD is not None
    handle = symmetric_memory.rendezvous(signals, dist.group.WORLD)
    return lambda: handle.barrier(channel=0)


def run(rank: int, num_ranks: int, port: int, tokens: Sequence[int], json_file: Path | None) -> None:
    """All rows, on one rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)  # tokens of their own
    limit = timedelta(seconds=300)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=num_ranks, timeout=limit)
    barrier = device_barrier()
    with_peer = deep_gemm_peer.available() and layer_peers.has_mega_moe()
    rows = []
    for layer in LAYERS:
        weights = make_weights(layer)
        for num_tokens in tokens:
            own = make_problem(layer, weights, num_tokens)
            row = measure(own, layer, num_ranks, barrier, with_peer)
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
                if json_file:
                    content = {"about": header() | {"ranks": num_ranks}, "rows": rows}
                    json_file.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()


def measure(
    own: LayerProblem, layer: Layer, num_ranks: int, barrier: Callable[[], object], with_peer: bool
) -> Row:
    """One row; collective."""
    problem = RankProblem(own, num_ranks)
    row: Row = {"layer": layer.name, "tokens": own.hidden_states.shape[0]}
    calls = {
        "exchange_us": problem.exchange,
        "layer_us": problem.layer,
        "one_gpu_us": same_work(own, problem.topk_ids).run,
    }
    for name, call in calls.items():
        row[name] = microseconds(graph_of(call), barrier)
        problem.check()
    if with_peer:
        everywhere = Layer(
            layer.name, layer.hidden_size, layer.intermediate_size, num_ranks * layer.num_experts, layer.top_k
        )
        spread = LayerProblem(
            everywhere, own.weights, own.hidden_states, problem.topk_ids, own.topk_weights, own.out
        )
        row["mega_moe_us"] = microseconds(graph_of(layer_peers.mega_moe(spread)), barrier)
        row["over_mega_moe"] = row["layer_us"] / row["mega_moe_us"]
    return row


def main() -> int:
    """Start a process for each GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    expect_gpu("parallel")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (given.ranks, port, given.tokens, given.json)
    multiprocessing.spawn(run, arguments, given.ranks)  # type: ignore[attr-defined, no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
