"""/v1/log: the minimum level of log lines, which can be changed while the server runs."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request

from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.schemas import LogLevel
from expertd.service.util import logs

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": LogLevel.model_json_schema(), "example": {"level": "debug"}}
        },
    }
}


def log_router(set_level: Callable[[str], None], bodies: BodyReader) -> APIRouter:
    """GET and PUT /v1/log; set_level changes the level of the server's processes."""
    router = APIRouter(prefix="/v1", tags=["Log"])

    @router.get("/log", response_model=LogLevel)
    async def get_log() -> dict[str, str]:
        """The minimum level of log lines."""
        return {"level": logs.level()}

    @router.put(
        "/log", response_model=LogLevel, responses=errors(400, 408, 413, 415, 422), openapi_extra=_BODY
    )
    async def put_log(request: Request) -> dict[str, str]:
        """Change the minimum level of log lines until the server ends."""
        wanted = parsed(LogLevel, await control_body(request, bodies))
        set_level(wanted.level)
        return {"level": logs.level()}

    return router
