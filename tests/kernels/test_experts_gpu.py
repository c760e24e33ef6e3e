"""The kernels of experts on Hopper: each against PyTorch, and all together against float64."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    ExpertBiases,
    GroupTable,
    OtherGlu,
    Quantized,
    Swiglu,
    compute_permutation,
    fused_experts,
    fused_experts_in_parts,
    quantize_blocks,
    quantize_rows,
    resolve_backend,
)
from expertd.kernels.backends.hopper import compute_permutation as on_hopper
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.permute_rows import permute_rows
from expertd.kernels.backends.hopper.quantize_permute import quantize_permute
from expertd.kernels.backends.streams import OnStream, current_stream
from expertd.kernels.ops.activation import SILU, Activation
from tests.kernels.expert_parts import (
    expect_slots_found,
    in_one_memory,
    num_groups_of,
    placed,
    random_biases,
)
from tests.kernels.helpers import diff, expected_experts, forbid_host_sync, fresh_generator

pytestmark = pytest.mark.gpu
on_both = pytest.mark.parametrize("backend", ["hopper", "triton"])


def _kernels() -> tuple[Kernels, OnStream]:
    return Kernels(), current_stream(0)


@pytest.mark.parametrize("num_sms", [None, 8])
@pytest.mark.parametrize("num_groups", [1, 8, 256, 1024])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 8), (3, 5), (16, 8), (43, 3), (64, 9), (113, 9), (114, 9), (1000, 8), (4096, 9)]
)
def test_compute_permutation(shape: tuple[int, int], num_groups: int, num_sms: int | None) -> None:
    """Ids that name no group are anything outside, and whole rows of them."""
    generator = fresh_generator("cuda")
    group_ids = torch.randint(
        -1, num_groups + 1, shape, generator=generator, device="cuda", dtype=torch.int32
    )
    outside = torch.tensor([-1, num_groups, -(2**31), 2**31 - 1, num_groups + 1], dtype=torch.int32)
    group_ids[::3] = outside.cuda()[torch.arange(shape[1]) % len(outside)]
    # Small blocks of memory are reused, so memory that the kernel does not write is not zero.
    poison = [torch.full((2, 2), 0x7F7F7F7F, dtype=torch.int32, device="cuda") for _ in range(64)]
    del poison
    rows, offsets, tile_counters = on_hopper.compute_permutation(*_kernels(), group_ids, num_groups, num_sms)
    assert not tile_counters.any()
    permutation = compute_permutation(group_ids, num_groups)
    assert torch.equal(offsets, permutation.offsets)
    there = (group_ids >= 0) & (group_ids < num_groups)
    assert permutation.absent is not None
    assert torch.equal(permutation.absent, ~there)
    assert torch.equal(rows[there].long(), permutation.inverse[there])
    assert (rows[~there] == -1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [128, 1024, 7168])
def test_quantize_permute(k: int, dtype: torch.dtype) -> None:
    x = torch.randn(37, k, generator=fresh_generator("cuda"), device="cuda").mul_(10).to(dtype)
    x[3, 5], x[4] = torch.nan, 0
    rows = (
        torch.randperm(37 * 3, generator=fresh_generator("cuda"), device="cuda").to(torch.int32).view(37, 3)
    )
    out, expected = quantize_permute(*_kernels(), x, rows), quantize_rows(x)
    for slot in range(3):
        index = rows[:, slot].long()
        assert torch.equal(out.data.view(torch.uint8)[index], expected.data.view(torch.uint8))
        assert torch.equal(
            out.scales[index].view(torch.int32), expected.scales.contiguous().view(torch.int32)
        )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("k", [128, 1024, 7168])
def test_permute_rows(k: int, apart: bool) -> None:
    """Values and scales side by side, as in requests, or column-major scales apart."""
    generator = fresh_generator("cuda")
    made = torch.randint(0, 256, (37, k + k // 32), generator=generator, device="cuda", dtype=torch.uint8)
    values, scales = made[:, :k], made[:, k:].view(torch.float32)
    if apart:
        values, scales = values.contiguous(), scales.t().contiguous().t()
    tokens = Quantized(values.view(torch.float8_e4m3fn), scales)
    rows = torch.randperm(37 * 3, generator=generator, device="cuda").to(torch.int32).view(37, 3)
    rows[5] = -1
    if k % 512 > 0:
        tokens = tokens._replace(data=tokens.data.contiguous())  # rows of 132 bytes are not aligned
    out = permute_rows(*_kernels(), tokens, rows)
    there = rows[:, 0] >= 0
    for slot in range(3):
        index = rows[there, slot].long()
        assert torch.equal(out.data.view(torch.uint8)[index], values[there])
        assert torch.equal(out.scales[index].view(torch.int32), scales[there].contiguous().view(torch.int32))


class Layer(NamedTuple):
    """Arguments of `fused_experts` on the GPU."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    gate_up: Quantized
    down: Quantized

    def run(self, out_dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        out = torch.full(self.hidden_states.shape, torch.nan, dtype=out_dtype, device="cuda")
        return fused_experts(*self, out=out, **options)

    def of(self, tokens: slice) -> "Layer":
        return self._replace(
            hidden_states=self.hidden_states[tokens],
            topk_ids=self.topk_ids[tokens].clone(),
            topk_weights=self.topk_weights[tokens].clone(),
        )

    def expected(self, activation: Activation = SILU, biases: ExpertBiases | None = None) -> Tensor:
        return expected_experts(*self, activation, biases)


def _layer(h: int, i: int, num_experts: int, top_k: int, tokens: int, *, spread: float = 1.0) -> Layer:
    """Random arguments; `spread` is about the standard deviation of gates and ups."""
    generator = fresh_generator("cuda")

    def weights(n: int, k: int, size: float) -> Quantized:
        return quantize_blocks(torch.randn(num_experts, n, k, generator=generator, device="cuda") * size)

    drawn = torch.rand(tokens, num_experts, generator=generator, device="cuda").argsort(1)
    return Layer(
        torch.randn(tokens, h, generator=generator, device="cuda").to(torch.bfloat16),
        drawn[:, :top_k].to(torch.int32),
        torch.rand(tokens, top_k, generator=generator, device="cuda"),
        weights(2 * i, h, spread * h**-0.5),
        weights(h, i, i**-0.5),
    )


@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2000])
@pytest.mark.parametrize("sizes", [(1024, 384, 24, 4), (2048, 768, 128, 8), (7168, 2048, 16, 8)])
@on_both
def test_experts(sizes: tuple[int, int, int, int], tokens: int, backend: str) -> None:
    layer = _layer(*sizes, tokens)
    out = layer.run(backend=backend)
    assert diff(out, layer.expected()) < (2e-3 if tokens >= 16 else 1e-2)
    with forbid_host_sync():
        again = layer.run(backend=backend)
    assert torch.equal(out, again)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer.run(dtype, backend=backend), out.to(dtype))


