"""What can be set, with defaults, limits and meaning. Loading lives in `expertd.service.settings.loader`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from expertd.service.settings.spans import Span, Spans, numbers

ENV_PREFIX = "EXPERTD_"
ENV_DELIMITER = "__"

MIB = 1024 * 1024


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

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        for name in ("max_batch_tokens", "max_queue_tokens"):
            if self.max_request_tokens > getattr(self, name):
                raise ValueError(
                    f"max_request_tokens is expected to be at most {name}, which is {getattr(self, name)}, "
                    f"got {self.max_request_tokens}"
                )
        return self


class WeightsSettings(_Frozen):
    """Where a layer's weights come from: drawn at random from a seed, or read from a safetensors file."""

    seed: int | None = Field(default=None, ge=0, lt=2**63)
    path: Path | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.seed is None) == (self.path is None):
            raise ValueError("exactly one of seed and path is expected")
        return self


class RoutingSettings(_Frozen):
    """How a layer's router chooses experts and weighs them."""

    scoring: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="of a token's logits: over all experts, or of each"
    )
    renormalize: bool = Field(default=True, description="routing weights of a token are divided by their sum")
    scale: float = Field(default=1.0, gt=0, le=1e6, description="and multiplied by this")
    groups: int = Field(default=1, ge=1, description="equal groups that the experts stand in")
    top_groups: int = Field(default=1, ge=1, description="of these, a token's experts are from its best")


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_Datatype = Literal["BF16", "FP16", "FP32"]


class ModelSettings(_Frozen):
    """One MoE layer served under a name."""

    name: str = Field(pattern=_NAME)
    hidden_size: int = Field(ge=128, multiple_of=128)
    intermediate_size: int = Field(ge=128, multiple_of=128)
    num_experts: int = Field(ge=1, le=1024)
    top_k: int = Field(ge=1)
    num_shared_experts: int = Field(
        default=0, ge=0, description="of intermediate_size each, that every token goes to"
    )
    local_experts: Span | None = Field(
        default=None, description="of num_experts, those held here, as in 0-63; null: all"
    )
    routing: RoutingSettings = RoutingSettings()
    weights: WeightsSettings = WeightsSettings(seed=0)
    datatype: _Datatype = Field(
        default="BF16",
        description="named in the metadata, and assumed for requests without a JSON header",
    )
    masked_max_tokens: int | None = Field(
        default=None, ge=0, description="up to this many tokens in a step: masked layout; null: as measured"
    )
    partition: str | None = Field(
        default=None, description="SM partition the layer runs in; null: the whole device"
    )

    @property
    def local_range(self) -> range | None:
        """local_experts as `LayerShape` takes them."""
        if self.local_experts is None:
            return None
        held = numbers(self.local_experts)
        return range(held[0], held[-1] + 1)

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        held = self.local_range or range(self.num_experts)
        if held.stop > self.num_experts:
            raise ValueError(
                f"local_experts are expected to be of 0 to {self.num_experts - 1}, got {self.local_experts}"
            )
        if len(held) + self.num_shared_experts > 1024:
            shared = self.num_shared_experts
            raise ValueError(f"at most 1024 experts are expected, got {len(held)} and {shared} shared ones")
        if self.masked_max_tokens and len(held) < self.num_experts:
            raise ValueError("masked_max_tokens is expected to be 0 or null with local_experts")
        return self

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k is expected to be at most num_experts, which is {self.num_experts}, got {self.top_k}"
            )
        groups, top_groups = self.routing.groups, self.routing.top_groups
        if self.num_experts % groups != 0:
            raise ValueError(
                f"num_experts is expected to be a multiple of groups, {groups}, got {self.num_experts}"
            )
        eligible = self.num_experts // groups * min(top_groups, groups)
        if top_groups > groups or self.top_k > eligible:
            raise ValueError(
                f"routing.top_groups is expected to be 1 to groups, {groups}, with top_k experts in them, "
                f"{self.top_k}, got {top_groups} with {eligible}"
            )
        return self


class CheckpointSettings(_Frozen):
    """MoE layers of a Hugging Face checkpoint directory, each served as {name}.layers.{layer}."""

    path: Path
    layers: Spans = Field(description="as in 3, 3-5 or 3-5,9")
    experts: Span | None = Field(
        default=None,
        description="routed experts held here, as in 0-63; null: all. The shared ones go with expert 0",
    )
    name: str | None = Field(default=None, pattern=_NAME, description="null: the directory's")
    datatype: _Datatype = "BF16"
    masked_max_tokens: int | None = Field(default=None, ge=0)
    partition: str | None = None


class Settings(BaseSettings):
    """Everything a server is started with. Built directly, it reads neither files nor the environment."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_ignore_empty=True,
    )

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    access_log: bool = False
    backend: Literal["auto", "hopper", "reference"] = "auto"
    partitions: dict[str, int] = Field(default_factory=dict, description="name of an SM partition -> SMs")
    limits: Limits = Limits()
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
    models: tuple[ModelSettings, ...] = ()
    checkpoints: tuple[CheckpointSettings, ...] = Field(
        default=(), description="whose layers are served beside the models"
    )

    @model_validator(mode="after")
    def _something_is_served(self) -> Self:
        if not self.models and not self.checkpoints:
            raise ValueError("models or checkpoints: at least one layer to serve is expected, got none")
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"model names are expected to differ, got {name!r} {names.count(name)} times"
                )
        for partition, sms in self.partitions.items():
            if sms < 1:
                raise ValueError(f"partitions.{partition} is expected to have at least 1 SM, got {sms}")
        for model in self.models:
            if model.partition is not None and model.partition not in self.partitions:
                known = ", ".join(self.partitions) or "none"
                raise ValueError(
                    f"partition of model {model.name!r} is expected to be one of partitions ({known}), "
                    f"got {model.partition!r}"
                )
        return self

    def with_models(self, models: Sequence[ModelSettings]) -> Self:
        """These settings with the layers of `checkpoints` in their place, checked again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_validate(values | {"models": (*self.models, *models), "checkpoints": ()})

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)
