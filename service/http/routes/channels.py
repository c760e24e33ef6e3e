"""/v1/channels: opens, lists and closes channels; their requests do not pass through HTTP."""

import base64
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from expertd.service.channels.hub import ChannelHub, Entry
from expertd.service.channels.opening import CallMemory, CudaMemory, NixlMemory, Opening
from expertd.service.channels.relays import Relays
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.protocol import OipError
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.schemas import (
    CallMemoryRegion,
    ChannelInfo,
    ChannelRequest,
    ChannelResponse,
    ChannelsResponse,
    NixlMemoryRegion,
    SystemMemoryRegion,
)
from expertd.service.inference.gate import Gate
from expertd.service.util.sentences import shown
from expertd_client.channel.layout import VERSION

ChannelId = Annotated[str, Path(description="id of an open channel")]
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": ChannelRequest.model_json_schema(ref_template="#/components/schemas/{model}"),
                "example": {
                    "version": VERSION,
                    "model": "demo",
                    "num_slots": 2,
                    "max_tokens": 64,
                    "memory": "system",
                },
            }
        },
    }
}


def channels_router(hub: ChannelHub, relays: Relays, bodies: BodyReader, gate: Gate) -> APIRouter:
    """POST and GET /v1/channels, GET and DELETE /v1/channels/{id}."""
    router = APIRouter(prefix="/v1", tags=["Channels"])

    @router.post(
        "/channels",
        status_code=201,
        response_model=ChannelResponse,
        response_model_exclude_unset=True,
        responses=errors(400, 403, 404, 408, 413, 415, 503),
        openapi_extra=_BODY,
    )
    async def open_channel(request: Request) -> dict[str, Any]:
        """Open a channel, to be claimed at the socket with the token within 10 s (docs/transports.md).

        One over NIXL is claimed by a process of the server, which the caller's end reaches by `nixl`.
        """
        hub.check_enabled()
        body = await control_body(request, bodies)
        entry = await hub.open(_opening(body, gate.caller(request.scope["headers"])))
        assert entry.token is not None
        where: dict[str, Any] = {"socket": str(hub.socket), "token": entry.token.hex()}
        if entry.opening.kind == "nixl":
            where = {"nixl": await relays.start(entry)}
        return {
            "id": entry.channel.id,
            "instance": hub.instance,
            "version": VERSION,
            **_models_of(entry),
            **where,
            "geometry": entry.channel.geometry.shown(),
        }

    @router.get(
        "/channels", response_model=ChannelsResponse, response_model_exclude_unset=True, responses=errors(403)
    )
    async def list_channels() -> dict[str, Any]:
        """The open channels."""
        hub.check_enabled()
        return {"channels": [_shown(entry) for entry in hub.listed]}

    @router.get(
        "/channels/{channel}",
        response_model=ChannelInfo,
        response_model_exclude_unset=True,
        responses=errors(403, 404),
    )
    async def get_channel(channel: ChannelId) -> dict[str, Any]:
        """One open channel."""
        return _shown(hub.get(channel))

    @router.delete(
        "/channels/{channel}",
        response_model=ChannelInfo,
        response_model_exclude_unset=True,
        responses=errors(403, 404),
    )
    async def close_channel(channel: ChannelId, request: Request) -> dict[str, Any]:
        """Close a channel: the key that opened it, or an admin's. Queued requests are answered with 499."""
        entry = hub.get(channel)
        gate.check_own(f"channel {channel}", entry.opening.caller, request.scope["headers"])
        hub.close(entry.channel, "DELETE")
        return _shown(entry)

    return router


def _opening(body: bytes, caller: str) -> Opening:
    given = parsed(ChannelRequest, body, invalid=400)
    if given.version != VERSION:
        raise OipError(400, f"version of channels: expected {VERSION}, got {given.version}")
    memory: int | CudaMemory | CallMemory | NixlMemory | None = None
    if isinstance(given.memory, SystemMemoryRegion):
        memory = given.memory.system.byte_size
    elif isinstance(given.memory, CallMemoryRegion):
        memory = CallMemory()
    elif isinstance(given.memory, NixlMemoryRegion):
        nixl = given.memory.nixl
        memory = NixlMemory(nixl.byte_size, nixl.address, nixl.metadata)
    elif given.memory != "system":
        cuda = given.memory.cuda
        memory = CudaMemory(_handle(cuda.raw_handle.b64), cuda.byte_size)
    return Opening(_models(given), given.num_slots, given.max_tokens, given.datatype, memory, caller)


def _models(given: ChannelRequest) -> tuple[str, ...]:
    if (given.model is None) == (given.models is None):
        got = "neither" if given.model is None else "both"
        raise OipError(400, f"model: expected one of model and models, got {got}")
    names = [given.model] if given.model is not None else given.models or []
    if len(set(names)) < len(names):
        raise OipError(400, f"models: expected different names, got {shown(names)}")
    return tuple(names)


def _handle(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error is one; a text that is not ASCII raises another
        raise OipError(400, f"raw_handle.b64: expected base64, got {shown(text)}") from error


def _models_of(entry: Entry) -> dict[str, Any]:
    """As they were asked for."""
    models = entry.channel.models
    return {"model": models[0]} if len(models) == 1 else {"models": list(models)}


def _shown(entry: Entry) -> dict[str, Any]:
    channel = entry.channel
    return {
        "id": channel.id,
        **_models_of(entry),
        "memory": entry.opening.kind,
        "data_bytes": channel.geometry.data_bytes,
        "owner": entry.owner,
        "requests": channel.taken,
    }
