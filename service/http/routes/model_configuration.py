"""/v2/models/{model}/config: Triton's model configuration extension."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from expertd.backends import BACKENDS
from expertd.service.engine.engine import Engine
from expertd.service.engine.spec import LayerSpec
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.open_inference import (
    SERVER_NAME,
    ModelName,
    Version,
    fp8_parameters,
    input_datatypes,
    layer_parameters,
)
from expertd.service.inference.tensors import INPUT_DATATYPES, OUTPUT


class InputConfiguration(BaseModel):
    name: str
    data_type: str
    dims: list[int] = Field(description="-1: any number of tokens")
    optional: bool


class OutputConfiguration(BaseModel):
    name: str
    data_type: str
    dims: list[int]


class InstanceGroup(BaseModel):
    name: str
    kind: Literal["KIND_AUTO", "KIND_CPU", "KIND_GPU"] = Field(description="KIND_AUTO: while loading")
    count: int = Field(description="ranks that share the layer")


class DynamicBatching(BaseModel):
    max_queue_delay_microseconds: int


class Parameter(BaseModel):
    string_value: str


class ModelConfiguration(BaseModel):
    name: str
    platform: str
    backend: str
    max_batch_size: int = Field(description="0: tokens are a dimension of the tensors, in dims")
    input: list[InputConfiguration]
    output: list[OutputConfiguration]
    instance_group: list[InstanceGroup]
    dynamic_batching: DynamicBatching
    parameters: dict[str, Parameter]


def configuration_router(engine: Engine) -> APIRouter:
    """GET /v2/models/{model}/config."""
    router = APIRouter(prefix="/v2/models", tags=["Open Inference Protocol"])

    @router.get("/{model}/config", response_model=ModelConfiguration, responses=errors(404, 503))
    async def model_configuration(model: ModelName) -> dict[str, Any]:
        """Tensors, limits and sizes of a model, in Triton's form."""
        return _configuration(engine, engine.served(model))

    @router.get(
        "/{model}/versions/{version}/config", response_model=ModelConfiguration, responses=errors(404, 503)
    )
    async def model_version_configuration(model: ModelName, version: Version) -> dict[str, Any]:
        """Tensors, limits and sizes of a model, in Triton's form."""
        return _configuration(engine, engine.served(model, version))

    return router


def _configuration(engine: Engine, spec: LayerSpec) -> dict[str, Any]:
    def tensor(name: str, datatype: str, columns: int) -> dict[str, Any]:
        return {"name": name, "data_type": f"TYPE_{datatype}", "dims": [-1, columns]}

    hidden_states = tensor("hidden_states", spec.datatype, spec.hidden_size)
    routing = [
        {**tensor(name, INPUT_DATATYPES[name][0], spec.top_k), "optional": True}
        for name in ("topk_ids", "topk_weights")
    ]
    parameters = _parameters(engine, spec)
    return {
        "name": spec.name,
        "platform": SERVER_NAME,
        "backend": SERVER_NAME,
        "max_batch_size": 0,
        "input": [{**hidden_states, "optional": False}, *routing],
        "output": [tensor(OUTPUT, spec.datatype, spec.hidden_size)],
        "instance_group": [{"name": spec.name, "kind": _kind(engine), "count": engine.settings.num_ranks}],
        "dynamic_batching": {"max_queue_delay_microseconds": 0},
        "parameters": {name: {"string_value": str(value)} for name, value in parameters.items()},
    }


def _kind(engine: Engine) -> str:
    if engine.loaded is None:
        return "KIND_AUTO"
    return "KIND_GPU" if BACKENDS[engine.loaded.backend].on_gpu else "KIND_CPU"


def _parameters(engine: Engine, spec: LayerSpec) -> dict[str, str | int]:
    limits = engine.settings.limits
    model = next(model for model in engine.settings.models if model.name == spec.name)
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": model.intermediate_size,
        "top_k": spec.top_k,
        **layer_parameters(engine, spec),
        "max_batch_tokens": limits.max_batch_tokens,
        "max_body_bytes": limits.max_body_bytes,
        "max_json_bytes": limits.max_json_bytes,
        **{f"{name}_datatypes": input_datatypes(spec, name) for name in ("hidden_states", "topk_ids")},
        **fp8_parameters(spec),
    }
