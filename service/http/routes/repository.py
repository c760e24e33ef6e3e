"""The model repository extension: the index of configured models, and calls that load and unload them."""

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request

from expertd.service.engine.engine import Engine, Phase
from expertd.service.engine.repository import READY
from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.protocol import OipError, json_of
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.open_inference import ModelName
from expertd.service.http.routes.schemas import ModelIndexEntry, ModelStateResponse
from expertd.service.util.sentences import shortened, shown

_DEPENDENTS = "unload_dependents"


def repository_router(engine: Engine, bodies: BodyReader) -> APIRouter:
    """Routes under /v2/repository."""
    router = APIRouter(prefix="/v2/repository", tags=["Open Inference Protocol"])

    @router.post("/index", response_model=list[ModelIndexEntry], responses=errors(400, 408, 413, 415, 503))
    async def repository_index(request: Request) -> list[dict[str, str]]:
        """The configured models; with {"ready": true} in the body, only those that are ready."""
        only_ready = _only_ready(await control_body(request, bodies))
        entries = [_entry(engine, name) for name in engine.models]
        return [entry for entry in entries if entry["state"] == "READY" or not only_ready]

    @router.post(
        "/models/{model}/load",
        response_model=ModelStateResponse,
        responses=errors(400, 404, 408, 409, 413, 415, 500, 503),
    )
    async def load_model(model: ModelName, request: Request) -> dict[str, str]:
        """Load a configured model while others serve; answered when it is ready, at once if it was."""
        _check_parameters(await control_body(request, bodies), ())
        name = engine.model(model).name
        await engine.repository.load(name)
        return _state(engine, name)

    @router.post(
        "/models/{model}/unload",
        response_model=ModelStateResponse,
        responses=errors(400, 404, 408, 409, 413, 415, 503),
    )
    async def unload_model(model: ModelName, request: Request) -> dict[str, str]:
        """Unload a model: refuse new requests, answer those it has accepted, and free its memory."""
        _check_parameters(await control_body(request, bodies), (_DEPENDENTS,))
        name = engine.model(model).name
        await engine.repository.unload(name)
        return _state(engine, name)

    return router


def _entry(engine: Engine, name: str) -> dict[str, str]:
    state, reason = engine.repository.state(name)
    if state == READY.state and (why := engine.why_not_ready(name)) is not None:
        state, reason = "LOADING" if engine.phase is Phase.LOADING else "UNAVAILABLE", why
    return {"name": name, "version": MODEL_VERSION, "state": state, "reason": reason}


def _state(engine: Engine, name: str) -> dict[str, str]:
    return {"name": name, "state": engine.repository.state(name).state}


def _only_ready(body: bytes) -> bool:
    given = _object(body, 'expected {"ready": true or false}')
    ready = given.get("ready", False)
    if not isinstance(ready, bool):
        raise OipError(400, f"ready: expected true or false, got {shown(ready)}")
    return ready


def _check_parameters(body: bytes, known: Collection[str]) -> None:
    """Raise OipError (400) for parameters that would have no effect."""
    parameters = _object(body, "expected an object").get("parameters")
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise OipError(400, f"parameters: expected an object, got {shown(parameters)}")
    for name, value in parameters.items():
        if name not in known:
            expected = f"only {', '.join(known)}" if known else "none, since models are loaded as configured"
            raise OipError(400, f"parameters: expected {expected}, got {shortened(name)}")
        if not isinstance(value, bool):
            raise OipError(400, f"parameter {name}: expected true or false, got {shown(value)}")


def _object(body: bytes, expected: str) -> dict[str, Any]:
    """The JSON object in a body; an empty one if there is no body, or null."""
    given = json_of(body, "body") if body else None
    if given is not None and not isinstance(given, dict):
        raise OipError(400, f"body: {expected}, got {shown(given)}")
    return given or {}
