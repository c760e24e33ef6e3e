"""A rank's part of a step: which rows are its own, and where they lie.

Parts of steps of one request are kept, since callers of channels send the same few requests again and again;
and a request that is kept has its `plan` for the next step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from expertd.service.moe.request import LayerRequest
from expertd.service.moe.split import part_of
from expertd.service.ranks.messages import body_bytes, unpacked_body
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.split import requests_of
from expertd.service.ranks.step_graph import graph_of
from expertd.service.settings.served import ModelSettings

_MOST = 256
"""Steps that are kept: those of some tens of channels, each with a few slots."""
_ALONE_BYTES = body_bytes(1)  # longer bodies are not kept: the same requests seldom come together twice


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
