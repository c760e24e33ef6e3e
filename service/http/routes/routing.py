"""/v1/models/{model}/routing: which experts a model's router chooses for some tokens."""

from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from expertd.service.engine.engine import Engine
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.protocol import OipError
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.open_inference import ModelName
from expertd.service.http.routes.schemas import RoutingResponse
from expertd.service.moe.request import LayerRequest, row_bytes

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "hidden states [tokens, hidden_size] of the model's datatype, at most 64 KiB",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def routing_router(engine: Engine, bodies: BodyReader) -> APIRouter:
    """POST /v1/models/{model}/routing."""
    router = APIRouter(prefix="/v1", tags=["Routing"])

    @router.post(
        "/models/{model}/routing",
        response_model=RoutingResponse,
        responses=errors(400, 404, 408, 409, 413, 415, 503),
        openapi_extra=_BODY,
    )
    async def post_routing(model: ModelName, request: Request) -> dict[str, Any]:
        """The experts, and their weights, that the model's router chooses; no expert computes anything."""
        spec = engine.served(model)
        body = await control_body(request, bodies)
        size = row_bytes(spec.datatype, spec.hidden_size)
        if not body or len(body) % size:
            expected = f"rows of {size} bytes ({spec.hidden_size} {spec.datatype}), at least one"
            raise OipError(400, f"body: expected {expected}, got {len(body)} bytes")
        rows = LayerRequest(
            len(body) // size, body, spec.datatype, None, "INT32", None, output_datatype=spec.datatype
        )
        topk_ids, topk_weights = await engine.route(spec.name, rows)
        if not np.isfinite(topk_weights).all():
            raise OipError(400, "body: expected hidden states with finite weights, got others")
        return {"topk_ids": topk_ids.tolist(), "topk_weights": topk_weights.tolist()}

    return router
