"""Every call but infer: asked of the application as over HTTP, whose JSON has the messages' fields."""

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from expertd.service.engine.errors import EngineError
from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.grpc.messages import CLASSES, ONEOF
from expertd.service.http.app import ExpertApp
from expertd.service.http.bodies import CONTROL_BODY
from expertd.service.http.protocol import OipError
from expertd.service.http.responses import http_error
from expertd.service.util.sentences import shown


class ControlCall(NamedTuple):
    """A call over HTTP: `path` has the message's fields in braces; `one` is it for a message with a name."""

    method: str
    path: str
    one: str = ""
    body: Callable[[Any], dict[str, Any]] | None = None
    wrap: Callable[[Any], dict[str, Any]] = lambda answer: answer or {}


def _regions(answer: Any) -> dict[str, Any]:
    return {"regions": {region["name"]: region for region in answer}}


def _system_region(asked: Any) -> dict[str, Any]:
    return {"key": asked.key, "offset": asked.offset, "byte_size": asked.byte_size}


def _cuda_region(asked: Any) -> dict[str, Any]:
    handle = {"b64": base64.b64encode(asked.raw_handle).decode("ascii")}
    return {"raw_handle": handle, "device_id": asked.device_id, "byte_size": asked.byte_size}


def _shared_memory(name: str, kind: str, body: Callable[[Any], dict[str, Any]]) -> dict[str, ControlCall]:
    root = f"/v2/{kind}sharedmemory"
    region = f"{root}/region/{{name}}"
    return {
        f"{name}SharedMemoryStatus": ControlCall("GET", f"{root}/status", f"{region}/status", wrap=_regions),
        f"{name}SharedMemoryRegister": ControlCall("POST", f"{region}/register", body=body),
        f"{name}SharedMemoryUnregister": ControlCall("POST", f"{root}/unregister", f"{region}/unregister"),
    }


def _metadata(answer: Any) -> dict[str, Any]:
    """With parameters as messages."""
    for described in (answer, *answer["inputs"]):
        described["parameters"] = {
            name: {"int64_param" if isinstance(value, int) else "string_param": value}
            for name, value in described["parameters"].items()
        }
    return {**answer}


def _without_parameters(answer: Any) -> dict[str, Any]:
    """The message has no field for them."""
    return {name: value for name, value in answer.items() if name != "parameters"}


def _repository(what: str) -> ControlCall:
    path = f"/v2/repository/models/{{model_name}}/{what}"
    return ControlCall("POST", path, body=_model_parameters, wrap=lambda answer: {})


def _model_parameters(asked: Any) -> dict[str, Any]:
    if asked.repository_name:
        got = shown(asked.repository_name)
        raise OipError(400, f"repository_name: expected none, since there is one repository, got {got}")
    values = {
        name: getattr(given, given.WhichOneof(ONEOF) or "", None) for name, given in asked.parameters.items()
    }
    return {
        "parameters": {
            name: shown(value) if isinstance(value, bytes) else value for name, value in values.items()
        }
    }


_MODEL = "/v2/models/{name}/versions/{version}"

CALLS: dict[str, ControlCall] = {
    "ServerLive": ControlCall("GET", "/v2/health/live"),
    "ServerReady": ControlCall("GET", "/v2/health/ready"),
    "ServerMetadata": ControlCall("GET", "/v2", wrap=_without_parameters),
    "ModelReady": ControlCall("GET", f"{_MODEL}/ready", wrap=lambda answer: {"ready": answer["ready"]}),
    "ModelMetadata": ControlCall("GET", _MODEL, wrap=_metadata),
    "ModelConfig": ControlCall("GET", f"{_MODEL}/config", wrap=lambda answer: {"config": answer}),
    "ModelStatistics": ControlCall("GET", "/v2/models/stats", f"{_MODEL}/stats"),
    "RepositoryIndex": ControlCall(
        "POST",
        "/v2/repository/index",
        body=lambda asked: {"ready": asked.ready},
        wrap=lambda answer: {"models": answer},
    ),
    "RepositoryModelLoad": _repository("load"),
    "RepositoryModelUnload": _repository("unload"),
    **_shared_memory("System", "system", _system_region),
    **_shared_memory("Cuda", "cuda", _cuda_region),
}


async def answer(app: ExpertApp, name: str, data: bytes) -> bytes:
    """The serialized response to a call of CALLS that was admitted. Raises OipError."""
    CONTROL_BODY.check(len(data), is_whole=True)
    try:
        asked = CLASSES[f"{name}Request"].FromString(data)
    except DecodeError as error:
        raise OipError(400, f"request: expected a {name}Request, got another message ({error})") from error
    call = CALLS[name]
    body = b"" if call.body is None else json.dumps(call.body(asked)).encode("ascii")
    response = CLASSES[f"{name}Response"]()
    try:
        found = await _ask(app, call.method, _path(app, call, asked), body)
    except OipError as error:
        # As Triton does, also for a model that is not served.
        if error.status in (404, 503) and "ready" in response.DESCRIPTOR.fields_by_name:
            return bytes(response.SerializeToString())  # ready: false
        raise
    return bytes(ParseDict(call.wrap(found), response).SerializeToString())


def _path(app: ExpertApp, call: ControlCall, asked: Any) -> str:
    if "{model_name}" in call.path:
        _check_served(app, asked.model_name, MODEL_VERSION)
        return call.path.format(model_name=asked.model_name)
    path = call.one if call.one and asked.name else call.path
    if "{name}" not in path:
        return path
    if "{version}" in path:
        version = asked.version or MODEL_VERSION
        _check_served(app, asked.name, version)
        return path.format(name=asked.name, version=version)
    if not asked.name or "/" in asked.name:
        raise OipError(400, f"name: expected that of a region, without a slash, got {shown(asked.name)}")
    return path.format(name=asked.name)


def _check_served(app: ExpertApp, name: str, version: str) -> None:
    try:
        app.engine.model(name, version)  # a name may have a slash, which no path has
    except EngineError as error:
        raise http_error(error) from error


async def _ask(app: ExpertApp, method: str, path: str, body: bytes) -> Any:
    """The JSON that the application answers; None without any. Raises OipError."""
    messages: list[dict[str, Any]] = []
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": b"",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": {},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await app.answer_admitted(scope, receive, send)
    start, *parts = messages
    content = b"".join(part.get("body", b"") for part in parts)
    if start["status"] == 200:
        return json.loads(content) if content else None
    headers = {name.decode("ascii"): value.decode("ascii") for name, value in start["headers"]}
    retry = {name: value for name, value in headers.items() if name == "retry-after"}
    raise OipError(start["status"], json.loads(content)["error"], headers=retry)
