"""What ranks compute in tests: a layer together, or one rank alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from expertd.activation import COMMON, ExpertRule
from expertd.kernels import Activation, Backend, ExpertBiases, HiddenStates, Routing, Weights
from expertd.kernels.backends.cpu.backend import CpuBackend
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.ops.four_bits import mapped
from expertd.service.device.cpu import CpuDevice
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.parallel import Exchange, ParallelLayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.split import experts_of_rank
from expertd.service.moe.weights import MATRICES, ExpertWeights, random_weights
from tests.service.moe.lazy_device import LazyDevice
from tests.service.moe.unpacking import Unpacking

Given = tuple[Tensor, Tensor]


class RowByRow(ReferenceBackend):
    """Computes each row alone, so that on any CPU its bits cannot depend on the batch."""

    def ffn(
        self,
        hidden_states: HiddenStates,
        tokens: Tensor,
        gate_up: Weights,
        down: Weights,
        offsets: Tensor,
        activation: Activation,
        num_sms: int | None,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        out = torch.full((len(tokens), down.data.shape[1]), torch.nan, dtype=torch.bfloat16)
        for group, (start, end) in enumerate(pairwise(offsets.tolist())):
            alone = torch.zeros_like(offsets)
            alone[group + 1 :] = 1
            compute = partial(super().ffn, hidden_states)
            for row in range(start, end):
                token = tokens[row : row + 1]
                out[row] = compute(token, gate_up, down, alone, activation, num_sms, biases)[0]
        return out


@cache
def backend_of(name: str) -> Backend:
    """The bits of all but "reference" do not depend on the batch; "cpu" takes FP8 only."""
    kinds: dict[str, Callable[[], Backend]] = {
        "reference": ReferenceBackend,
        "cpu": CpuBackend,
        "row by row": RowByRow,
        "unpacking": Unpacking,
    }
    return kinds[name]()


@dataclass(frozen=True)
class Case:
    """One call of a layer whose weights come from a seed; tokens, and any routing, by rank."""

    shape: LayerShape
    seed: int
    tokens: Sequence[Tensor]
    given: Sequence[Given] | None = None
    out_dtype: torch.dtype = torch.float32
    backend: str = "reference"
    exact: bool = False
    routing: Routing | None = None
    physical: Sequence[int] | None = None
    by_row: bool = True  # which tokens use which replica
    rule: ExpertRule = COMMON
    gated: bool = False  # the shared experts
    biased: bool = False  # all experts
    packed: bool = False
    num_slots: int | None = None  # of a rank's store; None: there is none
    lazy: bool = False  # a store's copies are made as late as events allow

    @property
    def all_tokens(self) -> Tensor:
        return torch.cat(list(self.tokens))

    @property
    def all_given(self) -> Given:
        assert self.given is not None
        ids, weights = zip(*self.given, strict=True)
        return torch.cat(ids), torch.cat(weights)


@lru_cache(maxsize=8)
def weights_of(shape: LayerShape, seed: int, gated: bool = False, biased: bool = False) -> ExpertWeights:
    weights = random_weights(shape, seed, "cpu")
    if biased:
        generator = torch.Generator().manual_seed(seed)
        sizes = 2 * shape.intermediate_size, shape.hidden_size
        biases = [torch.randn(shape.num_groups, n, generator=generator).to(torch.bfloat16) for n in sizes]
        weights = replace(weights, biases=ExpertBiases(*biases))
    return replace(weights, shared_gate=torch.linspace(-0.2, 0.3, shape.hidden_size)) if gated else weights


def part_of(weights: ExpertWeights, held: range, own: Sequence[int], num_shared: int) -> ExpertWeights:
    """The weights of `own`, and of the shared experts, of a layer that holds `held`."""
    groups = [expert - held.start for expert in own]
    if weights.shared is None:
        groups += range(len(held), len(held) + num_shared)
    gate_up, down = (mapped(w, itemgetter(groups)) for w in (weights.gate_up, weights.down))
    biases = weights.biases and ExpertBiases(*(bias[groups] for bias in weights.biases))
    return replace(weights, gate_up=gate_up, down=down, biases=biases)


def parallel_layer(exchange: Exchange, case: Case) -> ParallelLayer:
    """This rank's part of a case's layer."""
    held = case.shape.held_experts
    own = experts_of_rank(case.physical or held, exchange.rank, exchange.num_ranks)
    whole = weights_of(case.shape, case.seed, case.gated, case.biased)
    weights = part_of(whole, held, own, case.shape.num_shared_experts)
    backend = backend_of(case.backend)

    def stored(shape: LayerShape, weights: ExpertWeights) -> ExpertStore:
        assert case.num_slots is not None
        memory = StoreMemory(LazyDevice() if case.lazy else CpuDevice(torch.device("cpu")))
        return ExpertStore(memory, "layer", shape, weights, case.num_slots, backend)

    layer = ParallelLayer(
        case.shape, weights, backend, exchange,
        routing=case.routing, rule=case.rule, exact=case.exact, physical=case.physical,
        store=None if case.num_slots is None else stored,
    )  # fmt: skip
    for name in MATRICES if case.packed else ():
        layer.pack(name)
    return layer


def run_case(exchange: Exchange, case: Case) -> tuple[Tensor, list[int], Tensor]:
    """This rank's output, its tokens per expert, and its offsets; all written over poison."""
    layer = parallel_layer(exchange, case)
    return call(exchange, case, layer)


