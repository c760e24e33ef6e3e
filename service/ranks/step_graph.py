"""Which CUDA graph the ranks replay for a step: all of them the same, since launches wait for each other."""

from collections.abc import Callable, Sequence

from expertd.kernels.request_table import MAX_REQUESTS
from expertd.service.moe.graphs import TOKEN_COUNTS, padded_tokens
from expertd.service.ranks.messages import PlacedRequest

IsOnGpu = Callable[[int], bool]
"""Whether the region with this number lies in a GPU's memory."""


def graph_of(requests: Sequence[PlacedRequest], most: int, is_on_gpu: IsOnGpu) -> tuple[int, bool] | None:
    """The graph for a step with up to `most` tokens on a rank: its tokens, and whether the layer routes.

    None: the step is launched kernel by kernel.
    """
    given = {request.topk_ids.region > 0 for request in requests}
    fits = most <= TOKEN_COUNTS[-1] and len(requests) <= MAX_REQUESTS and len(given) == 1
    if not fits or not all(_fits(request, is_on_gpu) for request in requests):
        return None
    return padded_tokens(most), not given.pop()


def _fits(request: PlacedRequest, is_on_gpu: IsOnGpu) -> bool:
    """Whether the graphs' kernels can access any rank's rows and routing, in place or in a copy on the host.

    A rank's part of routing in a GPU's memory may begin at any multiple of four bytes.
    """
    routing = request.topk_ids.region, request.topk_weights.region
    return request.datatype == "BF16" and not any(region and is_on_gpu(region) for region in routing)
