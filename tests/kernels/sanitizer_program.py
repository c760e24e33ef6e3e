"""The program that sanitizers run: every variant on small awkward shapes, with every result checked."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from expertd.kernels import (
    Backend,
    ExpertBiases,
    OtherGlu,
    RankMemory,
    RankTokens,
    Routing,
    Swiglu,
    WeightFormat,
    Weights,
    choose_experts,
    fused_experts,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    quantize_blocks,
    resolve_backend,
)
from expertd.kernels.backends.hopper import combine_rows, grouped_gemm
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.hopper.tiles import CONFIGS, FOUR_BITS, TileConfig
from expertd.kernels.jit import Variant
from expertd.kernels.ops.four_bits import quantize_int4, quantize_mxfp4, quantize_nvfp4
from tests.kernels.helpers import (
    diff,
    expect_contiguous,
    expect_masked,
    fresh_generator,
    poisoned,
    random_contiguous,
    random_masked,
)

QUANTIZE: dict[tuple[WeightFormat, int], Callable[[Tensor], Weights]] = {
    (WeightFormat.MXFP4, 32): quantize_mxfp4,
    (WeightFormat.INT4, 128): partial(quantize_int4, group_size=128, dtype=torch.float16),
    (WeightFormat.INT4, 32): quantize_int4,
    (WeightFormat.NVFP4, 16): quantize_nvfp4,
}
SHAPES = (([3, 0, 70, 1, 200], 264, 384), ([1], 8, 128), ([17], 136, 256), ([0, 0], 136, 256))


def every_lane_arrives(variant: Variant) -> Variant:
    """racecheck cannot track one lane that arrives at a barrier for its warp, so here every lane arrives."""
    source = variant.source
    defines = tuple((name, "32" if name == "ARRIVALS" else value) for name, value in source.defines)
    return variant._replace(source=replace(source, defines=defines))


def whole_layer(
    tokens: int,
    h: int = 256,
    *,
    is_biased: bool = False,
    quantize: Callable[[Tensor], Weights] = quantize_blocks,
) -> None:
    """Routing and the five launches of experts, against the separate steps."""
    i, e, k = 384, 5, 3
    generator = fresh_generator("cuda")
    gate_up = quantize(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(h**-0.5))
    down = quantize(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    x = torch.randn(tokens, h, generator=generator, device="cuda")
    ids = torch.randint(-1, e, (tokens, k), generator=generator, device="cuda", dtype=torch.int32)
    ids[:, 0] = 0  # with 40 tokens, short tiles of several boxes
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    backend = resolve_backend("hopper")
    router = torch.randn(e, h, generator=generator, device="cuda").bfloat16()
    torch.cuda.synchronize()
    routed = backend.route(x.bfloat16(), router, None, k, Routing())
    by_rule = choose_experts(x.bfloat16().float() @ router.float().t(), None, k, Routing())
    torch.testing.assert_close(routed[1], by_rule[1], rtol=1e-3, atol=1e-5)
    out, expected = (torch.full((tokens, h), torch.nan, device="cuda") for _ in range(2))
    rule: Swiglu | OtherGlu = OtherGlu(1.702, 1.5, 1.0) if is_biased else Swiglu()
    biases = None
    if is_biased:
        biases = ExpertBiases(
            *(torch.randn(e, n, generator=generator, device="cuda").bfloat16() for n in (2 * i, h))
        )
        logit_bias, by_logits = torch.rand(e, generator=generator, device="cuda"), Routing(bias_on="logits")
        backend.route(x.bfloat16(), router, logit_bias, k, by_logits)
        torch.cuda.synchronize()
    Backend.experts(backend, x, ids, weights, gate_up, down, expected, rule, 4, None, biases)
    for num_sms in (4, None):  # few rows: two CTAs an SM, and one
        out.fill_(torch.nan)
        fused_experts(
            x, ids, weights, gate_up, down, out=out, num_sms=num_sms, activation=rule, biases=biases
        )
        assert diff(out, expected.double()) < 1e-2


def layer_of_ranks(tokens: int, h: int = 2304, is_biased: bool = False) -> None:
    """The five launches of a rank that is alone, and sends itself nothing, by every way to combine."""
    i, e, k = 384, 5, 7
    generator = fresh_generator("cuda")
    biases = None
    if is_biased:
        biases = ExpertBiases(
            *(torch.randn(e, n, generator=generator, device="cuda").bfloat16() for n in (2 * i, h))
        )
    gate_up = quantize_blocks(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(h**-0.5))
    down = quantize_blocks(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    x = torch.randn(tokens, h, generator=generator, device="cuda").bfloat16()
    ids = torch.randint(-1, e, (tokens, k), generator=generator, device="cuda", dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    expected = fused_experts(x, ids, weights, gate_up, down, num_sms=4, biases=biases)
    backend, device, group = HopperBackend(), torch.device("cuda", 0), dist.group.WORLD
    assert group is not None
    shared = RankTokens((tokens,), torch.arange(e, dtype=torch.int32, device=device))
    for exact, staged_tokens in ((True, 0), (False, 0), (False, tokens + 1)):
        combine_rows.STAGED_TOKENS = staged_tokens
        memory = RankMemory(group, device, tokens, tokens, h, k, timeout=60.0, exact=exact)
        for _ in range(2):
            out = torch.full((tokens, h), torch.nan, device="cuda")
            backend.parallel_experts(memory, shared, x, ids, weights, gate_up, down, out, 4, biases=biases)
            assert diff(out, expected.double()) < 1e-4
            assert memory.late_rank is None


def main() -> None:
    """Run everything on a small persistent grid, so that every CTA computes several tiles."""
    for key, variant in grouped_gemm.VARIANTS.items():
        grouped_gemm.VARIANTS[key] = every_lane_arrives(variant)
    tiles: list[tuple[TileConfig, Callable[[Tensor], Weights]]] = [
        (config, quantize_blocks) for config in CONFIGS
    ]
    for weights, of_format in FOUR_BITS.items():
        tiles += [(config, QUANTIZE[weights]) for config in dict.fromkeys(of_format.plain)]
    for config, quantize in tiles:
        plan = GemmPlan(config, 16 * config.steps)
        backend = HopperBackend(choose=lambda *_, plan=plan: plan)
        for rows, n, k in SHAPES:
            case = random_contiguous(rows, n, k, "cuda", quantize=quantize)
            buffer, out = poisoned(sum(rows), n, device="cuda")
            grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend, num_sms=4)
            expect_contiguous(case, buffer, out)
            max_m = max(*rows, 1)
            masked = random_masked(rows, max_m, n, k, "cuda", quantize=quantize)
            buffer, out = poisoned(len(rows), max_m, n, device="cuda")
            grouped_gemm_masked(masked.a, masked.b, masked.counts, out=out, backend=backend, num_sms=4)
            expect_masked(masked, buffer, out)
    for tokens in (1, 40, 90):
        whole_layer(tokens)
        whole_layer(tokens, 208, is_biased=True)
        for (_, group), quantize in QUANTIZE.items():
            whole_layer(tokens, quantize=quantize)
            whole_layer(tokens, 256 if group > 32 else 224, is_biased=True, quantize=quantize)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for tokens in (1, 90):
        layer_of_ranks(tokens)
        layer_of_ranks(tokens, 2224, is_biased=True)
    layer_of_ranks(160)  # pairs that a warp sorts in several chunks
    torch.cuda.synchronize()
    print("every variant ran")


if __name__ == "__main__":
    main()
