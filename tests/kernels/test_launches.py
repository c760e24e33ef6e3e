"""Host files pass the parameters that device files declare: number, order and width for every kernel."""

import ctypes
import math
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import Structure, sizeof
from functools import cache
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from expertd.kernels import (
    ExpertBiases,
    ExpertPart,
    OtherGlu,
    PartsOfRank,
    Quantized,
    Routing,
    Swiglu,
    as_floats,
    jit,
    quantize_rows,
)
from expertd.kernels.backends.hopper import (
    gather_rows,
    grouped_gemm,
    launch,
    layer,
    parameters,
    tensor_maps,
    tiles,
)
from expertd.kernels.backends.hopper.compute_permutation import compute_permutation
from expertd.kernels.backends.hopper.dispatch_rows import dispatch_rows, packed_rows
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Grid, Kernels, PackedLaunch
from expertd.kernels.backends.hopper.layer import HopperLayer
from expertd.kernels.backends.hopper.permutation_of_ranks import permutation_of_ranks
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.hopper.rates import H200
from expertd.kernels.backends.hopper.scatter_rows import answer_calls
from expertd.kernels.backends.hopper.tensor_maps import PackedTensorMap, Rows
from expertd.kernels.backends.hopper.tile_counters import TileCounters
from expertd.kernels.backends.hopper.tiles import TileConfig
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.rank_memory import RankTokens
from expertd.layout import Layout
from tests.kernels.front_end import errors_of
from tests.short import few_of

ON = OnStream(0, 7, None)
H, N, G, T, TOP_K = 256, 128, 4, 6, 2
COUNTER = 0x1234
CONFIGS = few_of(tiles.CONFIGS, (tiles.SWAP_AB, tiles.NORMAL))


class TensorMap:
    """A stand-in for cuda.core's."""


def packed_map(rows: Rows, box_rows: int) -> PackedTensorMap:
    """A stand-in that says what it describes."""
    address, _ = rows.__cuda_array_interface__["data"]
    return PackedTensorMap(None, struct.pack("=2Q112x", address, box_rows))


class RecordingKernels(Kernels):
    """Loads nothing: a kernel is its variant. The driver would say `per_sm` and `room`."""

    per_sm, room = 32, True

    def get(self, device: int, variant: Variant) -> Variant:
        return variant

    def ctas_per_sm(self, device: int, variant: Variant, shared_bytes: int) -> int:
        return self.per_sm

    def has_room(self, on: OnStream, variant: Variant, grid: Grid) -> bool:
        return self.room


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Variant, list[Any]]]]:
    """Each launch as (variant, arguments)."""
    made: list[tuple[Variant, list[Any]]] = []

    def record(stream: object, config: object, kernel: Variant, *arguments: Any) -> None:
        made.append((kernel, list(arguments)))

    def record_packed(
        self: Kernels, device: int, variant: Variant, grid: Grid
    ) -> Callable[[int, bytes], None]:
        kind = parameters.PARAMETERS[dict(variant.source.defines)["EPILOGUE"]]
        return lambda stream, packed: made.append((variant, [kind.from_buffer_copy(packed)]))

    core = SimpleNamespace(launch=record, LaunchConfig=SimpleNamespace)
    launch.launch_config.cache_clear()
    monkeypatch.setattr(Kernels, "packed_launch", record_packed)
    for module in (launch, tensor_maps):
        monkeypatch.setattr(module, "cuda_core", lambda: core)
    monkeypatch.setattr(grouped_gemm, "rates", lambda device: H200)
    monkeypatch.setattr(layer, "describe_rows", lambda rows, box_rows, l2_promotion=True: TensorMap())
    monkeypatch.setattr(
        grouped_gemm, "pack_rows", lambda rows, box_rows, l2_promotion=True: packed_map(rows, box_rows)
    )
    monkeypatch.setattr(TileCounters, "prepare", lambda self, device: None)
    monkeypatch.setattr(TileCounters, "get", lambda self, device, stream: COUNTER)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
    )
    yield made
    launch.launch_config.cache_clear()


def width(argument: Any) -> int:
    """The bytes that cuda.core passes; an int is a pointer."""
    if isinstance(argument, TensorMap):
        return 128
    if isinstance(argument, Structure):
        return sizeof(argument)
    if isinstance(argument, np.generic):
        return argument.itemsize
    assert type(argument) is int
    return 8


