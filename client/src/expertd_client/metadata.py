"""What a server says about its models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from expertd_client.errors import InvalidAnswerError

_PARAMETERS = {
    "num_experts": int,
    "num_shared_experts": int,
    "shared_experts": str,
    "scoring_func": str,
    "activation": str,
    "weight_format": str,
    "max_request_tokens": int,
    "weights_id": str,
    "device_calls": str,
    "device_calls_own_gpu": str,
}


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A served layer: takes [tokens, hidden_size], chooses top_k experts a token; `datatype` is its own.

    What an older server does not say is None, and so is `weights_id` while the layer loads.

    num_shared_experts  by the checkpoint's rule
    shared_experts      "included" in the answers, "excluded", so that the caller computes them, or "none"
    local_experts       those that the server holds, of the others nothing is added to the output; None: all
    weight_format       of the routed experts in the server's memory: "FP8", "MXFP4", "INT4" or "NVFP4"
    max_request_tokens  larger calls are sent in parts
    weights_id          compare it with that of a checkpoint's files, `expertd_client.weights_id`
    device_calls        the UUID of the GPU that answers device calls; None: the server answers none
    device_calls_own_gpu  for callers on that GPU: "mps", they compute beside the server; "turns": in turns
    """

    name: str
    hidden_size: int
    top_k: int
    datatype: str
    num_experts: int | None = None
    num_shared_experts: int | None = None
    shared_experts: str | None = None
    scoring_func: str | None = None
    activation: str | None = None
    max_request_tokens: int | None = None
    weights_id: str | None = None
    weight_format: str | None = None
    local_experts: frozenset[int] | None = None
    # Of the server, not of the layer, which is the same on others.
    device_calls: str | None = field(default=None, compare=False)
    device_calls_own_gpu: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A served model; `reason` says why it is not ready, and is empty if it is."""

    name: str
    ready: bool
    reason: str


class ServerState(NamedTuple):
    """What a pool knows of a server.

    state    up; draining: it ends, or begins, and takes no calls; down: it does not answer
    reason   why it is not up
    calls    of this client that it computes now
    seconds  that a call is expected to take there; 0 while that is unknown
    ended    this client's infer calls there, by how they ended (docs/pool.md)
    """

    url: str
    state: str
    reason: str
    calls: int
    seconds: float
    ended: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """A server's name and version, and the protocol extensions that it offers."""

    name: str
    version: str
    extensions: tuple[str, ...]


def read_server(answer: Any) -> ServerMetadata:
    """From the answer to GET /v2. Raises InvalidAnswerError."""
    try:
        extensions = tuple(map(str, answer["extensions"]))
        return ServerMetadata(str(answer["name"]), str(answer["version"]), extensions)
    except (KeyError, TypeError) as error:
        raise InvalidAnswerError(f"answer: expected a server's metadata, got {answer!r:.200}") from error


def read_metadata(answer: Any) -> ModelMetadata:
    """From the answer to GET /v2/models/{model}. Raises InvalidAnswerError."""
    try:
        inputs = {entry["name"]: entry for entry in answer["inputs"]}
        hidden_states = inputs["hidden_states"]
        hidden_size, top_k = hidden_states["shape"][1], inputs["topk_ids"]["shape"][1]
        datatype = str(hidden_states["datatype"])
        told = answer.get("parameters") or {}
        more: dict[str, Any] = {
            name: kind(told[name]) for name, kind in _PARAMETERS.items() if told.get(name) is not None
        }
        if told.get("local_experts") is not None:
            more["local_experts"] = _read_experts(str(told["local_experts"]))
        return ModelMetadata(str(answer["name"]), int(hidden_size), int(top_k), datatype, **more)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidAnswerError(f"answer: expected a MoE layer's metadata, got {answer!r:.200}") from error


def read_statuses(answer: Any) -> list[ModelStatus]:
    """From the answer to POST /v2/repository/index. Raises InvalidAnswerError."""
    try:
        return [
            ModelStatus(str(entry["name"]), entry["state"] == "READY", str(entry.get("reason", "")))
            for entry in answer
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidAnswerError(f"answer: expected a list of models, got {answer!r:.200}") from error


def _read_experts(text: str) -> frozenset[int]:
    """From ranges such as 0-63,128. Raises ValueError."""
    ranges = [part.split("-") for part in text.replace(" ", "").split(",")]
    return frozenset(
        number for first, *last in ranges for number in range(int(first), int(last[0] if last else first) + 1)
    )
