"""Which graph the ranks replay for a step, from the step alone."""

import pytest

from expertd.service.moe.step.graphs import TOKEN_COUNTS
from expertd.service.ranks.messages import NOWHERE, Place, PlacedRequest
from expertd.service.ranks.worker.own_steps import graph_of

HOST, GPU = 1, 2


def request(num_tokens: int, routing: int = 0, rows: int = HOST, datatype: str = "BF16") -> PlacedRequest:
    """A request whose rows lie in a region, and its routing, 0: it has none."""
    place = Place(routing, 64) if routing else NOWHERE
    hidden_states = Place(rows, 0)
    return PlacedRequest(num_tokens, datatype, "INT32", "BF16", hidden_states, place, place, hidden_states)


@pytest.mark.parametrize("rows", [HOST, GPU])
def test_small_steps_are_graphs_wherever_their_rows_lie(rows: int) -> None:
    requests = [request(3, rows=rows), request(2, rows=HOST)]
    assert graph_of(requests, 3, GPU.__eq__) == (4, True)
    routed = [request(3, HOST, rows)]
    assert graph_of(routed, 3, GPU.__eq__) == (4, False)


def test_other_steps_are_launched_kernel_by_kernel() -> None:
    most = TOKEN_COUNTS[-1]
    assert graph_of([request(most)], most, GPU.__eq__) is not None
    assert graph_of([request(2 * most)], most + 1, GPU.__eq__) is None, "too many tokens on a rank"
    assert graph_of([request(3), request(3, HOST)], 3, GPU.__eq__) is None, "some have routing"
    assert graph_of([request(3), request(3, datatype="FP32")], 3, GPU.__eq__) is None
    assert graph_of([request(3, GPU)], 3, GPU.__eq__) is None, "a rank's part may begin anywhere"
