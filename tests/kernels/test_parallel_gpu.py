"""Experts spread over two GPUs, or two processes of one, against one process that has them all."""

import itertools
import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from expertd.kernels import Quantized, fused_experts, quantize_blocks
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm
from expertd.kernels.backends.hopper.launch import Kernels, current_stream
from expertd.kernels.backends.hopper.layer import Layer
from expertd.kernels.backends.hopper.tiles import choose
from expertd.kernels.ops.activation import SILU
from expertd.kernels.rank_memory import RankMemory, RankTokens

pytestmark = pytest.mark.gpu

RANKS = 2
H, INTERMEDIATE, E, TOP_K = 2304, 512, 16, 4  # H: more than a CTA has columns, and not a multiple
MOST = 1200  # tokens of a rank: more CTAs than run at once

# Tokens of each rank in a call, and how their experts are chosen.
CALLS: Sequence[tuple[tuple[int, int], str]] = (
    ((1, 1), "random"),
    ((1, 0), "random"),
    ((0, 3), "random"),
    ((64, 64), "random"),
    ((37, 200), "random"),
    ((128, 128), "one expert"),
    ((128, 128), "one rank"),
    ((100, 28), "some none"),
    ((MOST, MOST), "random"),
    ((MOST, 1), "random"),
)


def routing(num_tokens: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """topk_ids and topk_weights."""
    ids = torch.rand(num_tokens, E, generator=generator).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    if kind == "one expert":
        ids = torch.tensor([[3, -1, -1, -1]], dtype=torch.int32).repeat(num_tokens, 1)
    elif kind == "one rank":
        ids = (
            torch.rand(num_tokens, E // RANKS, generator=generator).argsort(dim=1)[:, :TOP_K].to(torch.int32)
        )
    elif kind == "some none":
        ids[::3] = -1
    return ids, torch.rand(num_tokens, TOP_K, generator=generator)


def run(rank: int, port: int, seed: int) -> None:
    """One rank."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # two processes of one GPU take turns
    }
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    generator = torch.Generator().manual_seed(seed)
    gate_up = quantize_blocks(torch.randn(E, 2 * INTERMEDIATE, H, generator=generator).to(device))
    down = quantize_blocks(torch.randn(E, H, INTERMEDIATE, generator=generator).to(device))
    held = slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    own_gate_up = Quantized(gate_up.data[held].contiguous(), gate_up.scales[held].contiguous())
    own_down = Quantized(down.data[held].contiguous(), down.scales[held].contiguous())
    places = torch.tensor([(e * RANKS // E) << 16 | e % (E // RANKS) for e in range(E)], dtype=torch.int32)
    assert dist.group.WORLD is not None
    memories = [
        RankMemory(dist.group.WORLD, device, MOST, RANKS * MOST, H, TOP_K, timeout=10.0, exact=exact)
        for exact in (False, True)
    ]
    kernels = Kernels()
    layer = Layer(kernels, GroupedGemm(kernels, choose))
    for (counts, kind), memory in itertools.product(CALLS, memories):
        num_tokens = sum(counts)
        hidden_states = torch.randn(num_tokens, H, generator=generator).to(torch.bfloat16).to(device)
        ids, weights = (tensor.to(device) for tensor in routing(num_tokens, kind, generator))
        expected = fused_experts(hidden_states, ids, weights, gate_up, down)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        tokens = RankTokens.of(counts, places.to(device))
        on, outs = current_stream(device.index), []
        for _ in range(10):
            out = torch.full((counts[rank], H), torch.nan, device=device)
            layer.parallel_experts(
                on, memory, tokens, hidden_states[own].contiguous(), ids[own].contiguous(),
                weights[own].contiguous(), own_gate_up, own_down, out, SILU, None, None,
            )  # fmt: skip
            outs.append(out)
        torch.cuda.synchronize()
        assert memory.late_rank is None
        for out in outs:
            assert torch.equal(out, outs[0]), (counts, kind, "the same bits in every run")
        if memory.exact:
            assert torch.equal(outs[0], expected[own]), (counts, kind, "the bits of one GPU")
        elif counts[rank]:
            # Each rank's sum is rounded to bf16, by at most 2^-9 of itself; they may exceed their total.
            bound = 2**-8 * expected[own].abs().amax() * 2
            difference = (outs[0] - expected[own]).abs().amax()
            assert difference <= bound, (counts, kind, difference.item(), bound.item())
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_compute_what_one_does() -> None:
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(run, (port, seed), RANKS)  # type: ignore[attr-defined, no-untyped-call]