@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2000])
@pytest.mark.parametrize("sizes", [(1024, 384, 24, 4), (2048, 768, 128, 8)])
@pytest.mark.parametrize("biased", [False, True])
@on_both
def test_parts_give_the_bits_of_the_whole(
    sizes: tuple[int, int, int, int], tokens: int, backend: str, biased: bool
) -> None:
    """Parts of a few experts, in random order, each of which overwrites the one before."""
    layer = _layer(*sizes, tokens)
    hidden_states, topk_ids, topk_weights, gate_up, down = layer
    cuts = [cut.tolist() for cut in torch.randperm(sizes[2]).tensor_split(5)]
    biases = random_biases(gate_up, down) if biased else None
    groups, parts = placed(topk_ids, cuts, sizes[2]), in_one_memory(gate_up, down, cuts, biases)
    out = fused_experts_in_parts(
        hidden_states, groups, topk_weights, parts, num_groups_of(cuts), num_experts=sizes[2], backend=backend
    )
    assert torch.equal(out, layer.run(backend=backend, biases=biases))


@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2000])
@pytest.mark.parametrize("biased", [False, True])
@on_both
def test_a_table_finds_experts_in_slots(tokens: int, backend: str, biased: bool) -> None:
    """By one CTA with few pairs, with more, and by a cluster."""
    layer = _layer(1024, 384, 24, 4, tokens)
    hidden_states, topk_ids, topk_weights, gate_up, down = layer
    topk_ids[::3, 1] = torch.tensor([-1, 24, -(2**31), 2**31 - 1]).cuda()[
        torch.arange(len(topk_ids[::3])) % 4
    ]

    biases = random_biases(gate_up, down) if biased else None

    def run(table: GroupTable, kept: Sequence[int], offsets: Tensor) -> Tensor:
        return fused_experts_in_parts(
            hidden_states, topk_ids, topk_weights, in_one_memory(gate_up, down, [kept], biases), len(kept),
            num_experts=24, backend=backend, offsets=offsets, table=table,
        )  # fmt: skip

    expect_slots_found(topk_ids, 24, run, layer.run(backend=backend, biases=biases))


