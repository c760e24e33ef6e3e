"""Every argument that operations, ranks and routers reject, with the expected and the actual value."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.backends import BACKENDS
from expertd.kernels import (
    ExpertBiases,
    ExpertPart,
    RankMemory,
    RankTokens,
    Routing,
    Swiglu,
    choose_experts,
    compute_permutation,
    permute_rows,
    quantize_blocks,
    quantize_rows,
    swiglu,
    unpermute_rows,
)
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.expert_checks import check_parallel, check_parallel_in_parts, checked_parts

T, TOP_K, H, E, G = 4, 2, 256, 8, 4  # G: groups of a rank
HOPPER = BACKENDS["hopper"]
MAX_N = HOPPER.max_n
IDS, WEIGHTS = torch.zeros(T, TOP_K, dtype=torch.int32), torch.zeros(T, TOP_K)
LOGITS, GROUPED = torch.zeros(2, 4), Routing(num_expert_groups=4, topk_group=2)
ROWS = quantize_rows(torch.zeros(T, H))
PLACES = torch.zeros(E, dtype=torch.int32)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ROUTED: list[tuple[tuple[Any, ...], str]] = [
    ((torch.zeros(4), None, 2, Routing()), r"logits shape: expected 2 dimensions \[T, E\], got \(4,\)"),
    ((LOGITS.half(), None, 2, Routing()), "logits dtype: expected torch.float32, got torch.float16"),
    ((LOGITS, None, 0, Routing()), "top_k: expected at least 1, got 0"),
    ((LOGITS, None, 6, Routing()), "top_k: expected at most the 4 experts of topk_group, got 6"),
    (
        (torch.zeros(2, 6), None, 2, GROUPED),
        r"num_experts: expected a multiple of num_expert_groups \(4\), got 6",
    ),
    ((LOGITS, torch.zeros(3), 2, Routing()), r"bias shape: expected \(4,\), got \(3,\)"),
    ((LOGITS, torch.zeros(4).bfloat16(), 2, Routing()), "bias dtype: expected torch.float32, got .*bfloat16"),
]

REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: compute_permutation(IDS[:, 0], 4),
        r"group_ids shape: expected 2 dimensions \[T, top_k\], top_k at least 1, got \(4,\)",
    ),
    (lambda: compute_permutation(WEIGHTS, 4), "group_ids dtype: expected torch.int32, got torch.float32"),
    (
        lambda: compute_permutation(_meta(2**16, 2**15, dtype=torch.int32), 4),
        "group_ids rows: expected at most 2147483647, got 2147483648",
    ),
    (lambda: compute_permutation(IDS, 0), "num_groups: expected at least 1, got 0"),
    (
        lambda: permute_rows(ROWS.data, IDS[0]),  # type: ignore[arg-type]
        r"rows: expected Quantized\(data, scales\), got Tensor",
    ),
    (
        lambda: permute_rows(ROWS, torch.zeros(3)),
        "token_ids dtype: expected torch.int64 or torch.int32, got torch.float32",
    ),
    (lambda: permute_rows(ROWS, IDS), r"token_ids shape: expected 1 dimension \[R\], got \(4, 2\)"),
    (
        lambda: permute_rows(ROWS._replace(data=ROWS.data[:, :200]), IDS[0]),
        r"rows shape: expected 2 dimensions \[T, K\], K a multiple of 128, got \(4, 200\)",
    ),
    (
        lambda: permute_rows(ROWS._replace(scales=torch.ones(4, 3)), IDS[0]),
        r"rows scales shape: expected \(4, 2\), got \(4, 3\)",
    ),
    (
        lambda: permute_rows(ROWS, _meta(3, dtype=torch.int64)),
        "token_ids device: expected cpu as rows, got meta",
    ),
    (
        lambda: unpermute_rows(torch.zeros(8), IDS, WEIGHTS),
        r"rows shape: expected 2 dimensions \[R, H\], got",
    ),
    (
        lambda: unpermute_rows(torch.zeros(8, 9), IDS[:3], WEIGHTS),
        r"inverse_permutation shape: expected \(4, 2\), got \(3, 2\)",
    ),
    (
        lambda: unpermute_rows(torch.zeros(8, 9), WEIGHTS, WEIGHTS),
        "inverse_permutation dtype: expected torch.int64 or torch.int32, got torch.float32",
    ),
    (
        lambda: unpermute_rows(torch.zeros(8, 9), IDS, WEIGHTS.half()),
        "topk_weights dtype: expected torch.float32, got torch.float16",
    ),
    (
        lambda: unpermute_rows(torch.zeros(8, 9), IDS, WEIGHTS, IDS),
        "absent dtype: expected torch.bool, got torch.int32",
    ),
    (
        lambda: unpermute_rows(torch.zeros(8, 9), IDS, WEIGHTS, out=torch.zeros(4, 8)),
        r"out shape: expected \(4, 9\), got \(4, 8\)",
    ),
    (lambda: swiglu(torch.zeros(3, 5)), r"gate_up shape: expected 2 dimensions \[rows, 2I\], got \(3, 5\)"),
    (lambda: swiglu(torch.zeros(3, 4, dtype=torch.int32)), "gate_up dtype: expected .*, got torch.int32"),
    (
        lambda: swiglu(torch.zeros(3, 4), (1.0, 2.0)),  # type: ignore[arg-type]
        "activation: expected Swiglu or OtherGlu, got tuple",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), ROUTED)
@pytest.mark.parametrize(
    "choose", [choose_experts, ReferenceBackend().choose_experts, HopperBackend().choose_experts]
)
def test_routers_refuse(choose: Callable[..., object], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        choose(*arguments)


@pytest.mark.parametrize("backend", [ReferenceBackend(), HopperBackend()])
def test_biases_of_routers_are_refused_before_the_launch(backend: Any) -> None:
    x, router = torch.zeros(T, H).bfloat16(), torch.zeros(E, H).bfloat16()
    with pytest.raises(ValueError, match=r"^bias dtype: expected torch.float32, got torch.bfloat16"):
        backend.route(x, router, torch.zeros(E).bfloat16(), TOP_K, Routing())
    with pytest.raises(ValueError, match=r"^bias shape: expected \(8,\), got \(1, 8\)"):
        backend.route(x, router, torch.zeros(1, E), TOP_K, Routing())
    with pytest.raises(ValueError, match=r"^bias device: expected cpu as hidden_states, got meta"):
        backend.route(x, router, _meta(E), TOP_K, Routing())
    with pytest.raises(ValueError, match=r"^bias device: expected cpu as logits, got meta"):
        backend.choose_experts(torch.zeros(T, E), _meta(E), TOP_K, Routing())


@pytest.mark.parametrize("backend", [ReferenceBackend(), HopperBackend()])
def test_routers_that_do_not_fit_are_refused_before_the_launch(backend: Any) -> None:
    x, router = torch.zeros(T, H).bfloat16(), torch.zeros(E, H).bfloat16()
    for other, message in (
        (router[:, :128], "router H: expected 256 as in hidden_states, got 128"),
        (router[0], r"router shape: expected 2 dimensions \[E, H\], got \(256,\)"),
        (_meta(E, H, dtype=torch.bfloat16), "router device: expected cpu as hidden_states, got meta"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            backend.route(x, other, None, TOP_K, Routing())


@pytest.mark.parametrize("backend", [ReferenceBackend(), HopperBackend()])
def test_routers_of_no_tokens_launch_nothing(backend: Any) -> None:
    router = torch.zeros(E, H).bfloat16()
    for ids, weights in (
        backend.route(torch.zeros(0, H).bfloat16(), router, None, TOP_K, Routing()),
        backend.choose_experts(torch.zeros(0, E), None, TOP_K, Routing()),
    ):
        assert (ids.shape, ids.dtype) == ((0, TOP_K), torch.int32)
        assert (weights.shape, weights.dtype) == ((0, TOP_K), torch.float32)


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_operations_refuse(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_no_tile_has_more_columns_than_the_scheduler_divides_exactly() -> None:
    """Within a band of 8 rows of tiles, a tile's number must be below 2**21."""
    narrowest = min(config.out_block_n for config in tiles.CONFIGS)
    assert 8 * MAX_N // narrowest <= 2**21


