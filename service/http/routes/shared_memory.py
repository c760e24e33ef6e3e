"""/v2/systemsharedmemory and /v2/cudasharedmemory: Triton's calls for regions of shared memory."""

import base64
import binascii
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel

from expertd.service.engine.shared_memory import RegisteredRegions
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.protocol import OipError
from expertd.service.http.routes.documentation import REF, errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.schemas import (
    CudaRegion,
    CudaRegionRequest,
    SystemRegion,
    SystemRegionRequest,
)
from expertd.service.memory import RegionKind

RegionName = Annotated[str, Path(description="name of a region")]


def shared_memory_router(shared_memory: RegisteredRegions, bodies: BodyReader) -> APIRouter:
    """Status, register and unregister of both kinds of regions."""
    router = APIRouter(prefix="/v2", tags=["Shared memory"])
    _add_common(router, "system", SystemRegion, shared_memory)
    _add_common(router, "cuda", CudaRegion, shared_memory)
    refusals = errors(400, 403, 408, 413, 415, 503)

    @router.post(
        "/systemsharedmemory/region/{name}/register",
        response_class=Response,
        responses=refusals,
        openapi_extra=_body(SystemRegionRequest, {"key": "/my_region", "offset": 0, "byte_size": 65536}),
    )
    async def register_system(name: RegionName, request: Request) -> Response:
        """Register a file of /dev/shm as a region."""
        asked = parsed(SystemRegionRequest, await control_body(request, bodies), invalid=400)
        await shared_memory.register_system(name, asked.key, asked.offset, asked.byte_size)
        return Response()

    @router.post(
        "/cudasharedmemory/region/{name}/register",
        response_class=Response,
        responses=refusals,
        openapi_extra=_body(
            CudaRegionRequest,
            {"raw_handle": {"b64": f"{'A' * 86}=="}, "device_id": 0, "byte_size": 65536},
        ),
    )
    async def register_cuda(name: RegionName, request: Request) -> Response:
        """Register a GPU's memory, by the handle that cudaIpcGetMemHandle gave its owner."""
        asked = parsed(CudaRegionRequest, await control_body(request, bodies), invalid=400)
        try:
            handle = base64.b64decode(asked.raw_handle.b64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise OipError(400, f"raw_handle.b64: expected base64, got another text: {error}") from error
        await shared_memory.register_cuda(name, handle, asked.device_id, asked.byte_size)
        return Response()

    return router


def _add_common(
    router: APIRouter, kind: RegionKind, schema: type[BaseModel], shared_memory: RegisteredRegions
) -> None:
    path = f"/{kind}sharedmemory"

    @router.get(f"{path}/status", response_model=list[schema], responses=errors(403, 503))  # type: ignore[valid-type]
    async def status_of_all() -> list[dict[str, Any]]:
        """The registered regions of this kind."""
        return _shown(shared_memory, kind, None)

    @router.get(
        f"{path}/region/{{name}}/status",
        response_model=list[schema],  # type: ignore[valid-type]
        responses=errors(403, 404, 503),
    )
    async def status_of_one(name: RegionName) -> list[dict[str, Any]]:
        """One region of this kind, as a list of one."""
        return _shown(shared_memory, kind, name)

    @router.post(f"{path}/unregister", response_class=Response, responses=errors(403, 503))
    async def unregister_all() -> Response:
        """Unregister all regions of this kind; answered when no request uses them any more."""
        await shared_memory.unregister(kind)
        return Response()

    @router.post(f"{path}/region/{{name}}/unregister", response_class=Response, responses=errors(403, 503))
    async def unregister_one(name: RegionName) -> Response:
        """Unregister a region; answered when no request uses it any more. An unknown name is no error."""
        await shared_memory.unregister(kind, name)
        return Response()


def _shown(shared_memory: RegisteredRegions, kind: RegionKind, name: str | None) -> list[dict[str, Any]]:
    return [
        {"name": region.name, **region.details, "byte_size": region.num_bytes}
        for region in shared_memory.status(kind, name)
    ]


def _body(schema: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    content = {"schema": schema.model_json_schema(ref_template=REF), "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}