@on_both
def test_an_expert_with_far_more_rows_than_expected(backend: str) -> None:
    """The plan expects five rows; its tiles have 64."""
    layer = _layer(1024, 384, 256, 4, 300)
    layer.topk_ids[:, 0] = 7
    assert diff(layer.run(backend=backend), layer.expected()) < 2e-3


@pytest.mark.parametrize("tokens", [1, 300])
def test_five_launches_match_the_separate_steps(tokens: int) -> None:
    """They agree more closely than with the unrounded result; with a wrong scale or row they would not."""
    layer, composed = _layer(2048, 768, 32, 8, tokens), torch.empty(tokens, 2048, device="cuda")
    Backend.experts(resolve_backend("hopper"), *layer, composed, SILU, None)
    assert diff(layer.run(), composed.double()) < (2e-4 if tokens > 16 else 2e-3)


@pytest.mark.parametrize("num_sms", [None, 1, 8])
@pytest.mark.parametrize("tokens", [1, 300])
def test_rows_that_are_quantized_already(tokens: int, num_sms: int | None) -> None:
    """The quantizer's own bits give the same bits; other scales, which it would not choose, are used."""
    layer = _layer(2048, 768, 32, 8, tokens)
    rows, expected = quantize_rows(layer.hidden_states), layer.run(num_sms=num_sms)
    with forbid_host_sync():
        out = fused_experts(rows, *layer[1:], num_sms=num_sms)
    assert torch.equal(out, expected)
    odd = rows._replace(scales=rows.scales * torch.rand_like(rows.scales).add_(0.5))
    composed = torch.empty_like(out)
    Backend.experts(resolve_backend("hopper"), odd, *layer[1:], composed, SILU, None)
    assert diff(fused_experts(odd, *layer[1:]), composed.double()) < (2e-4 if tokens > 16 else 2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 300])
def test_slots_computed_alone_are_summed_to_the_same_bits(tokens: int, dtype: torch.dtype) -> None:
    layer = _layer(2048, 768, 32, 8, tokens)
    alone = layer._replace(
        hidden_states=layer.hidden_states.repeat_interleave(8, dim=0),
        topk_ids=layer.topk_ids.view(-1, 1),
        topk_weights=torch.ones(tokens * 8, 1, device="cuda"),
    )
    inverse = torch.arange(tokens * 8, dtype=torch.int32, device="cuda").view(tokens, 8)
    inverse[:, 3] = -1
    out = torch.full((tokens, 2048), torch.nan, dtype=dtype, device="cuda")
    resolve_backend("hopper").unpermute(alone.run(torch.bfloat16), inverse, layer.topk_weights, out)
    layer.topk_ids[:, 3] = -1
    assert torch.equal(out, layer.run(dtype))


