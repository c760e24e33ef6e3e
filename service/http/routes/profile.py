"""/v1/profile: records steps with torch's profiler."""

from typing import Any

from fastapi import APIRouter, Request, Response

from expertd.service.engine.engine import Engine
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.schemas import ProfileRequest

_EXAMPLE = {"steps": 20, "seconds": 10}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": ProfileRequest.model_json_schema(), "example": _EXAMPLE}},
    }
}
_TRACE: dict[int | str, dict[str, Any]] = {
    200: {"description": "a Chrome trace", "content": {"application/json": {"schema": {"type": "object"}}}}
}


def profile_router(engine: Engine, bodies: BodyReader) -> APIRouter:
    """POST /v1/profile."""
    router = APIRouter(prefix="/v1", tags=["Profile"])

    @router.post(
        "/profile",
        response_class=Response,
        responses={**_TRACE, **errors(400, 408, 409, 413, 415, 422, 503)},
        openapi_extra=_BODY,
    )
    async def post_profile(request: Request) -> Response:
        """Record the next steps with torch's profiler: a Chrome trace, which Perfetto opens."""
        wanted = parsed(ProfileRequest, await control_body(request, bodies))
        recording = await engine.profile(wanted.steps, wanted.seconds)
        return Response(recording.trace, media_type="application/json")

    return router