def _tokens(counts: tuple[int, ...] = (3, T), places: Tensor = PLACES) -> RankTokens:
    return RankTokens(counts, places)


def _parallel_arguments() -> dict[str, Any]:
    limits: Any = SimpleNamespace(num_ranks=2, max_own_tokens=8, max_tokens=12)
    memory = SimpleNamespace(
        rank=1, hidden_size=H, top_k=TOP_K, check=lambda counts: RankMemory.check(limits, counts)
    )
    return {
        "memory": memory,
        "tokens": _tokens(),
        "hidden_states": torch.zeros(T, H),
        "topk_ids": IDS,
        "topk_weights": WEIGHTS,
        "gate_up": quantize_blocks(torch.zeros(G, 256, H)),
        "down": quantize_blocks(torch.zeros(G, H, 128)),
        "out": torch.zeros(T, H),
        "activation": Swiglu(),
        "num_sms": None,
    }


def test_what_suits_the_memory_of_ranks_is_accepted() -> None:
    check_parallel(HOPPER, **_parallel_arguments())
    biases = ExpertBiases(torch.zeros(G, 256).bfloat16(), torch.zeros(E, H).bfloat16())
    offsets = torch.zeros(G + 1, dtype=torch.int32)
    check_parallel(HOPPER, **_parallel_arguments() | {"biases": biases, "offsets": offsets})
    check_parallel(HOPPER, **_parallel_arguments() | {"hidden_states": ROWS, "num_sms": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(T, 128)}, "hidden_states H: expected 256 as in memory, got 128"),
        (
            {"hidden_states": torch.zeros(3, H)},
            r"hidden_states tokens: expected 4 as in .*counts\[1\], got 3",
        ),
        ({"tokens": _tokens((9, T))}, "counts: expected at most 8 each, got 9"),
        ({"topk_ids": IDS[:, :1]}, r"topk_ids shape: expected \(4, 2\), with the top_k of .*, got \(4, 1\)"),
        ({"tokens": _tokens(places=WEIGHTS[:, 0])}, "places dtype: expected torch.int32, got torch.float32"),
        (
            {"tokens": _tokens(places=torch.zeros(1025, dtype=torch.int32))},
            r"places shape: expected 1 to 1024 experts \[E\], got \(1025,\)",
        ),
        ({"tokens": _tokens(places=IDS)}, r"places shape: expected 1 to 1024 experts \[E\], got \(4, 2\)"),
        ({"hidden_states": torch.zeros(T, H).double()}, "hidden_states dtype: .*, got torch.float64"),
        ({"topk_ids": IDS.long()}, "topk_ids dtype: expected torch.int32, got torch.int64"),
        ({"topk_weights": WEIGHTS[:, :1]}, r"topk_weights shape: expected \(4, 2\), got \(4, 1\)"),
        ({"gate_up": ROWS}, r"gate_up shape: expected \(4, 256, 256\), got \(4, 256\)"),
        ({"down": ROWS}, r"down shape: expected 3 dimensions \[G, H, I\], got \(4, 256\)"),
        ({"activation": None}, "activation: expected Swiglu or OtherGlu, got NoneType"),
        (
            {"biases": ExpertBiases(torch.zeros(G, 256).bfloat16(), torch.zeros(G, H).bfloat16())},
            r"down bias shape: expected \(8, 256\), got \(4, 256\)",
        ),
        ({"offsets": torch.zeros(G, dtype=torch.int32)}, r"offsets shape: expected \(5,\), got \(4,\)"),
        ({"out": torch.zeros(3, H)}, r"out shape: expected \(4, 256\), got \(3, 256\)"),
        ({"out": torch.zeros(T, H).double()}, "out dtype: expected .*, got torch.float64"),
        ({"out": torch.zeros(H, T).t()}, r"out strides: expected contiguous, got \(1, 4\)"),
        ({"num_sms": 1}, "num_sms: expected None or at least 2, got 1"),
        ({"num_sms": 2, "has_overlap": True}, "num_sms: expected None with an overlap, got 2"),
    ],
)
def test_ranks_refuse(change: dict[str, Any], message: str) -> None:
    arguments = _parallel_arguments() | change
    with pytest.raises(ValueError, match=f"^{message}"):
        check_parallel(HOPPER, **arguments)


