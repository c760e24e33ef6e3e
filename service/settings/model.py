"""What can be set, with defaults, limits and meaning. Loading lives in `expertd.service.settings.loader`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from expertd.backends import BACKENDS
from expertd.limits import MAX_EXPERTS, SCALE_BLOCK
from expertd.routing import Routing
from expertd.service.moe.shape import LayerShape
from expertd.service.sentences import shown
from expertd.service.settings.spans import Layers, Span, numbers

ENV_PREFIX = "EXPERTD_"
ENV_DELIMITER = "__"

MIB = 1024 * 1024


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Frozen):
    """How much one request, one step and one model's queue may hold."""

    max_batch_tokens: int = Field(default=4096, ge=1, description="tokens of one step, at most")
    max_request_tokens: int = Field(default=4096, ge=1, description="tokens of one request, at most")
    max_queue_tokens: int = Field(default=65536, ge=1, description="tokens waiting per model, at most")
    max_queue_requests: int = Field(default=4096, ge=1, description="requests waiting per model, at most")
    max_body_bytes: int = Field(
        default=64 * MIB, ge=1, description="request body, before and after decompression"
    )
    max_json_bytes: int = Field(
        default=8 * MIB, ge=1, description="JSON part of an infer request: parsing holds up the event loop"
    )

    body_timeout_seconds: float = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="for a request's body to arrive, from its headers on",
    )
    max_header_bytes: int = Field(
        default=64 * 1024, ge=1024, description="request line and headers together, at most"
    )
    max_headers: int = Field(default=100, ge=1, description="headers of one request, at most")
    header_timeout_seconds: float = Field(
        default=10,
        gt=0,
        allow_inf_nan=False,
        description="for a request's headers to arrive, from its first byte on",
    )
    max_connections: int = Field(
        default=4096, ge=1, description="open connections; beyond them one is answered 503 and closed"
    )

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        for name in ("max_batch_tokens", "max_queue_tokens"):
            if self.max_request_tokens > getattr(self, name):
                raise ValueError(
                    f"max_request_tokens: expected at most {name} ({getattr(self, name)}), "
                    f"got {self.max_request_tokens}"
                )
        return self


class WeightsSettings(_Frozen):
    """Where a layer's weights come from: drawn at random from a seed, or read from a safetensors file."""

    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="draw them at random, the same each time; 0 where weights is left out",
    )
    path: Path | None = Field(default=None, description="a safetensors file as docs/weights.md describes it")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.seed is None) == (self.path is None):
            got = "neither" if self.seed is None else "both"
            raise ValueError(f"expected exactly one of seed and path, got {got}")
        return self


class RoutingSettings(_Frozen):
    """How a layer's router chooses experts and weighs them; see `Routing`."""

    scoring_func: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="of a token's logits: over all experts, or of each"
    )
    renormalize: bool = Field(default=True, description="divide a token's routing weights by their sum")
    routed_scaling_factor: float = Field(default=1.0, gt=0, le=1e6, description="then multiply them by this")
    num_expert_groups: int = Field(default=1, ge=1, description="equal groups that the experts form")
    topk_group: int = Field(default=1, ge=1, description="groups that a token's experts come from: its best")

    @property
    def rule(self) -> Routing:
        """The same as the kernels take it. Raises ValueError for a rule that chooses from no group."""
        return Routing(**self.model_dump())

    @model_validator(mode="after")
    def _rule_is_possible(self) -> Self:
        assert self.rule
        return self


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_Datatype = Literal["BF16", "FP16", "FP32"]


