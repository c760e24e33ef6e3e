"""Experts spread over two GPUs, or two processes of one, against one process that has them all."""

import itertools
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from expertd.kernels import (
    ExpertBiases,
    HiddenStates,
    Quantized,
    fused_experts,
    quantize_blocks,
    quantize_rows,
)
from expertd.kernels.backends.hopper import combine_rows
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import Kernels, current_stream
from expertd.kernels.backends.hopper.layer import Layer
from expertd.kernels.backends.hopper.plans import choose
from expertd.kernels.ops.activation import SILU, Activation, OtherGlu
from expertd.kernels.overlap import Overlap
from expertd.kernels.rank_memory import RankMemory, RankTokens

pytestmark = pytest.mark.gpu

INTERMEDIATE = 512
MOST = 1200  # tokens of a rank: more CTAs than run at once

# Tokens of the first two ranks in a call (further ones have three), and how their experts are chosen.
CALLS: Sequence[tuple[tuple[int, int], str]] = (
    ((1, 1), "random"),
    ((1, 0), "random"),
    ((0, 3), "random"),
    ((0, 0), "random"),
    ((64, 64), "random"),
    ((37, 200), "random"),
    ((37, 200), "not a number"),
    ((128, 128), "one expert"),
    ((128, 128), "one rank"),
    ((100, 28), "some none"),
    ((MOST, MOST), "random"),
    ((MOST, 1), "random"),
)


class Shape(NamedTuple):
    h: int
    num_experts: int
    top_k: int
    biased: bool = False


# More columns than a CTA has, and not a multiple; half a warp's, and more slots than a warp has lanes. Then
# biases and columns that are no whole blocks, as gpt-oss has them. With the first one, some calls get rows
# that are quantized already.
SHAPES = (
    Shape(2560, 24, 4), Shape(2176, 72, 40),
    Shape(2880, 24, 4, True), Shape(2224, 72, 40, True), Shape(2224, 24, 4),
)  # fmt: skip


