"""/v1/profile: records steps with torch's profiler."""

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response

from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import ExecutorClosedError
from expertd.service.engine.profiling import Recording
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.schemas import ProfileRequest

_LOOK_SECONDS = 0.1
_EXAMPLE = {"steps": 20, "seconds": 10}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": False,
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
        responses={**_TRACE, **errors(400, 408, 409, 413, 415, 422, 503, 507)},
        openapi_extra=_BODY,
    )
    async def post_profile(request: Request) -> Response:
        """Record the next steps with torch's profiler: a Chrome trace, which Perfetto opens.

        The recording ends early, without a trace, if the caller hangs up or the server shuts down.
        """
        wanted = parsed(ProfileRequest, await control_body(request, bodies) or b"{}")
        recording = await _while_wanted(request, engine, wanted)
        return Response(recording.trace, media_type="application/json")

    return router


async def _while_wanted(request: Request, engine: Engine, wanted: ProfileRequest) -> Recording:
    """The recording. Raises ExecutorClosedError once it is not wanted, and as `Engine.profile` does."""
    recording = asyncio.create_task(engine.profile(wanted.steps, wanted.seconds))
    try:
        while not (await asyncio.wait([recording], timeout=_LOOK_SECONDS))[0]:
            if engine.draining or await request.is_disconnected():
                raise ExecutorClosedError("the server is shutting down, or the caller hung up")
        return recording.result()
    finally:
        recording.cancel()
        with suppress(asyncio.CancelledError, Exception):  # its own error was raised above
            await recording