def call(exchange: Exchange, case: Case, layer: ParallelLayer) -> tuple[Tensor, list[int], Tensor]:
    """See `run_case`."""
    tokens = case.tokens[exchange.rank]
    layer.placed.begin_step(
        sum(len(part) for part in case.tokens[: exchange.rank]) if case.by_row else 7, case.by_row
    )
    out = torch.full(tokens.shape, torch.nan, dtype=case.out_dtype)
    offsets = torch.full((case.shape.num_groups + 1,), -1, dtype=torch.int32)
    ids, weights = (None, None) if case.given is None else case.given[exchange.rank]
    with torch.inference_mode():  # as in steps
        result = layer(tokens, ids, weights, None, out, offsets)
    assert result is out
    return out, layer.tokens_per_expert(offsets.numpy()).tolist(), offsets


def run_alone(exchange: Exchange, case: Case) -> Tensor:
    """The output of one rank's layer for all tokens of a case."""
    weights, backend = weights_of(case.shape, case.seed, case.gated, case.biased), backend_of(case.backend)
    layer = MoELayer(case.shape, weights, backend, routing=case.routing, rule=case.rule)
    ids, topk_weights = (None, None) if case.given is None else case.all_given
    out = torch.full(case.all_tokens.shape, torch.nan, dtype=case.out_dtype)
    return layer(case.all_tokens, ids, topk_weights, None, out)


def run_parts(exchange: Exchange, case: Case, num_ranks: int) -> list[Tensor]:
    """float32 outputs for all tokens: of each rank's experts alone, then of each shared expert alone."""
    whole, backend = weights_of(case.shape, case.seed), backend_of(case.backend)
    held, outputs = case.shape.held_experts, []
    for rank in range(num_ranks):
        own = experts_of_rank(held, rank, num_ranks)
        assert isinstance(own, range)
        shape = replace(case.shape, local_experts=own, num_shared_experts=0)
        layer = MoELayer(shape, part_of(whole, held, own, 0), backend)
        outputs.append(layer(case.all_tokens, *case.all_given))
    ids, weights = case.all_given
    for shared in range(case.shape.num_shared_experts):
        group = [len(held) + shared]
        gate_up, down = (mapped(w, itemgetter(group)) for w in (whole.gate_up, whole.down))
        shape = replace(case.shape, num_experts=1, top_k=1, local_experts=None, num_shared_experts=0)
        alone = MoELayer(shape, ExpertWeights(whole.router[:1], gate_up, down), backend)
        first = torch.zeros_like(ids[:, :1])
        outputs.append(alone(case.all_tokens, first, torch.ones_like(weights[:, :1])))
    return outputs
