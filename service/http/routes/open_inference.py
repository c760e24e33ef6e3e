"""The Open Inference Protocol's calls: server and model metadata, health, infer."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Response

from expertd import __version__
from expertd.limits import SCALE_BLOCK
from expertd.service.engine.engine import Engine
from expertd.service.engine.layers import rule_of
from expertd.service.engine.spec import MODEL_VERSION, LayerSpec
from expertd.service.http.routes.documentation import INFER_REQUEST, INFER_RESPONSE, errors
from expertd.service.http.routes.schemas import (
    LiveResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    ReadyResponse,
    ServerMetadataResponse,
    TensorMetadata,
)
from expertd.service.inference.tensors import FP8S, INPUT_DATATYPES, OUTPUT, SCALE
from expertd.service.inference.versions import CLIENT_VERSIONS

SERVER_NAME = "expertd"
_EXTENSIONS = ("binary_tensor_data", "parameters", "statistics", "model_configuration", "model_repository")

ModelName = Annotated[str, Path(description="name of a served model")]
Version = Annotated[str, Path(description=f"the only version of every model: {MODEL_VERSION}")]


def protocol_router(engine: Engine) -> APIRouter:
    """Routes under /v2. Those of infer are only documented here: the application answers them itself."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])

    @router.get("", response_model=ServerMetadataResponse)
    async def server_metadata() -> dict[str, Any]:
        """Name, version and protocol extensions of this server, and of its process the identity."""
        return {
            "name": SERVER_NAME,
            "version": __version__,
            "extensions": [*_EXTENSIONS, *engine.shared_memory.extensions],
            "parameters": {"instance": engine.instance, "client_versions": CLIENT_VERSIONS},
        }

    @router.get("/health/live", response_model=LiveResponse)
    async def server_live() -> dict[str, bool]:
        """200 while the process answers, even during loading and draining."""
        return {"live": True}

    @router.get("/health/ready", response_model=ReadyResponse, responses=errors(503))
    async def server_ready() -> dict[str, bool]:
        """200 when every model is ready and no shutdown has begun."""
        engine.check_ready()
        return {"ready": True}

    @router.get(
        "/models/{model}",
        response_model=ModelMetadataResponse,
        response_model_exclude_none=True,
        responses=errors(404, 503),
    )
    async def model_metadata(model: ModelName) -> dict[str, Any]:
        """Inputs and outputs of a model, and what its layer computes."""
        return _metadata(engine, engine.served(model))

    @router.get(
        "/models/{model}/versions/{version}",
        response_model=ModelMetadataResponse,
        response_model_exclude_none=True,
        responses=errors(404, 503),
    )
    async def model_version_metadata(model: ModelName, version: Version) -> dict[str, Any]:
        """Inputs and outputs of a model, and what its layer computes."""
        return _metadata(engine, engine.served(model, version))

    @router.get("/models/{model}/ready", response_model=ModelReadyResponse, responses=errors(404, 503))
    async def model_ready(model: ModelName) -> dict[str, Any]:
        """200 when the model is ready."""
        return _ready(engine, engine.model_without_key(model))

    @router.get(
        "/models/{model}/versions/{version}/ready",
        response_model=ModelReadyResponse,
        responses=errors(404, 503),
    )
    async def model_version_ready(model: ModelName, version: Version) -> dict[str, Any]:
        """200 when the model is ready."""
        return _ready(engine, engine.model_without_key(model, version))

    infer_responses: dict[int | str, dict[str, Any]] = {
        200: INFER_RESPONSE,
        **errors(400, 404, 408, 413, 415, 429, 500, 503),
    }

    @router.post("/models/{model}/infer", responses=infer_responses, openapi_extra=INFER_REQUEST)
    async def model_infer(model: ModelName) -> Response:
        """The layer's output for hidden states, routed by the layer or by topk_ids and topk_weights."""
        raise AssertionError("ExpertApp answers infer requests before its routes do")

    @router.post(
        "/models/{model}/versions/{version}/infer", responses=infer_responses, openapi_extra=INFER_REQUEST
    )
    async def model_version_infer(model: ModelName, version: Version) -> Response:
        """The layer's output for hidden states, routed by the layer or by topk_ids and topk_weights."""
        raise AssertionError("ExpertApp answers infer requests before its routes do")

    return router


def _ready(engine: Engine, spec: LayerSpec) -> dict[str, Any]:
    engine.check_ready(spec.name)
    return {"name": spec.name, "ready": True}


def fp8_parameters(spec: LayerSpec) -> dict[str, str | int]:
    """What FP8 hidden states are, and the input with their scales; empty if the model takes none.

    The scales are no input of the metadata, because tools send every tensor that they find there.
    """
    if not spec.takes_fp8:
        return {}
    return {"fp8_format": "e4m3", "fp8_scale": SCALE, "fp8_scale_columns": SCALE_BLOCK}


def input_datatypes(spec: LayerSpec, name: str) -> str:
    """The datatypes that an input may have, with commas between them."""
    return ",".join(each for each in INPUT_DATATYPES[name] if each not in FP8S or spec.takes_fp8)


def layer_parameters(engine: Engine, spec: LayerSpec) -> dict[str, str | int]:
    """What a caller of its layer has to know; weights_id and the GPU of calls only once it has loaded."""
    model = next(model for model in engine.settings.models if model.name == spec.name)
    shared = "included" if model.shared_experts else "excluded"
    calls = None if engine.loaded is None else engine.loaded.calls
    if calls is not None and not calls.answers(spec.name):
        calls = None
    maybe = {
        "local_experts": model.local_experts,
        "weights_id": engine.repository.weights_ids.get(spec.name),
        "device_calls": None if calls is None else calls.gpu,
        "device_calls_own_gpu": None if calls is None else calls.own_gpu,
    }
    return {
        "num_experts": model.num_experts,
        "num_shared_experts": model.num_shared_experts,
        "shared_experts": shared if model.num_shared_experts else "none",
        "scoring_func": model.routing.scoring_func,
        "activation": rule_of(model).routed.text,
        "weight_format": model.shape.weight_layout.format,
        "max_request_tokens": spec.max_request_tokens,
        **{name: value for name, value in maybe.items() if value is not None},
    }


def _metadata(engine: Engine, spec: LayerSpec) -> dict[str, Any]:
    def tensor(name: str, datatype: str, columns: int, **more: str | int) -> TensorMetadata:
        parameters = {"datatypes": input_datatypes(spec, name), **more}
        return TensorMetadata(name=name, datatype=datatype, shape=[-1, columns], parameters=parameters)

    return {
        "name": spec.name,
        "versions": [MODEL_VERSION],
        "platform": SERVER_NAME,
        "inputs": [
            tensor("hidden_states", spec.datatype, spec.hidden_size, **fp8_parameters(spec)),
            tensor("topk_ids", INPUT_DATATYPES["topk_ids"][0], spec.top_k),
            tensor("topk_weights", INPUT_DATATYPES["topk_weights"][0], spec.top_k),
        ],
        "outputs": [TensorMetadata(name=OUTPUT, datatype=spec.datatype, shape=[-1, spec.hidden_size])],
        "parameters": layer_parameters(engine, spec),
    }