def values(struct: Structure) -> list[Any]:
    """Of all fields, those of structs within it included."""
    found = [getattr(struct, name) for name, *_ in struct._fields_]
    return [each for one in found for each in (values(one) if isinstance(one, Structure) else [one])]


@cache
def widths(variant: Variant) -> list[int]:
    """Bytes of each parameter of the kernel's entry."""
    told = """
        template <int... kBytes> struct Bytes;
        template <class... P> __device__ Bytes<sizeof(P)...> bytes_of(void (*)(P...));
    """
    (error,) = errors_of(variant.source, f"{told} static_assert(sizeof(bytes_of({variant.source.entry})));")
    found = re.search(r' returns incomplete type "Bytes<([\d, ]+)>"$', error)
    assert found, error
    return [int(size) for size in found[1].split(",")]


def quantized(*shape: int, block: int) -> Quantized:
    scales = torch.ones(*shape[:-2], -(-shape[-2] // block), -(-shape[-1] // 128))
    return Quantized(torch.zeros(shape).to(torch.float8_e4m3fn), scales)


@pytest.mark.parametrize(
    "config", few_of(tiles.CONFIGS, (tiles.SWAP_AB, tiles.NORMAL)), ids=lambda config: config.name
)
@pytest.mark.parametrize("layout", Layout)
def test_the_gemm(layout: Layout, config: TileConfig, launches: list[tuple[Variant, list[Any]]]) -> None:
    gemm = GroupedGemm(RecordingKernels(), choose=lambda *_: GemmPlan(config, 16, tall_first=True))
    shape = (T, H) if layout is Layout.CONTIGUOUS else (G, T, H)
    extents = torch.zeros(G + 1, dtype=torch.int32)
    out = torch.empty(*shape[:-1], N, dtype=torch.bfloat16)
    a, b = quantized(*shape, block=1), quantized(G, N, H, block=128)
    gemm.multiply(ON, layout, a, b, Groups(extents), out, T, None)
    ((variant, arguments),) = launches
    assert variant is grouped_gemm.VARIANTS[layout, config]
    assert [width(argument) for argument in arguments] == widths(variant)
    (given,) = arguments
    max_m = 0 if layout is Layout.CONTIGUOUS else T
    strides = [0, 2, 1] if layout is Layout.CONTIGUOUS else [2 * T, 2, 1]
    assert values(given.scales) == [a.scales.data_ptr(), *strides, b.scales.data_ptr()]
    assert values(given.groups) == [extents.data_ptr(), G, N, H, T, max_m, 16, 1, 0, N]
    assert (given.output.out, given.extents_ready, given.tile_counter) == (out.data_ptr(), 0, COUNTER)
    assert list(given.a_map[:2]) == [a.data.data_ptr(), config.box_m]
    assert list(given.b_map[:2]) == [b.data.data_ptr(), config.out_block_n]
    assert list(given.out_map[:2]) == ([0, 0] if config.swap_ab else [out.data_ptr(), 16])


def test_a_layer(launches: list[tuple[Variant, list[Any]]]) -> None:
    """Five launches, each marked; GEMMs may read the offsets early, and have tile counters of their own."""
    kernels, marks = RecordingKernels(), list[tuple[str, int]]()
    stages = SimpleNamespace(mark=lambda name: marks.append((name, len(launches))))
    HopperLayer(kernels, GroupedGemm(kernels)).experts(
        ON, torch.zeros(T, H, dtype=torch.bfloat16), torch.zeros(T, TOP_K, dtype=torch.int32),
        torch.zeros(T, TOP_K), quantized(G, 2 * N, H, block=128), quantized(G, H, N, block=128),
        torch.empty(T, H), Swiglu(), None, None, stages=stages,
    )  # fmt: skip
    assert marks == [("sort", 1), ("quantize", 2), ("gate_up", 3), ("down", 4), ("combine", 5)]
    entries = [variant.source.entry for variant, _ in launches]
    assert entries == (
        ["compute_permutation", "quantize_permute", "grouped_gemm", "grouped_gemm", "unpermute_rows"]
    )  # fmt: skip
    for variant, arguments in launches:
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name
    (_, permutation), (_, _), (swiglu, first), (_, second), (_, _) = launches
    assert swiglu is grouped_gemm.VARIANTS[Layout.CONTIGUOUS, tiles.SWIGLU_FEW]
    assert second[0].tile_counter - first[0].tile_counter == 8  # two int32
    assert first[0].tile_counter == permutation[6]
    assert [first[0].extents_ready, second[0].extents_ready] == [1, 1]
    assert values(first[0].output.activation) == [1.0, math.inf]


@pytest.mark.parametrize("biased", [False, True])
def test_a_step_of_device_calls(biased: bool, launches: list[tuple[Variant, list[Any]]]) -> None:
    """Five launches, of which the second and the last find rows by the table of calls."""
    kernels = RecordingKernels()
    ids, weights = torch.zeros(T, TOP_K, dtype=torch.int32), torch.zeros(T, TOP_K)
    calls: Any = SimpleNamespace(
        routing=lambda num_tokens, top_k: (ids, weights), requests=SimpleNamespace(address=0x5678),
        step=torch.zeros(1),
    )  # fmt: skip
    sizes = (G, 2 * N), (G, H)
    biases = ExpertBiases(*(torch.zeros(size, dtype=torch.bfloat16) for size in sizes)) if biased else None
    HopperLayer(kernels, GroupedGemm(kernels)).call_experts(
        ON, calls, T, TOP_K, quantized(G, 2 * N, H, block=128), quantized(G, H, N, block=128), Swiglu(),
        None, biases,
    )  # fmt: skip
    names = [variant.source.name for variant, _ in launches]
    assert names[:2] == ["compute_permutation", "quantize_permute_calls"]
    assert names[4:] == ["unpermute_rows_biased_calls" if biased else "unpermute_rows_calls"]
    for variant, arguments in launches:
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name
    assert launches[1][1][0] == 0x5678
    assert launches[4][1][-2:] == [0x5678, calls.step.data_ptr()]
    launches.clear()
    answer_calls(kernels, ON, torch.zeros(T, H), calls)
    ((variant, arguments),) = launches
    assert variant.source.name == "scatter_rows_calls"
    assert [width(argument) for argument in arguments] == widths(variant)


def test_a_layer_of_rows_that_are_quantized_already(launches: list[tuple[Variant, list[Any]]]) -> None:
    """They are copied with their strides: here values and scales lie side by side."""
    kernels = RecordingKernels()
    rows = torch.zeros(T, H + H // 32, dtype=torch.uint8)
    values, scales = rows[:, :H].view(torch.float8_e4m3fn), rows[:, H:].view(torch.float32)
    HopperLayer(kernels, GroupedGemm(kernels)).experts(
        ON, Quantized(values, scales), torch.zeros(T, TOP_K, dtype=torch.int32),
        torch.zeros(T, TOP_K), quantized(G, 2 * N, H, block=128), quantized(G, H, N, block=128),
        torch.empty(T, H), Swiglu(), None, None,
    )  # fmt: skip
    assert [variant.source.entry for variant, _ in launches][:2] == ["compute_permutation", "permute_rows"]
    for variant, arguments in launches:
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name
    _, (_, copy), *_ = launches
    assert copy[:5] == [values.data_ptr(), H + H // 32, scales.data_ptr(), (H + H // 32) // 4, 1]


def test_rows_for_other_ranks_lie_beside_their_scales(launches: list[tuple[Variant, list[Any]]]) -> None:
    """They are copied only if they lie elsewhere; some sizes are sent as floats."""
    kernels, k = RecordingKernels(), 512
    made = torch.randint(0, 256, (T, k + k // 32), dtype=torch.uint8)
    rows = Quantized(made[:, :k].view(torch.float8_e4m3fn), made[:, k:].view(torch.float32))
    packed = packed_rows(rows)
    assert packed.data_ptr() == made.data_ptr()
    apart = packed_rows(Quantized(*(part.clone(memory_format=torch.contiguous_format) for part in rows)))
    assert torch.equal(packed, made)
    assert torch.equal(apart, made)
    ranks: Any = SimpleNamespace(ranks=made, dispatch_counters=made)
    places = torch.zeros(G, dtype=torch.int32)
    tokens: Any = SimpleNamespace(counts=(T,), packed=(np.uint64(T),) * 3, places=places)
    ids = torch.zeros(T, TOP_K, dtype=torch.int32)
    data, scales = dispatch_rows(kernels, ON, ranks, tokens, packed, ids, ids, None)
    assert (data.shape, scales.shape) == ((T * TOP_K, k), (T * TOP_K, k // 128))
    ((variant, arguments),) = launches
    assert variant.source.name == "dispatch_rows_fp8"
    assert [width(argument) for argument in arguments] == widths(variant)
    assert made.data_ptr() in arguments
    assert k in arguments
    few = quantize_rows(torch.randn(T, 384))
    assert torch.equal(packed_rows(few), as_floats(few))


def test_a_layer_with_biases(launches: list[tuple[Variant, list[Any]]]) -> None:
    """The same launches, of other variants; the last 16 of 144 columns have scales of their own."""
    kernels, h = RecordingKernels(), 144
    biases = ExpertBiases(*(torch.zeros(G, size, dtype=torch.bfloat16) for size in (2 * N, h)))
    HopperLayer(kernels, GroupedGemm(kernels)).experts(
        ON, torch.zeros(T, h, dtype=torch.bfloat16), torch.zeros(T, TOP_K, dtype=torch.int32),
        torch.zeros(T, TOP_K), quantized(G, 2 * N, h, block=128), quantized(G, h, N, block=128),
        torch.empty(T, h), OtherGlu(1.702, 7.0, 1.0), None, None, biases,
    )  # fmt: skip
    names = [variant.source.name for variant, _ in launches]
    assert names[2] == "contiguous_m64_cluster2_glu"
    assert names[4] == "unpermute_rows_biased_fp32"
    for variant, arguments in launches:
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name
    (_, first), (_, second), (_, last) = launches[2:]
    assert values(first[0].groups)[2:4] == [N, 256]  # n, and k with the columns that are zeros
    assert values(second[0].groups)[2:4] == [h, N]
    alpha, limit = np.float32(1.702), 7.0
    assert values(first[0].output.activation) == [alpha, limit, biases.gate_up.data_ptr(), 1.0, 0]
    assert biases.down.data_ptr() in last


@pytest.mark.parametrize(
    ("how", "tokens"),
    [("", T), ("staged_", 8192), ("biased_", 2048), ("exact_", 2048), ("biased_exact_", T)],
)
def test_a_layer_of_ranks(
    how: str, tokens: int, launches: list[tuple[Variant, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five launches; the last adds biases of all ranks' experts, or stages rows of many tokens."""
    biased, exact = "biased" in how, "exact" in how
    monkeypatch.setattr(layer, "current_stream", lambda device: ON)
    kernels, h = RecordingKernels(), 2064  # with 16 columns that have scales of their own
    word = torch.zeros(1, dtype=torch.int32)
    memory: Any = SimpleNamespace(
        rank=1,
        num_ranks=2,
        ranks=word,
        consumed=word,
        dispatch_counters=word,
        combine_counters=word,
        exact=exact,
    )
    of_all = RankTokens((3, tokens), torch.zeros(2 * G, dtype=torch.int32))
    biases = None
    if biased:
        sizes = (G, 2 * N), (2 * G, h)
        biases = ExpertBiases(*(torch.zeros(size, dtype=torch.bfloat16) for size in sizes))
    HopperLayer(kernels, GroupedGemm(kernels)).parallel_experts(
        ON, memory, of_all, torch.zeros(tokens, h, dtype=torch.bfloat16),
        torch.zeros(tokens, TOP_K, dtype=torch.int32), torch.zeros(tokens, TOP_K),
        quantized(G, 2 * N, h, block=128), quantized(G, h, N, block=128), torch.empty(tokens, h),
        Swiglu(), None, None, None, biases,
    )  # fmt: skip
    names = [variant.source.name for variant, _ in launches]
    permutation = {T: "few_pairs_of_ranks", 2048: "permutation_of_ranks_1", 8192: "permutation_of_ranks_4"}
    assert names[:2] == [permutation[tokens], "dispatch_rows_bf16"]
    assert names[4] == f"combine_rows_{how}fp32"
    for variant, arguments in (*launches[:2], launches[4]):
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name
    assert values(launches[2][1][0].groups)[2:4] == [N, 2176], "n, and k with the columns that are zeros"
    assert (biases is not None and biases.down.data_ptr() in launches[4][1]) == biased


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_of_ranks_in_parts(
    biased: bool, launches: list[tuple[Variant, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are sent, and rows multiplied and returned, where the parts that come have them."""
    monkeypatch.setattr(layer, "current_stream", lambda device: ON)
    kernels, word = RecordingKernels(), torch.zeros(1, dtype=torch.int32)
    memory: Any = SimpleNamespace(
        rank=1, num_ranks=2, ranks=word, consumed=word, dispatch_counters=word, combine_counters=word,
        exact=False,
    )  # fmt: skip
    tokens = RankTokens((3, T), torch.zeros(2 * G, dtype=torch.int32))
    offsets, after = torch.zeros(G + 1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    parts = []
    for groups in (2, 1):
        biases = None
        if biased:
            biases = ExpertBiases(*(torch.zeros((groups, n), dtype=torch.bfloat16) for n in (2 * N, H)))
        matrices = quantized(groups, 2 * N, H, block=128), quantized(groups, H, N, block=128)
        parts.append(ExpertPart(*matrices, biases))
    down_bias = torch.zeros((2 * G, H), dtype=torch.bfloat16) if biased else None
    before: list[str] = []

    def parts_of() -> PartsOfRank:
        before.extend(variant.source.name for variant, _ in launches)
        return PartsOfRank(iter(parts), after, torch.zeros(G, dtype=torch.int32))

    HopperLayer(kernels, GroupedGemm(kernels)).parallel_experts_in_parts(
        ON, memory, tokens, torch.zeros(T, H, dtype=torch.bfloat16),
        torch.zeros(T, TOP_K, dtype=torch.int32), torch.zeros(T, TOP_K), G, parts_of, torch.empty(T, H),
        Swiglu(), None, offsets, down_bias,
    )  # fmt: skip
    assert before == ["few_pairs_of_ranks"]
    names = [variant.source.name for variant, _ in launches]
    assert names[1] == "dispatch_rows_bf16"
    assert names[-1] == ("combine_rows_biased_fp32" if biased else "combine_rows_fp32")
    assert len(names) == 1 + 1 + 2 * 2 + 1
    for variant, arguments in (*launches[:2], launches[-1]):
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name
    assert offsets.data_ptr() in launches[0][1]
    inverse = launches[1][1][9]
    assert inverse == launches[-1][1][9]
    assert inverse not in launches[0][1], "rows have moved"
    extents = [arguments[0].groups for _, arguments in launches[2:6]]
    assert [values(each)[0] for each in extents] == [after.data_ptr()] * 2 + [after[2:].data_ptr()] * 2
    assert [values(each)[1] for each in extents] == [2, 2, 1, 1], "groups"
    assert (biased and down_bias is not None and down_bias.data_ptr() in launches[-1][1]) == biased


@pytest.mark.parametrize("routing", [Routing(), Routing(bias_on="logits")])
def test_routing(routing: Routing, launches: list[tuple[Variant, list[Any]]]) -> None:
    kernels = RecordingKernels()
    x, router = torch.zeros(T, H, dtype=torch.bfloat16), torch.zeros(8, H, dtype=torch.bfloat16)
    HopperLayer(kernels, GroupedGemm(kernels)).route(ON, x, router, None, TOP_K, routing, None)
    assert [variant.source.entry for variant, _ in launches] == ["router_logits", "route_tokens"]
    for variant, arguments in launches:
        assert [width(argument) for argument in arguments] == widths(variant), variant.source.name


@pytest.mark.parametrize(
    ("pairs", "num_sms", "room", "cluster"),
    [
        (1024, None, True, 1),
        (1025, None, True, 8),
        (1025, 8, True, 8),
        (1025, 7, True, 1),
        (1025, 8, False, 1),
    ],
)
def test_many_pairs_are_sorted_by_a_cluster_where_one_runs(
    pairs: int, num_sms: int | None, room: bool, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = []
    monkeypatch.setattr(Kernels, "launch", lambda self, on, variant, grid, *arguments: grids.append(grid))
    monkeypatch.setattr(RecordingKernels, "room", room)
    compute_permutation(RecordingKernels(), ON, torch.zeros(pairs, 1, dtype=torch.int32), G, num_sms)
    assert [grid.cluster for grid in grids] == [cluster]


@pytest.mark.parametrize(
    ("counts", "num_sms", "variant", "cluster", "pairs_of_cta", "pairs_of_warp"),
    [
        ((129, 0), None, 1, 1, 129, 32),
        ((0, 129), None, 1, 1, 0, 32),  # a rank without tokens sends that it has no pairs
        ((1024, 1), None, 1, 8, 128, 32),
        ((1024, 1), 7, 4, 1, 1024, 128),
        ((4096, 4097), None, 4, 8, 512, 128),
        ((40_000, 40_000), None, 4, 8, 5000, 256),
    ],
)
def test_a_rank_sorts_its_pairs_in_segments(
    counts: tuple[int, int],
    num_sms: int | None,
    variant: int,
    cluster: int,
    pairs_of_cta: int,
    pairs_of_warp: int,
    launches: list[tuple[Variant, list[Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks have as many segments; a warp's part of one is a multiple of what it sorts at once."""
    clusters = []
    to_launch = Kernels.launch

    def launch_recorded(self: Kernels, on: OnStream, variant: Variant, grid: Grid, *given: Any) -> None:
        clusters.append(grid.cluster)
        to_launch(self, on, variant, grid, *given)

    monkeypatch.setattr(Kernels, "launch", launch_recorded)
    word = torch.zeros(1, dtype=torch.int32)
    memory: Any = SimpleNamespace(rank=0, num_ranks=2, ranks=word, consumed=word)
    of_all = RankTokens(counts, torch.zeros(2 * G, dtype=torch.int32))
    ids = torch.zeros(counts[0], 1, dtype=torch.int32)
    permutation_of_ranks(RecordingKernels(), ON, memory, of_all, ids, ids.float(), G, num_sms)
    ((launched, arguments),) = launches
    assert launched.source.name == f"permutation_of_ranks_{variant}"
    assert clusters == [cluster]
    assert arguments[4:6] == [pairs_of_cta, pairs_of_warp]
    assert arguments[13:15] == ([2, 3] if sum(counts) <= 1024 else [3, 4]), "bits of segments, and of all"


@pytest.mark.parametrize(("num_groups", "tokens"), [(0, 1), (367, 1), (367, 2000)])
def test_groups_that_shared_memory_cannot_count_are_refused(num_groups: int, tokens: int) -> None:
    """In every call of a layer, not only in those of many tokens."""
    word = torch.zeros(1, dtype=torch.int32)
    memory: Any = SimpleNamespace(rank=0, num_ranks=8, ranks=word, consumed=word)
    of_all = RankTokens((tokens,) * 8, torch.zeros(1024, dtype=torch.int32))
    ids = torch.zeros(tokens, 1, dtype=torch.int32)
    expected = rf"^num_groups: expected 1 to 366 with 1024 experts on 8 ranks, got {num_groups}$"
    with pytest.raises(ValueError, match=expected):
        permutation_of_ranks(RecordingKernels(), ON, memory, of_all, ids, ids.float(), num_groups, None)


def test_two_first_launches_at_once_load_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second would replace one that may be running."""
    both, kernels = Barrier(2), Kernels()

    def build(source: jit.Source) -> SimpleNamespace:
        both.wait(60)  # both threads have found no kernel
        return SimpleNamespace(cubin=b"")

    core = SimpleNamespace(
        Device=lambda index: SimpleNamespace(set_current=lambda: None),
        ObjectCode=SimpleNamespace(from_cubin=lambda cubin: SimpleNamespace(get_kernel=lambda name: [name])),
    )
    monkeypatch.setattr(jit, "build", build)
    monkeypatch.setattr(launch, "cuda_core", lambda: core)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda device: kernels.get(device, gather_rows.VARIANT), [0, 0])
    assert first is second


def test_a_packed_launch_passes_the_address_of_its_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a configuration for each stream, made once."""
    from cuda.bindings import driver

    variant, seen = grouped_gemm.VARIANTS[Layout.CONTIGUOUS, tiles.NORMAL_CLUSTER2], list[Any]()
    status = driver.CUresult.CUDA_SUCCESS

    def launch_kernel(config: Any, function: Any, addresses: int, extra: int) -> tuple[Any]:
        packed = ctypes.c_void_p.from_address(addresses).value
        assert packed is not None
        seen.append((config, int(function), ctypes.string_at(packed, 3)))
        return (status,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", launch_kernel)
    packed_launch = PackedLaunch(SimpleNamespace(handle=5), variant, Grid(66, 2, 1000))
    for stream, packed in ((7, b"abc"), (8, b"def"), (7, b"ghi")):
        packed_launch(stream, packed)
    (first, *_), (second, *_), (third, *_) = seen
    assert [each[1:] for each in seen] == [(5, b"abc"), (5, b"def"), (5, b"ghi")]
    assert third is first
    assert [int(config.hStream) for config in (first, second)] == [7, 8]
    sizes = (first.gridDimX, first.blockDimX, first.sharedMemBytes, first.numAttrs)
    assert sizes == (132, variant.threads, 1000, 2)
    assert first.attrs[1].value.clusterDim.x == 2
    status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    expected = r"^contiguous_m192_cluster2: expected to be launched, got CUDA_ERROR_INVALID_VALUE$"
    with pytest.raises(RuntimeError, match=expected):
        packed_launch(7, b"abc")
