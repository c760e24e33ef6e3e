"""Experts spread over the GPUs of one host: `python -m benchmarks parallel [--ranks N] [--json FILE]`.

One process a GPU, started here or by torchrun. Every GPU has a layer's experts, and tokens of its own, which
go to the experts of all. The sections:

rows     dispatch and combine with nothing between them, and by NCCL, each alone in a graph and several in a
         row; the whole layer; the layer of one GPU with the same rows for each of its experts (as tokens that
         go to its experts alone); and, if DeepGEMM's wheel is installed, its two grouped GEMMs alone on these
         rows, and its SM90 Mega MoE over the same GPUs
skewed   the same with experts drawn by Zipf's law, the same on all ranks
uneven   other numbers of tokens on each rank
growth   the whole layer on 1, 2, 4 and 8 GPUs, as many as there are, with the same work for each; for a few
         tokens, whose experts may be on any GPU, the median of several draws

All are replayed as CUDA graphs. `rank_timing` says how they are timed. A section that is not measured keeps
its rows in the file.
"""

import json
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from benchmarks.gemm import deep_gemm_peer
from benchmarks.layer import layer_peers
from benchmarks.layer.moe_layer import compile_peers, graph_of
from benchmarks.layer.problem import LayerProblem, make_problem, make_weights
from benchmarks.lib.processes import free_port
from benchmarks.lib.timing import expect_gpu
from benchmarks.ranks import nccl_peer
from benchmarks.ranks.parallel_options import about, options, write
from benchmarks.ranks.rank_timing import (
    IN_A_ROW,
    Ranks,
    first_ranks,
    gathered,
    graph_or_call,
    group_sizes,
    join,
    microseconds,
    of_next,
)
from benchmarks.ranks.rank_tokens import UNEVEN, all_experts, draw_experts, imbalance, same_work, spread
from expertd.kernels import resolve_backend
from expertd.kernels.backends.hopper.combine_rows import combine_rows
from expertd.kernels.backends.hopper.dispatch_rows import dispatch_rows
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.layer import HopperLayer as HopperLayer
from expertd.kernels.backends.hopper.permutation_of_ranks import permutation_of_ranks
from expertd.kernels.backends.hopper.plans import choose
from expertd.kernels.backends.streams import current_stream
from expertd.kernels.ops.activation import SILU
from expertd.kernels.rank_memory import RankMemory, RankTokens

Row = dict[str, Any]
SKEWED_TOKENS = (64, 256, 1024, 4096)
GROWTH_TOKENS = (1, 128, 1024, 4096)
GROWTH_DRAWS = {1: 5}  # by tokens; else one
TIMEOUT_SECONDS = 2.0


