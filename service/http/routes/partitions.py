"""/v1/partitions: gets the GPU's SM partitions, or replaces all of them."""

from typing import Any

from fastapi import APIRouter, Request

from expertd.service.engine.engine import Engine
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.schemas import PartitionsRequest, PartitionsResponse

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": PartitionsRequest.model_json_schema(),
                "example": {"partitions": {"compute": 112, "communication": 20}},
            }
        },
    }
}


def partitions_router(engine: Engine, bodies: BodyReader) -> APIRouter:
    """GET and PUT /v1/partitions."""
    router = APIRouter(prefix="/v1", tags=["SM partitions"])

    @router.get("/partitions", response_model=PartitionsResponse, responses=errors(409, 503))
    async def get_partitions() -> dict[str, Any]:
        """The device, its SMs, and the SMs requested by and granted to each partition."""
        return shown_partitions(engine)

    @router.put(
        "/partitions",
        response_model=PartitionsResponse,
        responses=errors(400, 408, 409, 413, 415, 422, 503),
        openapi_extra=_BODY,
    )
    async def put_partitions(request: Request) -> dict[str, Any]:
        """Replace all partitions between two steps, or change nothing; no request is dropped."""
        wanted = parsed(PartitionsRequest, await control_body(request, bodies))
        await engine.set_partitions(dict(wanted.partitions))
        return shown_partitions(engine)

    return router


def shown_partitions(engine: Engine) -> dict[str, Any]:
    """The answer of both calls. Raises as `Engine.partitions` does."""
    partitions = engine.partitions()
    return {
        "device": partitions.device_name,
        "total_sms": partitions.total_sms,
        "granularity": partitions.granularity,
        "partitions": {
            partition.name: {"requested_sms": partition.requested_sms, "num_sms": partition.num_sms}
            for partition in partitions.partitions
        },
    }
