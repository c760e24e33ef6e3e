"""What callers may know of a served model."""

from dataclasses import dataclass

MODEL_VERSION = "1"
"""Of every model: there is only one."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A served model's sizes; `datatype` is that of requests which name none."""

    name: str
    hidden_size: int
    top_k: int
    datatype: str
    max_request_tokens: int
