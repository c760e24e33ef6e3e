"""A rank's requests of a step."""

from collections.abc import Callable, Sequence

from expertd.service.memory import Span
from expertd.service.moe.request import FP8, LayerRequest, row_bytes
from expertd.service.moe.split import part_of
from expertd.service.ranks.messages import PlacedRequest

BYTES = {"BF16": 2, "FP16": 2, "FP32": 4, "INT32": 4, "INT64": 8}

SpanOf = Callable[[int, int, int], Span]
"""The memory of (region, offset, bytes)."""


def requests_of(
    requests: Sequence[PlacedRequest],
    rank: int,
    num_ranks: int,
    hidden_size: int,
    top_k: int,
    span_of: SpanOf,
) -> list[LayerRequest]:
    """The rows of a step that belong to `rank`, in place.

    An empty request comes first if the rank has no rows, or if it could not see otherwise that the step's
    datatypes differ: all ranks must exchange rows of the same dtypes.
    """
    rows = part_of(sum(request.num_tokens for request in requests), rank, num_ranks)
    own: list[LayerRequest] = []
    start = 0
    for request in requests:
        first, last = max(rows.start - start, 0), min(rows.stop - start, request.num_tokens)
        start += request.num_tokens
        if first < last:
            own.append(_rows(request, range(first, last), hidden_size, top_k, span_of))
    step = _datatypes(requests)
    if not own or step != _datatypes(own):
        own.insert(0, LayerRequest(0, b"", step[0], None, "INT32", None, step[1]))
    return own


def _datatypes(requests: Sequence[PlacedRequest | LayerRequest]) -> tuple[str, str]:
    """The datatypes of a batch's hidden states and outputs, as `Batch` has them: FP32 if they differ."""
    inputs = {"FP32" if request.datatype == FP8 else request.datatype for request in requests}
    outputs = {request.output_datatype for request in requests}
    return inputs.pop() if len(inputs) == 1 else "FP32", outputs.pop() if len(outputs) == 1 else "FP32"


def _rows(request: PlacedRequest, rows: range, hidden_size: int, top_k: int, span_of: SpanOf) -> LayerRequest:
    def part(name: str, size: int) -> Span | None:
        region, offset = getattr(request, name)
        return span_of(region, offset + rows.start * size, len(rows) * size) if region else None

    row = row_bytes(request.datatype, hidden_size)
    scales = part("scales", row - hidden_size)
    hidden_states = part("hidden_states", row if scales is None else hidden_size)
    assert hidden_states is not None
    return LayerRequest(
        len(rows),
        hidden_states,
        request.datatype,
        part("topk_ids", top_k * BYTES[request.topk_ids_datatype]),
        request.topk_ids_datatype,
        part("topk_weights", top_k * BYTES["FP32"]),
        request.output_datatype,
        part("output", hidden_size * BYTES[request.output_datatype]),
        scales=scales,
    )
