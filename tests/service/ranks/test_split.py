"""A step over the ranks: each row in place, the same datatypes, graph and order of steps on every rank."""

import random
from dataclasses import replace

import pytest

from expertd.service.memory import Span
from expertd.service.moe.needs import TOKEN_COUNTS
from expertd.service.moe.split import part_of
from expertd.service.moe.step.batch import Batch
from expertd.service.ranks.messages import NOWHERE, Place, PlacedRequest, StepCommand
from expertd.service.ranks.worker.own_steps import graph_of, requests_of
from expertd.service.ranks.worker.worker import share_sms

HIDDEN, TOP_K = 128, 2


def placed(num_tokens: int, start: int, datatype: str = "FP32", output: str = "FP32") -> PlacedRequest:
    """A request in region 1 from `start` on, with outputs in region 2 and without routing."""
    return PlacedRequest(
        num_tokens, datatype, "INT32", output, Place(1, start), NOWHERE, NOWHERE, Place(2, start)
    )


def span_of(region: int, offset: int, num_bytes: int) -> Span:
    """Region r begins at address r * 2**32."""
    return Span((region << 32) + offset, num_bytes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_parts_are_contiguous_and_even(ranks: int) -> None:
    for total in range(20):
        parts = [part_of(total, rank, ranks) for rank in range(ranks)]
        assert [row for part in parts for row in part] == list(range(total))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_row_belongs_to_one_rank_where_it_lies(ranks: int) -> None:
    generator = random.Random(ranks)
    row = 4 * HIDDEN
    for _ in range(50):
        counts = [generator.randint(1, 5) for _ in range(generator.randint(1, 6))]
        starts = [100_000 * index for index in range(len(counts))]
        step = [placed(*pair) for pair in zip(counts, starts, strict=True)]
        got = []
        for rank in range(ranks):
            own = requests_of(step, rank, ranks, HIDDEN, TOP_K, span_of)
            assert own, "every rank takes part"
            for request in (request for request in own if request.num_tokens):
                assert isinstance(request.hidden_states, Span)
                assert request.output is not None
                assert request.hidden_states.num_bytes == request.num_tokens * row
                assert request.output.address - request.hidden_states.address == 1 << 32
                offset = request.hidden_states.address - (1 << 32)
                got += [offset + index * row for index in range(request.num_tokens)]
        expected = zip(counts, starts, strict=True)
        assert got == [start + index * row for count, start in expected for index in range(count)]


def test_routing_lies_beside_its_rows() -> None:
    request = PlacedRequest(
        4, "BF16", "INT64", "FP16", Place(1, 0), Place(2, 64), Place(3, 128), Place(4, 256)
    )
    (own,) = requests_of([request], 1, 2, HIDDEN, TOP_K, span_of)
    spans = (own.hidden_states, own.topk_ids, own.topk_weights, own.output)
    assert spans == (
        Span((1 << 32) + 2 * 2 * HIDDEN, 2 * 2 * HIDDEN),
        Span((2 << 32) + 64 + 2 * 8 * TOP_K, 2 * 8 * TOP_K),
        Span((3 << 32) + 128 + 2 * 4 * TOP_K, 2 * 4 * TOP_K),
        Span((4 << 32) + 256 + 2 * 2 * HIDDEN, 2 * 2 * HIDDEN),
    )
    assert (own.datatype, own.topk_ids_datatype, own.output_datatype) == ("BF16", "INT64", "FP16")


def test_scales_lie_beside_their_rows_or_in_them() -> None:
    output = Place(2, 0)
    request = PlacedRequest(
        4, "FP8", "INT32", "BF16", Place(1, 0), NOWHERE, NOWHERE, output, scales=Place(3, 64)
    )
    (own,) = requests_of([request], 1, 2, HIDDEN, TOP_K, span_of)
    assert own.hidden_states == Span((1 << 32) + 2 * HIDDEN, 2 * HIDDEN)
    assert own.scales == Span((3 << 32) + 64 + 2 * 4, 2 * 4)
    (own,) = requests_of([replace(request, scales=NOWHERE)], 1, 2, HIDDEN, TOP_K, span_of)
    assert own.hidden_states == Span((1 << 32) + 2 * (HIDDEN + 4), 2 * (HIDDEN + 4))
    assert own.scales is None


@pytest.mark.parametrize("outputs", [("BF16", "BF16"), ("BF16", "FP32")])
@pytest.mark.parametrize(
    "datatypes",
    [("BF16", "BF16"), ("BF16", "FP16"), ("FP16", "FP32"), ("FP8", "FP8"), ("FP8", "FP32"), ("BF16", "FP8")],
)
@pytest.mark.parametrize("tokens", [(1, 1), (3, 1), (1, 5)])
def test_batches_have_the_same_dtypes_on_all_ranks(
    tokens: tuple[int, int], datatypes: tuple[str, str], outputs: tuple[str, str]
) -> None:
    step = [
        placed(n, 0, *types) for n, types in zip(tokens, zip(datatypes, outputs, strict=True), strict=True)
    ]
    whole = Batch(requests_of(step, 0, 1, HIDDEN, TOP_K, span_of))
    for rank in range(3):
        batch = Batch(requests_of(step, rank, 3, HIDDEN, TOP_K, span_of))
        assert (batch.dtype, batch.out_dtype) == (whole.dtype, whole.out_dtype)


def test_a_command_survives_its_bytes() -> None:
    requests = [placed(3, 64, "BF16", "FP16"), placed(2**31, 2**40)]
    requests.append(replace(placed(3, 64, "FP8"), scales=Place(9, 2**33)))
    command = StepCommand(2**40, 7, requests)
    assert StepCommand.unpacked(command.packed()) == command


HOST, GPU = 1, 2


def in_region(num_tokens: int, routing: int = 0, rows: int = HOST, datatype: str = "BF16") -> PlacedRequest:
    """A request whose rows lie in a region, and its routing, 0: it has none."""
    place = Place(routing, 64) if routing else NOWHERE
    hidden_states = Place(rows, 0)
    return PlacedRequest(num_tokens, datatype, "INT32", "BF16", hidden_states, place, place, hidden_states)


@pytest.mark.parametrize("rows", [HOST, GPU])
def test_small_steps_are_graphs_wherever_their_rows_lie(rows: int) -> None:
    requests = [in_region(3, rows=rows), in_region(2, rows=HOST)]
    assert graph_of(requests, 3, GPU.__eq__) == (4, True)
    routed = [in_region(3, HOST, rows)]
    assert graph_of(routed, 3, GPU.__eq__) == (4, False)


def test_other_steps_are_launched_kernel_by_kernel() -> None:
    most = TOKEN_COUNTS[-1]
    assert graph_of([in_region(most)], most, GPU.__eq__) is not None
    assert graph_of([in_region(2 * most)], most + 1, GPU.__eq__) is None, "too many tokens on a rank"
    assert graph_of([in_region(3), in_region(3, HOST)], 3, GPU.__eq__) is None, "some have routing"
    assert graph_of([in_region(3), in_region(3, datatype="FP32")], 3, GPU.__eq__) is None
    assert graph_of([in_region(3, GPU)], 3, GPU.__eq__) is None, "a rank's part may begin anywhere"


@pytest.mark.parametrize(
    ("partition", "other", "expected"),
    [
        (None, None, False),  # one stream
        ("a", "a", False),
        ("a", "b", False),  # SMs of their own
        ("a", None, True),
        (None, "a", True),
    ],
)
def test_steps_in_a_partition_and_on_the_whole_device_share_sms(
    partition: str | None, other: str | None, expected: bool
) -> None:
    assert share_sms(partition, other) is expected
