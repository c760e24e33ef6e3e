"""Experts spread over two GPUs, or two processes of one, against one process that has them all."""

import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from expertd.kernels import (
    ExpertBiases,
    ExpertPart,
    HiddenStates,
    PartsOfRank,
    Quantized,
    fused_experts,
    quantize_blocks,
    quantize_rows,
)
from expertd.kernels.backends.hopper import combine_rows
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.layer import HopperLayer
from expertd.kernels.backends.hopper.plans import choose
from expertd.kernels.backends.streams import current_stream
from expertd.kernels.ops.activation import SILU, Activation, OtherGlu
from expertd.kernels.overlap import Overlap
from expertd.kernels.rank_memory import RankMemory, RankTokens

pytestmark = pytest.mark.gpu

INTERMEDIATE = 512
MOST = 1200  # tokens of a rank: more CTAs than run at once
CALLS_IN_A_ROW = 600
TIMEOUT = 2.0
SM_BYTES = 228 * 1024  # shared memory of a Hopper SM
CTA_BYTES = 2048  # of a CTA besides its dynamic part: the driver's, and what these kernels declare

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
    ((5, 3), "outside"),
    ((100, 28), "outside"),
    ((MOST, 7), "outside"),
    ((9, 300), "all outside"),
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
    weights = torch.rand(num_tokens, shape.top_k, generator=generator)
    if "outside" in kind:  # whole tokens without an expert, and weights that would be noticed
        others = torch.tensor([-1, shape.num_experts, -(2**31), 2**31 - 1, shape.num_experts + 1])
        none = torch.rand(ids.shape, generator=generator) < (1 if "all" in kind else 0.5)
        none[::3] = True
        ids[none] = others[torch.arange(int(none.sum())) % len(others)]
        weights[none] = torch.nan
    return ids.to(torch.int32), weights


def join(rank: int, num_ranks: int, port: int) -> torch.device:
    """Meet the other ranks; this one's GPU."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # processes of one GPU take turns
    }
    torch.cuda.set_device(rank % torch.cuda.device_count())
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=limit)
    return torch.device("cuda", torch.cuda.current_device())


def run(rank: int, num_ranks: int, port: int, seed: int) -> None:
    """One rank."""
    join(rank, num_ranks, port)
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
    layer = HopperLayer(kernels, GroupedGemm(kernels, choose))
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
        tokens = RankTokens(counts, places.to(device))
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
        own_biases_of = own_biases and ExpertBiases(own_biases.gate_up, own_biases.down[held].contiguous())
        whole = ExpertPart(own_gate_up, own_down, own_biases_of)
        for out in (in_parts := torch.full((3, counts[rank], h), torch.inf, device=device)):
            offsets = torch.empty(each + 1, dtype=torch.int32).pin_memory()
            layer.parallel_experts_in_parts(
                current_stream(device.index), memory, tokens, floats, *given, each,
                functools.partial(shuffled, whole, offsets), out, activation, None, offsets,
                None if biases is None else biases.down,
            )  # fmt: skip
        torch.cuda.synchronize()
        outs = torch.cat((outs, in_parts))
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


def shuffled(whole: ExpertPart, offsets: Tensor) -> PartsOfRank:
    """A rank's experts in any order, in two parts."""
    torch.cuda.current_stream().synchronize()
    order = torch.randperm(whole.num_groups)
    rows = offsets.diff()[order]
    after = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
    shifts = torch.empty_like(rows)
    shifts[order] = after[:-1] - offsets[:-1][order]

    def part(experts: Tensor) -> ExpertPart:
        gate_up, down = (
            Quantized(w.data.view(torch.uint8)[experts].view(w.data.dtype), w.scales[experts])
            for w in whole.matrices
            if isinstance(w, Quantized)
        )
        biases = whole.biases and ExpertBiases(*(bias[experts] for bias in whole.biases))
        return ExpertPart(gate_up, down, biases)

    parts = [part(experts.cuda()) for experts in order.tensor_split(2) if len(experts)]
    return PartsOfRank(parts, after.cuda(), shifts.cuda())


