"""The parts of the OpenAPI document that FastAPI cannot derive: the bodies of infer, and the errors."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

from expertd.service.engine.spec import MODEL_VERSION, LayerSpec
from expertd.service.http.rights import rights_for
from expertd.service.http.routes.schemas import ErrorResponse, InferJsonRequest, InferJsonResponse
from expertd.service.settings.keys import Right
from expertd.service.util.sentences import any_of

_STATUS_TEXTS = {
    400: "The request is invalid",
    401: "The server has API keys, and the request has none, or an unknown one",
    403: "The settings do not allow it, or the API key lacks the right",
    404: "No such model, version, region or channel",
    408: "The body did not arrive within body_timeout_seconds; the connection is closed",
    409: "The server's device, ranks, lanes or memory do not allow it, or another profile is being recorded",
    413: "The body is larger than max_body_bytes, or its JSON or the output as JSON than max_json_bytes",
    415: "The body's Content-Encoding is not supported",
    422: "A field is missing, unknown or of a wrong type, or the device or the ranks cannot do this",
    429: "The queue is full (with Retry-After), and limits.queue_full_status is 429",
    500: "The server failed",
    503: "Not ready or shutting down, the queue or the memory is full (with Retry-After), the request's "
    "timeout passed, there are too many channels, or no folder for temporary files",
    507: "There is no room for a temporary file",
}

_KEY_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, if the server has them (setting `keys`), with one of the rights of the call",
}

REF = "#/components/schemas/{model}"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_HEADER_LENGTH = {
    "description": "bytes of JSON at the start of the body; in a request, 0: the body has only rows",
    "schema": {"type": "integer", "minimum": 0},
}
_ENCODING = {"schema": {"type": "string", "enum": ["gzip", "deflate"]}}

INFER_REQUEST: dict[str, Any] = {
    "parameters": [
        {"name": "Inference-Header-Content-Length", "in": "header", "required": False, **_HEADER_LENGTH},
        {"name": "Content-Encoding", "in": "header", "required": False, **_ENCODING},
        {
            "name": "Accept-Encoding",
            "in": "header",
            "required": False,
            "description": "exactly gzip or exactly deflate compresses the response",
            "schema": {"type": "string"},
        },
    ],
    "requestBody": {
        "required": True,
        "description": "Inference-Header-Content-Length, not Content-Type, determines the body's format.",
        "content": {
            "application/json": {"schema": InferJsonRequest.model_json_schema(ref_template=REF)},
            "application/octet-stream": _BINARY,
        },
    },
}
INFER_RESPONSE: dict[str, Any] = {
    "description": "JSON, or JSON followed by binary tensors if the request asks for them",
    "headers": {
        "Inference-Header-Content-Length": {**_HEADER_LENGTH, "required": False},
        "Content-Encoding": {**_ENCODING, "required": False},
    },
    "content": {
        "application/json": {"schema": InferJsonResponse.model_json_schema(ref_template=REF)},
        "application/octet-stream": _BINARY,
    },
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route with these error statuses."""
    return {status: _error(status) for status in statuses}


def _error(status: int) -> dict[str, Any]:
    # Not as a `model`: FastAPI would build a validator for each, which takes half of a server's routes' time.
    content = {"application/json": {"schema": {"$ref": REF.format(model=ErrorResponse.__name__)}}}
    return {"description": _STATUS_TEXTS[status], "content": content}


def document(app: FastAPI, spec: LayerSpec) -> None:
    """Complete the OpenAPI document of `app`: bodies' definitions and API keys; without FastAPI's own 422.

    The example of an infer request is for the served model `spec`, and can be sent unchanged.
    """
    build = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = build()
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components[ErrorResponse.__name__] = ErrorResponse.model_json_schema()
            document["components"]["securitySchemes"] = {"key": _KEY_SCHEME}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    _tidy(operation, components)
                    _name_rights(operation, rights_for(method.upper(), path))
                    _name_served(operation, spec)
                if path.endswith("/infer"):
                    body = operations["post"]["requestBody"]["content"]["application/json"]
                    body["example"] = _one_token(spec)
            components.pop("HTTPValidationError", None)
            components.pop("ValidationError", None)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _name_served(operation: dict[str, Any], spec: LayerSpec) -> None:
    values = {"model": spec.name, "version": MODEL_VERSION, "name": "my_region", "channel": "1"}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            parameter["example"] = values[parameter["name"]]


def _name_rights(operation: dict[str, Any], rights: Collection[Right]) -> None:
    """Document the key of a call; a server without keys needs none, so it is optional."""
    if not rights:
        return
    operation["security"] = [{"key": []}, {}]
    operation["description"] = f"{operation.get('description', '')}\n\nRight: {any_of(rights)}."
    for status in (401, 403):
        operation["responses"][str(status)] = _error(status)


def _one_token(spec: LayerSpec) -> dict[str, Any]:
    size = spec.hidden_size
    data = [1 - index % 3 for index in range(size)]  # short numbers, not all equal
    tensor = {"name": "hidden_states", "shape": [1, size], "datatype": "FP32", "data": data}
    return {"id": "one token", "inputs": [tensor]}


def _tidy(operation: dict[str, Any], components: dict[str, Any]) -> None:
    # FastAPI documents its own 422 for every route with parameters, but ours never return it.
    invalid = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
    if invalid.get("schema", {}).get("$ref", "").endswith("HTTPValidationError"):
        del operation["responses"]["422"]
    bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
    for body in bodies:
        for content in body.get("content", {}).values():
            components.update(content.get("schema", {}).pop("$defs", {}))