@on_both
def test_experts_that_are_not_local_add_nothing(backend: str) -> None:
    """They cost no rows either. The hidden states are unaligned."""
    layer = _layer(512, 256, 8, 3, 100)
    memory = torch.cat([layer.hidden_states.new_zeros(1), layer.hidden_states.flatten()])
    ids = torch.randint(
        -2, 8 + 3, (100, 3), generator=fresh_generator("cuda"), device="cuda", dtype=torch.int32
    )
    absent = (ids < 0) | (ids >= 8)
    layer = layer._replace(
        hidden_states=memory[1:].view(100, 512),  # two bytes past an aligned address
        topk_ids=ids,
        topk_weights=layer.topk_weights.masked_fill(absent, torch.nan),
    )
    out = layer.run(backend=backend)
    zeros = layer._replace(
        topk_ids=ids.masked_fill(absent, 0), topk_weights=layer.topk_weights.masked_fill(absent, 0)
    )
    assert diff(out, zeros.run(backend=backend).double()) < 1e-6
    assert (out[absent.all(1)] == 0).all()
    strided = layer._replace(hidden_states=layer.hidden_states.t().contiguous().t())
    assert torch.equal(strided.run(backend=backend), out)


@pytest.mark.parametrize("num_sms", [None, 1, 8])
@pytest.mark.parametrize("tokens", [1, 20, 300, 2000])
@pytest.mark.parametrize("kind", ["floats", "quantized", "biases"])
def test_slots_without_an_expert_add_nothing(kind: str, tokens: int, num_sms: int | None) -> None:
    """Whatever their weights are, in the same token as often as they come; with none at all, too."""
    layer, generator = _layer(512, 256, 8, 4, tokens), fresh_generator("cuda")
    biases = _biases(layer) if kind == "biases" else None
    outside = torch.tensor([-1, 8, 9, -(2**31), 2**31 - 1], dtype=torch.int32, device="cuda")
    ids = outside[torch.randint(0, 5, layer.topk_ids.shape, generator=generator, device="cuda")]
    empty = torch.rand(ids.shape, generator=generator, device="cuda") < 0.5
    empty[::3] = True
    not_numbers = torch.where(ids == 8, torch.inf, torch.nan)
    for none in (empty, torch.ones_like(empty)):
        given = layer._replace(
            topk_ids=torch.where(none, ids, layer.topk_ids),
            topk_weights=torch.where(none, not_numbers, layer.topk_weights),
        )
        offsets = torch.full((9,), 9, dtype=torch.int32, device="cuda")
        options: dict[str, Any] = {"biases": biases, "num_sms": num_sms, "offsets": offsets}
        if kind == "quantized":
            poisoned = torch.full(layer.hidden_states.shape, torch.nan, device="cuda")
            out = fused_experts(quantize_rows(layer.hidden_states), *given[1:], out=poisoned, **options)
        else:
            out = given.run(**options)
        expected = given.expected(SILU, biases)
        assert diff(out, expected) < (4e-3 if tokens >= 16 else 2e-2)
        assert not out[none.all(1)].any()
        assert int(offsets[-1]) == int((~none).sum())


@pytest.mark.parametrize("tokens", [20, 200])
@on_both
def test_other_activations(tokens: int, backend: str) -> None:
    """With many gates and ups beyond the limit."""
    layer, activation = _layer(512, 256, 4, 2, tokens, spread=2.0), Swiglu(alpha=1.702, limit=1.5)
    out = layer.run(activation=activation, backend=backend)
    assert diff(out, layer.expected(activation)) < 3e-3
    assert diff(out, layer.run(backend=backend).double()) > 1e-2


GLUS = [OtherGlu(1.702, 1.5, 1.0), OtherGlu(1.0, 1.5, 0.0, True), Swiglu(), OtherGlu(up_offset=1.0)]


def _biases(layer: Layer) -> ExpertBiases:
    num_experts, h, i = layer.down.data.shape
    generator = fresh_generator("cuda")
    gate_up, down = (
        torch.randn(num_experts, n, generator=generator, device="cuda").bfloat16() for n in (2 * i, h)
    )
    return ExpertBiases(gate_up, down)