def run_calls(rank: int, num_ranks: int, port: int, seed: int) -> None:
    """One rank: calls of other tokens each, one after another, while each rank is late at random.

    A clear that another GPU's writes overtook, or half a pair, would be a wrong sum or a wait in vain.
    """
    device = join(rank, num_ranks, port)
    generator = torch.Generator().manual_seed(seed)  # the same on all ranks
    h, num_experts, top_k, most = 2560, 24, 4, 520
    gate_up = quantize_blocks(torch.randn(num_experts, 2 * INTERMEDIATE, h, generator=generator).to(device))
    down = quantize_blocks(torch.randn(num_experts, h, INTERMEDIATE, generator=generator).to(device))
    each = num_experts // num_ranks
    held = slice(rank * each, (rank + 1) * each)
    own_gate_up, own_down = (Quantized(w.data[held].clone(), w.scales[held].clone()) for w in (gate_up, down))
    places = torch.tensor([e // each << 16 | e % each for e in range(num_experts)], dtype=torch.int32)
    places = places.to(device)
    kernels = Kernels()
    layer = HopperLayer(kernels, GroupedGemm(kernels, choose))
    assert dist.group.WORLD is not None
    delays = torch.Generator().manual_seed(seed + rank)
    for exact in (True, False):
        memory = RankMemory(dist.group.WORLD, device, most, 2 * most, h, top_k, timeout=10.0, exact=exact)
        combine_rows.STAGED_TOKENS = 256
        calls: list[tuple[Tensor, Tensor, Tensor, slice, Tensor]] = []
        for number in range(CALLS_IN_A_ROW):
            largest = 16 if number % 4 else most
            counts = tuple(torch.randint(0, largest + 1, (num_ranks,), generator=generator).tolist())
            rows = torch.randn(sum(counts), h, generator=generator).to(torch.bfloat16).to(device)
            shape = Shape(h, num_experts, top_k)
            ids, weights = (t.to(device) for t in routing(shape, num_ranks, sum(counts), "random", generator))
            own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
            out = torch.full((counts[rank], h), torch.inf, device=device)
            calls.append((rows, ids, weights, own, out))
            if number % 3 == 0:
                torch.cuda._sleep(int(torch.randint(0, 100_000, (1,), generator=delays)))  # type: ignore[no-untyped-call]
            layer.parallel_experts(
                current_stream(device.index), memory, RankTokens(counts, places), rows[own].contiguous(),
                ids[own].contiguous(), weights[own].contiguous(), own_gate_up, own_down, out, SILU, None,
                None,
            )  # fmt: skip
        torch.cuda.synchronize()
        assert memory.late_rank is None
        for number, (rows, ids, weights, own, out) in enumerate(calls):
            expected = fused_experts(rows, ids, weights, gate_up, down)[own]
            if exact:
                assert torch.equal(out, expected), f"call {number} of {len(rows)} tokens"
            elif len(out):
                bound = 2**-8 * expected.abs().amax() * 2
                assert (out - expected).abs().amax() <= bound, f"call {number} of {len(rows)} tokens"
    dist.barrier()
    dist.destroy_process_group()


def wait_in_vain(rank: int, num_ranks: int, port: int, seed: int) -> None:
    """One rank; the last one does not take part in a call, which takes one timeout, not one a launch."""
    device = join(rank, num_ranks, port)
    h, num_experts, top_k, num_tokens = 2560, 24, 4, 200
    gate_up = quantize_blocks(torch.randn(num_experts // num_ranks, 2 * INTERMEDIATE, h, device=device))
    down = quantize_blocks(torch.randn(num_experts // num_ranks, h, INTERMEDIATE, device=device))
    each = num_experts // num_ranks
    places = torch.tensor([e // each << 16 | e % each for e in range(num_experts)], dtype=torch.int32)
    kernels = Kernels()
    layer = HopperLayer(kernels, GroupedGemm(kernels, choose))
    assert dist.group.WORLD is not None
    memory = RankMemory(dist.group.WORLD, device, num_tokens, 2 * num_tokens, h, top_k, timeout=TIMEOUT)
    ids, weights = routing(Shape(h, num_experts, top_k), num_ranks, num_tokens, "random", torch.Generator())
    out = torch.empty(num_tokens, h, device=device)
    arguments = (
        memory, RankTokens((num_tokens,) * num_ranks, places.to(device)), torch.randn_like(out).bfloat16(),
        ids.to(device), weights.to(device), gate_up, down, out, SILU, None, None,
    )  # fmt: skip
    layer.parallel_experts(current_stream(device.index), *arguments)  # loads the kernels
    torch.cuda.synchronize()
    assert memory.late_rank is None
    dist.barrier()
    if rank == 0:
        began = time.perf_counter()
        layer.parallel_experts(current_stream(device.index), *arguments)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        assert memory.late_rank == num_ranks - 1, f"{memory.late_rank} after {seconds} s"
        assert TIMEOUT <= seconds < 1.5 * TIMEOUT
    dist.barrier()
    dist.destroy_process_group()


def side_by_side(rows: Quantized, nothing: Tensor) -> Quantized:
    """Values and scales of each row in the same memory; where `nothing`, all is what no value may be."""
    made = torch.cat([part.contiguous().view(torch.uint8) for part in rows], dim=1)
    made[nothing] = 0xFF
    h = rows.data.shape[1]
    return Quantized(made[:, :h].view(torch.float8_e4m3fn), made[:, h:].view(torch.float32))


@pytest.mark.parametrize("num_ranks", sorted({2, 3, 4, max(2, min(8, torch.cuda.device_count()))}))
def test_ranks_compute_what_one_process_does(num_ranks: int) -> None:
    spawn(run, num_ranks)


def test_calls_one_after_another_while_ranks_are_late() -> None:
    spawn(run_calls, max(2, min(4, torch.cuda.device_count())))


def test_a_late_rank_is_noticed_after_one_timeout() -> None:
    spawn(wait_in_vain, 2)


def spawn(rank: Callable[[int, int, int, int], None], num_ranks: int) -> None:
    """Run `rank` in a process for each; the seed is printed."""
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(rank, (num_ranks, port, seed), num_ranks)  # type: ignore[attr-defined, no-untyped-call]


@pytest.mark.parametrize(
    "way", combine_rows._COMBINE_VARIANTS, ids=lambda way: way.by_dtype[torch.float32].source.name
)
@pytest.mark.parametrize("num_experts", [8, 1024])
def test_all_ctas_of_combine_run_at_once(way: combine_rows._CombineVariant, num_experts: int) -> None:
    """The driver says how many an SM runs: what the launch bounds ask for, if shared memory suffices."""
    shared_bytes = way.shared_bytes(num_experts)
    for variant in way.by_dtype.values():
        per_sm = Kernels().ctas_per_sm(torch.cuda.current_device(), variant, shared_bytes)
        assert 1 <= per_sm <= 32
        assert per_sm >= min(way.ctas, SM_BYTES // (shared_bytes + CTA_BYTES)), variant.source.name
