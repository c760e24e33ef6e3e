"""/v1/placement: gets which rank holds which experts, or changes it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from expertd.service.engine.engine import Engine
from expertd.service.engine.placement import PlacementState
from expertd.service.http.bodies import BodyReader, control_body
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.parsing import parsed
from expertd.service.http.routes.placement_schemas import PlacementRequest, PlacementResponse

_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": PlacementRequest.model_json_schema(),
                "example": {"action": "rebalance"},
            }
        },
    }
}


def placement_router(engine: Engine, bodies: BodyReader) -> APIRouter:
    """GET and POST /v1/placement."""
    router = APIRouter(prefix="/v1", tags=["Placement"])

    @router.get("/placement", response_model=PlacementResponse, responses=errors(409, 503))
    async def get_placement() -> dict[str, Any]:
        """The experts of each rank, their loads, and what the last plan changed."""
        return _shown(engine)

    @router.post(
        "/placement",
        response_model=PlacementResponse,
        responses=errors(400, 404, 408, 409, 413, 415, 422, 503),
        openapi_extra=_BODY,
    )
    async def post_placement(request: Request) -> dict[str, Any]:
        """Rebalance now, or pin a model's placement; answered once all experts have moved."""
        wanted = parsed(PlacementRequest, await control_body(request, bodies))
        placements = engine.placements()
        if wanted.model is not None:
            engine.model(wanted.model)
        if wanted.model is not None and wanted.ranks is not None:
            done = placements.pin(wanted.model, wanted.ranks)
        else:
            done = placements.rebalance(list(engine.models) if wanted.model is None else [wanted.model])
        await asyncio.wrap_future(done)
        return _shown(engine)

    return router


def _shown(engine: Engine) -> dict[str, Any]:
    placements = engine.placements()
    return {
        "policy": placements.policy,
        "objective": placements.objective,
        "moving": placements.is_moving,
        "models": {name: _layer(state) for name, state in placements.states().items()},
    }


def _layer(state: PlacementState) -> Mapping[str, Any]:
    return {
        "ranks": [
            {"experts": experts, "load": load, "up": is_up}
            for experts, load, is_up in zip(state.ranks, state.rank_loads, state.are_up, strict=True)
        ],
        "loads": state.loads,
        "max_over_mean": state.imbalance,
        "pinned": state.is_pinned,
        "last_plan": None if state.last_plan is None else state.last_plan._asdict(),
        "moves": state.moves,
        "move_seconds": state.move_seconds,
    }
