"""What a runner needs of a layer: one that a device holds alone, or one that ranks hold together."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from expertd.kernels import Backend, HiddenStates
from expertd.kernels.device_calls import CallTable
from expertd.layout import Layout
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights


class Layer(Protocol):
    """See `MoELayer`, whose methods these are; weights are those on this device."""

    shape: LayerShape
    weights: ExpertWeights
    backend: Backend
    is_capturable: bool
    """Whether its calls can be captured in CUDA graphs."""
    needs_floats: bool
    """Whether more than the router and products with experts reads hidden states."""

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """Tokens of the next calls on each rank, on which their launches depend; (): there are no ranks."""

    def layout(self, num_tokens: int) -> Layout: ...

    def set_equal_token_counts(self, num_tokens: int) -> None: ...

    def route(self, hidden_states: Tensor, end_token: Tensor | None = None) -> tuple[Tensor, Tensor]: ...

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_sms: int | None = None,
        out: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor: ...

    def call_experts(self, calls: CallTable, num_tokens: int, num_sms: int | None) -> bool: ...

    def tokens_per_expert(self, offsets: NDArray[np.int32]) -> NDArray[np.int32]: ...