class ModelSettings(_Frozen):
    """One MoE layer served under a name."""

    name: str = Field(pattern=_NAME, description="what requests call the layer")
    hidden_size: int = Field(
        ge=SCALE_BLOCK, multiple_of=SCALE_BLOCK, description="numbers of a token's hidden state"
    )
    intermediate_size: int = Field(
        ge=SCALE_BLOCK, multiple_of=SCALE_BLOCK, description="of each expert, between up and down"
    )
    num_experts: int = Field(ge=1, le=MAX_EXPERTS, description="experts that a token is routed among")
    top_k: int = Field(ge=1, description="experts of each token")
    num_shared_experts: int = Field(
        default=0, ge=0, description="of intermediate_size each, that every token goes to"
    )
    local_experts: Span | None = Field(
        default=None, description="of num_experts, those held here, as in 0-63; null: all"
    )
    routing: RoutingSettings = Field(default=RoutingSettings(), description="the router's rule")
    weights: WeightsSettings = Field(default=WeightsSettings(seed=0), description="seed or path")
    datatype: _Datatype = Field(
        default="BF16",
        description="named in the metadata, and assumed for requests without a JSON header",
    )
    masked_max_tokens: int = Field(
        default=0, ge=0, description="steps of up to this many tokens take the masked layout; 0: none does"
    )
    partition: str | None = Field(
        default=None, description="SM partition the layer runs in; null: the whole device"
    )

    @property
    def shape(self) -> LayerShape:
        """The layer's sizes. Raises ValueError for sizes no layer can have here."""
        local_experts = None
        if self.local_experts is not None:
            held = numbers(self.local_experts)
            local_experts = range(held[0], held[-1] + 1)
        return LayerShape(
            self.hidden_size,
            self.intermediate_size,
            self.num_experts,
            self.top_k,
            self.num_shared_experts,
            local_experts,
        )

    @model_validator(mode="after")
    def _layer_is_possible(self) -> Self:
        shape = self.shape
        self.routing.rule.check(self.num_experts, self.top_k)
        if self.masked_max_tokens and len(shape.held_experts) < self.num_experts:
            raise ValueError(
                f"masked_max_tokens: expected 0 with local_experts, got {self.masked_max_tokens}"
            )
        return self


class CheckpointSettings(_Frozen):
    """MoE layers of a Hugging Face checkpoint directory, each served as {name}.layers.{layer}."""

    path: Path = Field(description="the directory with config.json and safetensors files")
    layers: Layers = Field(description="MoE layers to serve, as in 3, 3-5 or 3-5,9, or all")
    experts: Span | None = Field(
        default=None,
        description="routed experts held here, as in 0-63; null: all. The shared ones go with expert 0",
    )
    name: str | None = Field(
        default=None,
        pattern=_NAME,
        description="what layers are called before .layers.N; null: as the directory",
    )
    datatype: _Datatype = Field(default="BF16", description="as in models")
    masked_max_tokens: int = Field(default=0, ge=0, description="as in models")
    partition: str | None = Field(default=None, description="as in models")


class Settings(_Frozen):
    """Everything a server is started with. Built directly, it reads neither files nor the environment."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to listen on; there is no authentication, so by default this machine's alone",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        default="info", description="the least that is logged, in capitals or not"
    )
    access_log: bool = Field(default=False, description="a log line for each request")
    backend: str = Field(default="auto", description=f"{' or '.join(BACKENDS)}; auto: the first that can run")
    partitions: dict[str, int] = Field(default={}, description="SM partitions: name -> SMs")
    limits: Limits = Field(default=Limits(), description="how much is taken at a time")
    keep_alive_seconds: int = Field(default=75, ge=1, description="how long an idle connection stays open")
    shutdown_delay_seconds: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="after SIGTERM, how long new requests are still taken while not ready",
    )
    drain_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="after that delay, how long accepted requests have to be answered",
    )
    models: tuple[ModelSettings, ...] = Field(default=(), description="layers that are served")
    checkpoints: tuple[CheckpointSettings, ...] = Field(
        default=(), description="checkpoint directories, whose layers are served beside the models"
    )

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, name: str) -> str:
        if name not in (names := ("auto", *BACKENDS)):
            raise ValueError(f"expected one of {', '.join(names)}, got {shown(name)}")
        return name

    @model_validator(mode="after")
    def _something_is_served(self) -> Self:
        if not self.models and not self.checkpoints:
            raise ValueError("models or checkpoints: expected at least one layer to serve, got none")
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: expected different names, got {name!r} {names.count(name)} times")
        for partition, sms in self.partitions.items():
            if sms < 1:
                raise ValueError(f"partitions.{partition}: expected at least 1 SM, got {sms}")
        self._check_partitions("models", self.models)
        self._check_partitions("checkpoints", self.checkpoints)
        return self

    def _check_partitions(self, key: str, served: Sequence[ModelSettings | CheckpointSettings]) -> None:
        for number, entry in enumerate(served):
            if entry.partition is not None and entry.partition not in self.partitions:
                known = ", ".join(self.partitions) or "none"
                raise ValueError(
                    f"{key}.{number}.partition: expected one of partitions ({known}), got {entry.partition!r}"
                )

    def with_models(self, models: Sequence[ModelSettings]) -> Self:
        """These settings with the layers of `checkpoints` in their place, checked again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_validate(values | {"models": (*self.models, *models), "checkpoints": ()})
