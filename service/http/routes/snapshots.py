"""What `/v1/live` says of a server, from what metrics count already. Counts are sums since its start."""

import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from expertd import __version__
from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import EngineError, PartitionsUnavailableError
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.family import PREFIX, SECONDS
from expertd.service.engine.metrics.requests import RequestTotals
from expertd.service.engine.metrics.steps import StepTotals
from expertd.service.http.feed import SECONDS as INTERVAL_SECONDS
from expertd.service.http.routes.partitions import shown_partitions
from expertd.service.settings.lanes import lanes_of

_COUNTER_SUFFIX = "_total"


class Snapshots:
    """Makes the events of `/v1/live`, in the format of server-sent events."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine, self._metrics = engine, metrics

    def server(self) -> bytes:
        """The first event of a stream: what does not change."""
        models = {
            model.name: {
                "hidden_size": model.hidden_size,
                "intermediate_size": model.intermediate_size,
                "num_experts": model.num_experts,
                "top_k": model.top_k,
                "datatype": model.datatype,
                "partition": model.partition,
            }
            for model in self._engine.settings.models
        }
        return _event(
            "server",
            {
                "version": __version__,
                "interval_seconds": INTERVAL_SECONDS,
                "bounds_seconds": SECONDS,
                "num_lanes": len(lanes_of(self._engine.settings)),
                "max_request_tokens": self._engine.settings.limits.max_request_tokens,
                "peers": self._engine.settings.page.peers,
                "models": models,
            },
        )

    def take(self, models: Collection[str]) -> dict[str, bytes]:
        """The event for those who look at each of `models`; for any thread but the event loop's."""
        now = round(time.time(), 3)
        steps = self._metrics.step_totals()  # right after: rates are over the time between two of these
        common = json.dumps({"time": now, **self._common(steps)}, separators=(",", ":"))[:-1]
        return {model: _with_experts(common, model, steps[model]) for model in models}

    def _common(self, steps: Mapping[str, StepTotals]) -> dict[str, Any]:
        engine = self._engine
        requests, queues = self._metrics.request_totals(), engine.queue_states()
        loaded = engine.loaded
        return {
            "phase": engine.phase.value,
            "why_not_ready": engine.why_not_ready(),
            "backend": loaded.backend if loaded else "",
            "device": loaded.device if loaded else "",
            "models": {
                name: {
                    "why_not_ready": engine.why_not_ready(name),
                    "unloaded": engine.repository.is_unloaded(name),
                    "queue": {"requests": queues[name].num_requests, "tokens": queues[name].num_tokens},
                    "requests": _requests(requests[name]),
                    "steps": _steps(steps[name]),
                }
                for name in engine.models
            },
            "not_served": requests[""].refused,
            "partitions": self._partitions(),
            "ranks": self._ranks(),
            "gpus": self._gpus(),
        }

    def _partitions(self) -> dict[str, Any] | None:
        """As `GET /v1/partitions`, errors included; None for a device without SMs."""
        try:
            return shown_partitions(self._engine)
        except PartitionsUnavailableError:
            return None
        except EngineError as error:
            return {"error": str(error)}

    def _ranks(self) -> list[dict[str, Any]]:
        loaded = self._engine.loaded
        return [
            {
                "up": rank.is_up,
                "starts": rank.starts,
                "seconds": round(rank.compute_seconds, 6),
                "expert_tokens": rank.expert_tokens,
                "memory_bytes": rank.device.memory,
            }
            for rank in (loaded.ranks() if loaded else ())
        ]

    def _gpus(self) -> dict[str, dict[str, Any]]:
        """gpu -> its metrics `expertd_gpu_*`, by the rest of their names; `throttled` has the reasons."""
        gpus: dict[str, dict[str, Any]] = {}
        for metric in self._engine.gpu_metrics():
            for sample in metric.samples:
                of_gpu = gpus.setdefault(sample.labels["gpu"], {})
                name = sample.name.removeprefix(f"{PREFIX}gpu_").removesuffix(_COUNTER_SUFFIX)
                if "reason" not in sample.labels:
                    of_gpu[name] = sample.value
                elif sample.value:
                    of_gpu.setdefault(name, []).append(sample.labels["reason"])
        return gpus


def _requests(totals: RequestTotals) -> dict[str, Any]:
    return {
        "success": totals.success.count,
        "failure": totals.failure.count,
        "by_seconds": totals.by_seconds,
        "refused": totals.refused,
    }


def _steps(totals: StepTotals) -> dict[str, Any]:
    sums = totals.sums
    return {
        "steps": sums.steps,
        "tokens": sums.tokens,
        "seconds": sum(total.ns for total in sums.by_size.values()) / 1e9,
        "queue_seconds": sums.queue.ns / 1e9,
        "requests": sums.queue.count,
        "failures": totals.failures,
        "flops": totals.flops,
        "bytes": totals.num_bytes,
    }


def _with_experts(common: str, model: str, steps: StepTotals) -> bytes:
    """`common`, a JSON object without its end, with the tokens of each expert of `model`."""
    experts = json.dumps({"model": model, "tokens": steps.expert_tokens.tolist()}, separators=(",", ":"))
    return f'event: snapshot\ndata: {common},"experts":{experts}}}\n\n'.encode()


def _event(name: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