def _arguments_in_parts() -> dict[str, Any]:
    arguments = _parallel_arguments()
    del arguments["gate_up"], arguments["down"]
    offsets = torch.zeros(G + 1, dtype=torch.int32)
    return arguments | {"num_groups": G, "offsets": offsets, "down_bias": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": IDS[:, :1]}, r"topk_ids shape: expected \(4, 2\), with the top_k of .*, got \(4, 1\)"),
        ({"num_groups": 0}, "num_groups: expected 1 to 1024, got 0"),
        ({"num_sms": 1}, "num_sms: expected None or at least 2, got 1"),
        ({"offsets": torch.zeros(G, dtype=torch.int32)}, r"offsets shape: expected \(5,\), got \(4,\)"),
        (
            {"offsets": torch.zeros(G + 1, dtype=torch.int32, device="meta")},
            "offsets device: expected pinned memory of the host, got meta",
        ),
        (
            {"down_bias": torch.zeros(G, H).bfloat16()},
            r"down bias shape: expected \(8, 256\), got \(4, 256\)",
        ),
    ],
)
def test_ranks_whose_weights_come_in_parts_refuse(change: dict[str, Any], message: str) -> None:
    check_parallel_in_parts(HOPPER, **_arguments_in_parts())
    with pytest.raises(ValueError, match=f"^{message}"):
        check_parallel_in_parts(HOPPER, **_arguments_in_parts() | change)


def test_parts_that_do_not_suit_the_offsets_are_refused() -> None:
    part = ExpertPart(quantize_blocks(torch.zeros(G, 256, H)), quantize_blocks(torch.zeros(G, H, 128)))
    with pytest.raises(ValueError, match=r"^parts groups: expected 5 in all, got 4"):
        list(checked_parts(HOPPER, [part], G + 1, H, torch.device("cpu")))


def test_ranks_refuse_before_the_launch() -> None:
    arguments = _parallel_arguments() | {"gate_up": quantize_blocks(torch.zeros(G, 128, H))}
    with pytest.raises(ValueError, match=r"^gate_up shape: expected \(4, 256, 256\), got \(4, 128, 256\)"):
        HopperBackend().parallel_experts(**arguments)
