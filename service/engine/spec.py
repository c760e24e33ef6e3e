"""A served model's public properties."""

from dataclasses import dataclass

MODEL_VERSION = "1"
"""The only version of every model."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A served model's sizes; `datatype` applies to requests without a JSON header.

    host_routing: whether the host must see topk_ids and topk_weights, because steps in the masked layout do.
    """

    name: str
    hidden_size: int
    top_k: int
    datatype: str
    max_request_tokens: int
    host_routing: bool = False
