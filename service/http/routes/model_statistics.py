"""/v2/models/stats and those of one model: Triton's statistics extension."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from expertd.service.engine.engine import Engine
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.steps import ModelStatistics, Total
from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.http.routes.documentation import errors
from expertd.service.http.routes.open_inference import ModelName, Version


class Duration(BaseModel):
    count: int
    ns: int = Field(description="nanoseconds of all of them together")


class InferenceStatistics(BaseModel):
    success: Duration = Field(description="requests with output, from their headers to the end of the answer")
    fail: Duration = Field(description="all other requests of the model")
    queue: Duration = Field(description="requests whose step succeeded, from acceptance to its start")
    compute_input: Duration = Field(description="0 ns: part of compute_infer")
    compute_infer: Duration = Field(description="the same requests, with the time of their step")
    compute_output: Duration = Field(description="0 ns: part of compute_infer")
    cache_hit: Duration = Field(description="always 0")
    cache_miss: Duration = Field(description="always 0")


class BatchStatistics(BaseModel):
    batch_size: int = Field(description="tokens of a step, rounded up to a power of two")
    compute_input: Duration
    compute_infer: Duration = Field(description="steps of this size")
    compute_output: Duration


class ModelStatisticsEntry(BaseModel):
    name: str
    version: str
    last_inference: int = Field(description="end of the last step, in milliseconds since 1970; 0: none yet")
    inference_count: int = Field(description="tokens computed")
    execution_count: int = Field(description="steps")
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class StatisticsResponse(BaseModel):
    model_stats: list[ModelStatisticsEntry]


def statistics_router(engine: Engine, metrics: Metrics) -> APIRouter:
    """GET /v2/models/stats, /v2/models/{model}/stats; to be included before /v2/models/{model}."""
    router = APIRouter(prefix="/v2/models", tags=["Open Inference Protocol"])

    @router.get("/stats", response_model=StatisticsResponse)
    async def all_statistics() -> dict[str, Any]:
        """Requests, steps and their times, of every model."""
        return _shown(metrics.statistics())

    @router.get("/{model}/stats", response_model=StatisticsResponse, responses=errors(404))
    async def model_statistics(model: ModelName) -> dict[str, Any]:
        """Requests, steps and their times, of one model."""
        name = engine.model(model).name
        return _shown({name: metrics.statistics()[name]})

    @router.get("/{model}/versions/{version}/stats", response_model=StatisticsResponse, responses=errors(404))
    async def model_version_statistics(model: ModelName, version: Version) -> dict[str, Any]:
        """Requests, steps and their times, of one model."""
        name = engine.model(model, version).name
        return _shown({name: metrics.statistics()[name]})

    return router


def _shown(statistics: Mapping[str, ModelStatistics]) -> dict[str, Any]:
    return {"model_stats": [_entry(name, each) for name, each in statistics.items()]}


def _entry(name: str, statistics: ModelStatistics) -> dict[str, Any]:
    steps = statistics.steps
    none = _duration(Total())
    return {
        "name": name,
        "version": MODEL_VERSION,
        "last_inference": steps.last_ms,
        "inference_count": steps.tokens,
        "execution_count": steps.steps,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.failure),
            "queue": _duration(steps.queue),
            **_compute(steps.compute),
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {"batch_size": size, **_compute(total)} for size, total in sorted(steps.by_size.items())
        ],
    }


def _compute(total: Total) -> dict[str, Any]:
    """Copies are part of a step, so Triton's other two stages take no time of their own."""
    nothing = _duration(Total(total.count))
    return {"compute_input": nothing, "compute_infer": _duration(total), "compute_output": nothing}


def _duration(total: Total) -> dict[str, int]:
    return {"count": total.count, "ns": total.ns}
