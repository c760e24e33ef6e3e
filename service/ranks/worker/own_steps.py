"""A rank's part of a step: which rows are its own, and where they lie.

Parts of steps of one request are kept, since callers of channels send the same few requests again and again;
and a request that is kept has its `plan` for the next step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from expertd.kernels.request_table import MAX_REQUESTS
from expertd.service.memory import Span
from expertd.service.moe.needs import TOKEN_COUNTS
from expertd.service.moe.request import FP8, LayerRequest, row_bytes
from expertd.service.moe.split import part_of
from expertd.service.moe.step.graphs import padded_tokens
from expertd.service.ranks.messages import PlacedRequest, body_bytes, unpacked_body
from expertd.service.ranks.regions import MappedRegions
from expertd.service.settings.served import ModelSettings

BYTES = {"BF16": 2, "FP16": 2, "FP32": 4, "INT32": 4, "INT64": 8}

SpanOf = Callable[[int, int, int], Span]
"""The memory of (region, offset, bytes)."""
IsOnGpu = Callable[[int], bool]
"""Whether the region with this number lies in a GPU's memory."""
_MOST = 256
"""Steps that are kept: those of some tens of channels, each with a few slots."""
_ALONE_BYTES = body_bytes(1)  # longer bodies are not kept: the same requests seldom come together twice


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


def graph_of(
    requests: Sequence[PlacedRequest], max_tokens: int, is_on_gpu: IsOnGpu
) -> tuple[int, bool] | None:
    """The graph for a step with up to `max_tokens` on a rank: its tokens, and whether the layer routes.

    None: the step is launched kernel by kernel.
    """
    given = {request.topk_ids.region > 0 for request in requests}
    fits = max_tokens <= TOKEN_COUNTS[-1] and len(requests) <= MAX_REQUESTS and len(given) == 1
    if not fits or not all(_fits(request, is_on_gpu) for request in requests):
        return None
    return padded_tokens(max_tokens), not given.pop()


def _fits(request: PlacedRequest, is_on_gpu: IsOnGpu) -> bool:
    """Whether the graphs' kernels can access any rank's rows and routing, in place or in a copy on the host.

    A rank's part of routing in a GPU's memory may begin at any multiple of four bytes.
    """
    routing = request.topk_ids.region, request.topk_weights.region
    return request.datatype == "BF16" and not any(region and is_on_gpu(region) for region in routing)


class OwnStep(NamedTuple):
    """A rank's part of a step, which is the same for every step of these requests.

    model     its place in the settings
    counts    tokens of each rank
    requests  this rank's, see `requests_of`
    graph     what all ranks replay, see `graph_of`
    """

    model: int
    counts: Sequence[int]
    requests: Sequence[LayerRequest]
    graph: tuple[int, bool] | None


class OwnSteps:
    """The steps of one rank; those of one request are kept.

    share  (k, n): the rank computes the k-th of n parts of a command's rows

    When a region is unmapped, all are forgotten.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        num_ranks: int,
        share: tuple[int, int],
        regions: MappedRegions,
    ) -> None:
        self._models, self._num_ranks, self._share, self._regions = models, num_ranks, share, regions
        self._kept = lru_cache(_MOST)(self._made)
        regions.when_unmapped = self.forget

    def of(self, body: bytes) -> OwnStep:
        """The rank's part of a step, by the `packed_body` of its command. Raises what `requests_of` does."""
        return self._kept(body) if len(body) <= _ALONE_BYTES else self._made(body)

    def forget(self) -> None:
        """Make all parts anew from now on."""
        self._kept.cache_clear()

    def _made(self, body: bytes) -> OwnStep:
        index, requests = unpacked_body(body)
        model = self._models[index]
        total = sum(request.num_tokens for request in requests)
        counts = [len(part_of(total, rank, self._num_ranks)) for rank in range(self._num_ranks)]
        own = requests_of(requests, *self._share, model.hidden_size, model.top_k, self._regions.span)
        return OwnStep(index, counts, own, graph_of(requests, max(counts), self._regions.is_on_gpu))