def routing(
    shape: Shape, num_ranks: int, num_tokens: int, kind: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """topk_ids and topk_weights."""
    experts = shape.num_experts // num_ranks if kind == "one rank" else shape.num_experts
    chosen = torch.rand(num_tokens, experts, generator=generator).argsort(dim=1)[:, : shape.top_k]
    ids = torch.full((num_tokens, shape.top_k), -1)
    ids[:, : chosen.shape[1]] = chosen
    if kind == "one expert":
        ids[:] = -1
        ids[:, 0] = 3
    elif kind == "some none":
        ids[::3] = -1
    return ids.to(torch.int32), torch.rand(num_tokens, shape.top_k, generator=generator)


def run(rank: int, num_ranks: int, port: int, seed: int) -> None:
    """One rank."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # processes of one GPU take turns
    }
    torch.cuda.set_device(rank % torch.cuda.device_count())
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit)
    generator = torch.Generator().manual_seed(seed)
    for shape in SHAPES:
        check(rank, num_ranks, shape, generator)
    dist.barrier()
    dist.destroy_process_group()


def check(rank: int, num_ranks: int, shape: Shape, generator: torch.Generator) -> None:
    """All calls, with sums that return and with rows that return."""
    (h, num_experts, top_k, biased), device = shape, torch.device("cuda", torch.cuda.current_device())
    gate_up = quantize_blocks(torch.randn(num_experts, 2 * INTERMEDIATE, h, generator=generator).to(device))
    down = quantize_blocks(torch.randn(num_experts, h, INTERMEDIATE, generator=generator).to(device))
    each = num_experts // num_ranks
    held = slice(rank * each, (rank + 1) * each)
    own_gate_up, own_down = (Quantized(w.data[held].clone(), w.scales[held].clone()) for w in (gate_up, down))
    biases = own_biases = None
    if biased:
        sizes_of_biases = 2 * INTERMEDIATE, h
        each_bias = [torch.randn(num_experts, n, generator=generator).bfloat16() for n in sizes_of_biases]
        biases = ExpertBiases(*(bias.to(device) for bias in each_bias))
        own_biases = ExpertBiases(biases.gate_up[held].clone(), biases.down)
    places = torch.tensor([e // each << 16 | e % each for e in range(num_experts)], dtype=torch.int32)
    assert dist.group.WORLD is not None
    sizes = MOST, num_ranks * MOST, h, top_k
    memories = [RankMemory(dist.group.WORLD, device, *sizes, timeout=10.0, exact=e) for e in (False, True)]
    kernels = Kernels()
    layer = Layer(kernels, GroupedGemm(kernels, choose))
    overlap = Overlap.of(device.index, 32)
    for ((first, second), kind), memory in itertools.product(CALLS, memories):
        counts = (first, second, *[3] * (num_ranks - 2))
        hidden_states = torch.randn(sum(counts), h, generator=generator).to(torch.bfloat16)
        if kind == "not a number":
            hidden_states[::5, ::300] = torch.nan
        hidden_states = hidden_states.to(device)
        ids, weights = (
            tensor.to(device) for tensor in routing(shape, num_ranks, sum(counts), kind, generator)
        )
        activation: Activation = SILU if first % 2 else OtherGlu(1.702, 1.5, 1.0)
        expected = fused_experts(
            hidden_states, ids, weights, gate_up, down, activation=activation, biases=biases
        )
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        tokens = RankTokens.of(counts, places.to(device))
        given = ids[own].contiguous(), weights[own].contiguous()
        floats = hidden_states[own].contiguous()
        quantized = packed = None
        if h % 512 == 0:
            quantized = quantize_rows(floats)
            packed = side_by_side(quantized, floats.isnan().any(1))
        # All before the calls, which then follow each other without another launch between them.
        outs = torch.full((10, counts[rank], h), torch.inf, device=device)
        for number, out in enumerate(outs):
            combine_rows.STAGED_TOKENS = 0 if number % 2 else MOST + 1
            on = current_stream(device.index)
            states: HiddenStates = floats
            if packed is not None and quantized is not None and number % 3 == 0:
                states = quantized if number == 9 else packed  # the last one, which is copied first
            layer.parallel_experts(
                on, memory, tokens, states, *given, own_gate_up, own_down, out, activation,
                16 if number % 3 == 1 else None, None, overlap if number % 3 == 2 else None, own_biases,
            )  # fmt: skip
        torch.cuda.synchronize()
        assert memory.late_rank is None
        assert not memory.dispatch_counters.any()
        assert not memory.combine_counters.any()
        for out in outs:
            same = torch.equal(*(each.nan_to_num(7).view(torch.int32) for each in (out, outs[0])))
            assert same, (shape, counts, kind, "the same bits in every run")
        if memory.exact:
            assert torch.equal(outs[0].nan_to_num(7), expected[own].nan_to_num(7)), (shape, counts, kind)
        elif counts[rank]:
            # Each rank's sum is rounded to bf16, by at most 2^-9 of itself; they may exceed their total.
            got, wanted = outs[0].nan_to_num(0), expected[own].nan_to_num(0)
            assert torch.equal(outs[0].isnan(), expected[own].isnan()), (shape, counts, kind)
            bound, difference = 2**-8 * wanted.abs().amax() * 2, (got - wanted).abs().amax()
            assert difference <= bound, (shape, counts, kind, difference.item(), bound.item())


def side_by_side(rows: Quantized, nothing: Tensor) -> Quantized:
    """Values and scales of each row in the same memory; where `nothing`, all is what no value may be."""
    made = torch.cat([part.contiguous().view(torch.uint8) for part in rows], dim=1)
    made[nothing] = 0xFF
    h = rows.data.shape[1]
    return Quantized(made[:, :h].view(torch.float8_e4m3fn), made[:, h:].view(torch.float32))


@pytest.mark.parametrize("num_ranks", sorted({2, 3, 4, max(2, min(8, torch.cuda.device_count()))}))
def test_ranks_compute_what_one_process_does(num_ranks: int) -> None:
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, (num_ranks, port, seed), num_ranks)  # type: ignore[attr-defined, no-untyped-call]