@pytest.mark.parametrize("tokens", [1, 20, 200, 2000])
@pytest.mark.parametrize("sizes", [(512, 256, 4, 2), (2880, 2944, 16, 4), (192, 128, 8, 3), (144, 384, 3, 2)])
@pytest.mark.parametrize("activation", GLUS, ids=str)
@on_both
def test_biases_other_activations_and_odd_hidden_sizes(
    activation: Activation, sizes: tuple[int, int, int, int], tokens: int, backend: str
) -> None:
    """In five launches that wait nowhere for the host, with short tiles and with tall ones."""
    layer = _layer(*sizes, tokens, spread=2.0)
    biases = _biases(layer)
    out = layer.run(activation=activation, biases=biases, backend=backend)
    bound = 4e-3 if tokens >= 16 else 2e-2
    assert diff(out, layer.expected(activation, biases)) < bound
    assert diff(out, layer.expected(activation)) > 2 * bound
    with forbid_host_sync():
        again = layer.run(activation=activation, biases=biases, backend=backend)
    assert torch.equal(out, again)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(
            layer.run(dtype, activation=activation, biases=biases, backend=backend), out.to(dtype)
        )
    none = layer.run(activation=activation, backend=backend)
    assert diff(none, layer.expected(activation)) < bound
    ones = layer.run(activation=activation, biases=biases, num_sms=1, backend=backend)
    assert diff(ones, out.double()) < bound


@on_both
def test_biases_of_absent_experts_are_not_read(backend: str) -> None:
    layer = _layer(512, 256, 8, 3, 100)
    ids = torch.randint(-(2**31), 2**31, (100, 3), generator=fresh_generator("cuda"), device="cuda")
    ids = torch.where(torch.rand(100, 3, device="cuda") < 0.5, ids, ids.remainder(8)).to(torch.int32)
    layer = layer._replace(topk_ids=ids)
    biases = _biases(layer)
    out = layer.run(biases=biases, backend=backend)
    assert diff(out, layer.expected(SILU, biases)) < 4e-3
    assert not out[((ids < 0) | (ids >= 8)).all(1)].any()


@on_both
def test_biases_are_batch_invariant(backend: str) -> None:
    layer, activation = _layer(2880, 384, 16, 4, 500), GLUS[0]
    biases = _biases(layer)
    out = layer.run(activation=activation, biases=biases, backend=backend)
    for part in (slice(0, 1), slice(13, 20), slice(100, 400)):
        assert torch.equal(
            layer.of(part).run(activation=activation, biases=biases, backend=backend), out[part]
        )


@pytest.mark.parametrize("num_sms", [1, 2, 3, 20])
def test_any_sm_count(num_sms: int) -> None:
    layer = _layer(512, 256, 8, 2, 50)
    everywhere, out = layer.run(), layer.run(num_sms=num_sms)
    if num_sms == 1:
        assert diff(out, everywhere.double()) < 2e-3
    else:
        assert torch.equal(out, everywhere)


@on_both
def test_experts_are_deterministic_and_batch_invariant(backend: str) -> None:
    """A token's output depends only on the token, its routing and the weights."""
    layer = _layer(1024, 512, 16, 4, 700)
    out = layer.run(backend=backend)
    for _ in range(10):
        assert torch.equal(layer.run(backend=backend), out)
    for part in (slice(0, 1), slice(13, 20), slice(100, 400), slice(699, 700)):
        assert torch.equal(layer.of(part).run(backend=backend), out[part])


@pytest.mark.parametrize("tokens", [3, 100, 2000])
@pytest.mark.parametrize("num_sms", [None, 8, 1])
@on_both
def test_offsets_reach_the_host_or_stay_on_the_device(tokens: int, num_sms: int | None, backend: str) -> None:
    layer = _layer(256, 128, 24, 4, tokens)
    layer.topk_ids[0, 0] = -1
    there = layer.topk_ids[layer.topk_ids >= 0]
    counts = there.flatten().bincount(minlength=24).cpu()
    on_host = torch.full((25,), 9, dtype=torch.int32).pin_memory()
    layer.run(num_sms=num_sms, offsets=on_host, backend=backend)
    torch.cuda.synchronize()
    assert torch.equal(on_host.diff().long(), counts)
    assert on_host[0] == 0
    on_device = torch.full((25,), 9, dtype=torch.int32, device="cuda")
    layer.run(num_sms=num_sms, offsets=on_device, backend=backend)
    assert torch.equal(on_device.cpu(), on_host)
    with pytest.raises(ValueError, match="offsets device: expected cuda:0"):
        layer.run(offsets=torch.zeros(25, dtype=torch.int32), backend=backend)
