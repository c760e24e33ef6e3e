"""Tokens and experts of a benchmark's ranks: drawn evenly or by Zipf's law, as many on each rank or not."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer.problem import Layer, LayerProblem
from benchmarks.ranks.rank_timing import Ranks

_PLACES = 0  # seed of the order in which experts are popular: the same on all ranks

UNEVEN: dict[str, Callable[[int], int]] = {
    "1 and 0 in turn": lambda rank: 1 - rank % 2,
    "37, 128, 219, ...": lambda rank: 37 + 91 * rank,
    "4095 and 17 in turn": lambda rank: 17 if rank % 2 else 4095,
}
"""Tokens of each rank, by name."""


def draw_experts(num_tokens: int, num_experts: int, top_k: int, zipf: float, device: str) -> Tensor:
    """int32 [num_tokens, top_k]: each token's experts, all different.

    zipf  0: all are equally likely; else the r-th most popular one is drawn with weight r ** -zipf, and so
          are the next ones among those that are left
    """
    popularity = torch.randperm(num_experts, generator=torch.Generator().manual_seed(_PLACES))
    logits = -zipf * torch.log(popularity.to(torch.float32) + 1).to(device)
    # The largest of logits with Gumbel noise: drawn one after another without putting back.
    waits = torch.empty(num_tokens, num_experts, device=device).exponential_()
    return (logits - torch.log(waits)).topk(top_k, dim=1).indices.to(torch.int32).contiguous()


def all_experts(topk_ids: Tensor, counts: Sequence[int], ranks: Ranks) -> list[Tensor]:
    """The experts of each rank's tokens, int32 [counts[r], top_k]; collective."""
    padded = topk_ids.new_full((max(counts), topk_ids.shape[1]), -1, device="cpu")
    padded[: len(topk_ids)] = topk_ids.cpu()
    every = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(every, padded, group=ranks.group)
    return [ids[:count] for ids, count in zip(every, counts, strict=True)]


def imbalance(every: Sequence[Tensor], experts_of_rank: int) -> float:
    """max/mean of the ranks' rows, of which each slot of a token is one for the rank that has its expert."""
    loads = torch.bincount(torch.cat(list(every)).flatten() // experts_of_rank, minlength=len(every))
    return float(loads.max() / loads.to(torch.float32).mean())


def same_work(own: LayerProblem, every: Sequence[Tensor], rank: int) -> LayerProblem:
    """The pairs of all ranks' tokens that go to this rank's experts, as tokens with `top_k` of them each."""
    layer, device = own.layer, own.out.device
    ids = torch.cat(list(every)).flatten() - rank * layer.num_experts
    ids = ids[(ids >= 0) & (ids < layer.num_experts)]
    if ids.numel() == 0:
        ids = ids.new_zeros(1)  # a layer without work would be no graph
    missing = -ids.numel() % layer.top_k
    ids = torch.nn.functional.pad(ids, (0, missing), value=-1).view(-1, layer.top_k).to(device)
    hidden_states = torch.randn(len(ids), layer.hidden_size, device=device).to(torch.bfloat16)
    out, weights = torch.empty_like(hidden_states), torch.rand(len(ids), layer.top_k, device=device)
    return LayerProblem(layer, own.weights, hidden_states, ids, weights, out)


def spread(own: LayerProblem, topk_ids: Tensor, num_ranks: int) -> LayerProblem:
    """The rank's part of a layer with the experts of all ranks."""
    layer = own.layer
    sizes = layer.hidden_size, layer.intermediate_size, num_ranks * layer.num_experts, layer.top_k
    whole = Layer(layer.name, *sizes)
    return LayerProblem(whole, own.weights, own.hidden_states, topk_ids, own.topk_weights, own.out)
