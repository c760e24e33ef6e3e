"""A served model's public properties."""

from collections.abc import Mapping
from dataclasses import dataclass

from expertd.service.engine.errors import ModelNotFoundError
from expertd.service.settings.model import Settings
from expertd.service.util.sentences import any_of, shown

MODEL_VERSION = "1"
"""The only version of every model."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A served model's sizes; `datatype` applies to requests without a JSON header.

    max_json_bytes: of the JSON part of a request, and of an output as JSON.
    host_routing: whether the host must see topk_ids and topk_weights, because steps in the masked layout do.
    takes_fp8: whether hidden states may be FP8: only if every scale stands for 128 columns.
    """

    name: str
    hidden_size: int
    top_k: int
    datatype: str
    max_request_tokens: int
    max_json_bytes: int
    host_routing: bool = False
    takes_fp8: bool = True


def specs_of(settings: Settings) -> dict[str, LayerSpec]:
    """The served models, by name."""
    return {
        model.name: LayerSpec(
            name=model.name,
            hidden_size=model.hidden_size,
            top_k=model.top_k,
            datatype=model.datatype,
            max_request_tokens=settings.limits.max_request_tokens,
            max_json_bytes=settings.limits.max_json_bytes,
            host_routing=model.masked_max_tokens > 0,
            takes_fp8=model.shape.has_whole_blocks,
        )
        for model in settings.models
    }


def served(
    models: Mapping[str, LayerSpec], name: str, version: str = MODEL_VERSION, names_all: bool = True
) -> LayerSpec:
    """The model `name`, loaded or not. Raises UnknownModelError if it is not among `models`.

    names_all  whether the error names all of `models`
    """
    spec = models.get(name)
    if spec is None:
        expected = any_of(models) if names_all else "a served one"
        raise ModelNotFoundError(f"model: expected {expected}, got {shown(name)}")
    if version != MODEL_VERSION:
        raise ModelNotFoundError(f"version of model {name}: expected {MODEL_VERSION}, got {shown(version)}")
    return spec