class RankProblem:
    """One rank's calls for a row.

    topk_ids  int32 [t, top_k] of its tokens, experts of all ranks
    counts    tokens of each rank
    """

    def __init__(self, own: LayerProblem, topk_ids: Tensor, counts: Sequence[int], ranks: Ranks) -> None:
        layer, self._own, self.topk_ids = own.layer, own, topk_ids
        sizes = (max(counts), sum(counts), layer.hidden_size, layer.top_k)
        self._memory = RankMemory(ranks.group, own.out.device, *sizes, TIMEOUT_SECONDS)
        experts = len(counts) * layer.num_experts
        places = [e // layer.num_experts << 16 | e % layer.num_experts for e in range(experts)]
        on_device = torch.tensor(places, dtype=torch.int32, device=own.out.device)
        self._tokens = RankTokens(tuple(counts), on_device)
        self._kernels = Kernels()
        self._layer = HopperLayer(self._kernels, GroupedGemm(self._kernels, choose))
        pairs = sum(counts) * layer.top_k
        self._rows = torch.randn(pairs, layer.hidden_size, dtype=torch.bfloat16, device=own.out.device)

    def layer(self) -> None:
        """The whole layer."""
        own, on = self._own, current_stream(self._own.out.device.index)
        self._layer.parallel_experts(
            on, self._memory, self._tokens, own.hidden_states, self.topk_ids, own.topk_weights,
            own.weights.gate_up, own.weights.down, own.out, SILU, None, None, None,
        )  # fmt: skip

    def exchange(self, times: int = 1) -> None:
        """Dispatch and combine with nothing between them; the sums of one time are the tokens of the next."""
        own, kernels, memory, tokens = self._own, self._kernels, self._memory, self._tokens
        on, num_groups = current_stream(own.out.device.index), own.layer.num_experts
        routing, hidden_states = (self.topk_ids, own.topk_weights), own.hidden_states
        for _ in range(times):
            inverse = permutation_of_ranks(kernels, on, memory, tokens, *routing, num_groups, None).inverse
            dispatch_rows(kernels, on, memory, tokens, hidden_states, self.topk_ids, inverse, None)
            combine_rows(kernels, on, memory, tokens, *routing, self._rows, inverse, own.out, None)
            hidden_states = own.out

    def check(self) -> None:
        """Raise RuntimeError if a rank was late."""
        torch.cuda.synchronize()
        if self._memory.late_rank is not None:
            raise RuntimeError(f"rank {self._memory.late_rank} was late")


def measure_call(call: Callable[[], object], problem: RankProblem, ranks: Ranks) -> float:
    """The time of a call of the problem's ranks, in us, as a CUDA graph; collective."""
    ranks.host_barrier()  # a launch does not wait long for the others
    us = microseconds(graph_of(call), ranks)
    problem.check()
    return us


def measure(
    own: LayerProblem, ranks: Ranks, zipf: float, peers: Sequence[str], more: Row | None = None
) -> Row:
    """One row of "rows", "skewed" or "uneven"; collective."""
    layer = own.layer
    experts = ranks.count * layer.num_experts
    topk_ids = draw_experts(len(own.hidden_states), experts, layer.top_k, zipf, "cuda")
    counts = [count for (count,) in gathered([len(topk_ids)], ranks)]
    every = all_experts(topk_ids, counts, ranks)
    same = same_work(own, every, ranks.rank)
    row: Row = {"layer": layer.name, "tokens": max(counts), "gpus": ranks.count} | (more or {})
    row["imbalance"] = imbalance(every, layer.num_experts)
    problem = RankProblem(own, topk_ids, counts, ranks)
    for name, call in (("exchange", problem.exchange), ("layer", problem.layer), ("one_gpu", same.run)):
        row[f"{name}_us"] = measure_call(call, problem, ranks)
    in_a_row = measure_call(partial(problem.exchange, IN_A_ROW), problem, ranks)
    row["exchange_next_us"] = of_next(in_a_row, row["exchange_us"])
    if "nccl" in peers:
        exchange = nccl_peer.NcclExchange(own.hidden_states, topk_ids, layer.num_experts, ranks)
        replay, row["nccl_captured"] = graph_or_call(exchange, ranks)
        row["nccl_us"] = microseconds(replay, ranks)
        replay, captured = graph_or_call(partial(exchange, IN_A_ROW), ranks)
        if captured and row["nccl_captured"]:
            row["nccl_next_us"] = of_next(microseconds(replay, ranks), row["nccl_us"])
    if "two_gemms" in peers:
        masked = max(counts) <= layer_peers.MASKED_MAX_TOKENS
        row["two_gemms_us"] = microseconds(graph_of(layer_peers.two_gemms(same, masked)), ranks)
        row["over_two_gemms"] = row["layer_us"] / row["two_gemms_us"]
    if "mega_moe" in peers and min(counts) > 0:
        ranks.host_barrier()
        mega_moe = layer_peers.mega_moe(spread(own, topk_ids, ranks.count), max(counts))
        row["mega_moe_us"] = microseconds(graph_of(mega_moe), ranks)
        row["over_mega_moe"] = row["layer_us"] / row["mega_moe_us"]
    return row


def measure_growth(own: LayerProblem, ranks: Ranks) -> Row:
    """One row of "growth"; collective."""
    layer, num_tokens = own.layer, len(own.hidden_states)
    row: Row = {"layer": layer.name, "tokens": num_tokens, "gpus": ranks.count}
    if ranks.count == 1:
        return row | {"layer_us": microseconds(graph_of(own.run), ranks)}
    times = []
    for _ in range(GROWTH_DRAWS.get(num_tokens, 1)):
        topk_ids = draw_experts(num_tokens, ranks.count * layer.num_experts, layer.top_k, 0.0, "cuda")
        problem = RankProblem(own, topk_ids, [num_tokens] * ranks.count, ranks)
        times.append(measure_call(problem.layer, problem, ranks))
    return row | {"layer_us": statistics.median(times), "draws": len(times)}


def sections(given: Namespace, ranks: Ranks) -> Iterator[tuple[str, Row]]:
    """Every row with its section, except for "growth"; collective."""
    for section in given.sections if ranks.count > 1 else ():
        for layer in given.layers:
            weights = make_weights(layer)
            if section == "rows":
                for num_tokens in given.tokens:
                    own = make_problem(layer, weights, num_tokens)
                    yield section, measure(own, ranks, 0.0, given.peers)
            if section == "skewed" and given.zipf > 0:
                for num_tokens in SKEWED_TOKENS:
                    own = make_problem(layer, weights, num_tokens)
                    yield section, measure(own, ranks, given.zipf, given.peers, {"zipf": given.zipf})
            if section == "uneven":
                for name, tokens_of in UNEVEN.items():
                    own = make_problem(layer, weights, tokens_of(ranks.rank))
                    peers = [peer for peer in given.peers if peer == "mega_moe"]
                    yield section, measure(own, ranks, 0.0, peers, {"uneven": name})


def growth(given: Namespace, num_ranks: int) -> Iterator[tuple[str, Row]]:
    """The rows of "growth", with fewer and fewer ranks; collective."""
    for size in group_sizes(num_ranks) if "growth" in given.sections else ():
        ranks = first_ranks(size)
        if ranks is None:
            continue
        for layer in given.layers:
            weights = make_weights(layer)
            for num_tokens in GROWTH_TOKENS:
                yield "growth", measure_growth(make_problem(layer, weights, num_tokens), ranks)


def enter(rank: int, num_ranks: int, device: int, port: int | None) -> Ranks:
    """All ranks, with kernels compiled and seeds of their own. port: see `join`. Collective."""
    join(rank, num_ranks, device, port)
    torch.manual_seed(rank)  # tokens of their own
    ranks = first_ranks(num_ranks)
    assert ranks is not None
    for first in (True, False):  # the others find the kernels that rank 0 has compiled
        if (rank == 0) is first:
            resolve_backend("hopper").warm_up()
        ranks.host_barrier()
    return ranks


def leave(ranks: Ranks) -> None:
    """End the group when all ranks are done; collective."""
    torch.cuda.synchronize()
    ranks.host_barrier()
    dist.destroy_process_group()


def run(local_rank: int, num_ranks: int, port: int | None, given: Namespace) -> None:
    """All rows, on one rank. port: None under torchrun."""
    rank = local_rank if port is not None else int(os.environ["RANK"])
    ranks = enter(rank, num_ranks, local_rank, port)
    machine = about(given, num_ranks)
    measured: dict[str, list[Row]] = {}
    for rows in (sections(given, ranks), growth(given, num_ranks)):
        for section, row in rows:
            measured.setdefault(section, []).append(row)
            if rank == 0:
                print(section, json.dumps(row), flush=True)
                write(given.json, machine, measured)
    leave(ranks)


def main() -> int:
    """Start a process for each GPU, unless torchrun has."""
    given = options()
    expect_gpu("benchmarks parallel")
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not deep_gemm_peer.available():
        given.peers = [peer for peer in given.peers if peer == "nccl"]
    elif not layer_peers.has_mega_moe():
        given.peers = [peer for peer in given.peers if peer != "mega_moe"]
    compiles = "two_gemms" in given.peers and ("rows" in given.sections or "skewed" in given.sections)
    if compiles and os.environ.get("RANK", "0") == "0":
        compile_peers(given.layers, given.tokens)
    if started:
        run(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), None, given)
        return 0
    count = given.ranks or torch.cuda.device_count()
    arguments = count, free_port(), given
    multiprocessing.spawn(run, arguments, count)  # type: ignore[attr-defined, no-untyped-call]
    return 0
