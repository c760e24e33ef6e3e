"""All settings with their defaults, bounds and meanings. `expertd.service.settings.loader` loads them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from expertd.backends import BACKENDS
from expertd.limits import MAX_EXPERTS, SCALE_BLOCK
from expertd.routing import Routing
from expertd.service.moe.shape import LayerShape
from expertd.service.sentences import shown
from expertd.service.settings.buffers import default_bytes, needed_bytes, region_bytes
from expertd.service.settings.rendezvous import Rendezvous
from expertd.service.settings.spans import Devices, Layers, Span, numbers
from expertd.service.settings.values import check_agreement

ENV_PREFIX = "EXPERTD_"
ENV_DELIMITER = "__"

MIB = 1024 * 1024


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Frozen):
    """Limits on one request, one step and one model's queue."""

    max_batch_tokens: int = Field(default=4096, ge=1, description="maximum tokens per step")
    max_request_tokens: int = Field(default=4096, ge=1, description="maximum tokens per request")
    max_queue_tokens: int = Field(default=65536, ge=1, description="maximum queued tokens per model")
    max_queue_requests: int = Field(default=4096, ge=1, description="maximum queued requests per model")
    max_body_bytes: int = Field(
        default=64 * MIB, ge=1, description="maximum bytes of a request body, compressed and decompressed"
    )
    max_json_bytes: int = Field(
        default=8 * MIB,
        ge=1,
        description="maximum bytes of JSON in an infer request; parsing blocks the event loop",
    )
    max_buffered_bytes: int | None = Field(
        default=None,
        ge=1,
        description="maximum bytes of large request bodies and outputs held at once; on a GPU this memory is "
        "pinned at start-up; null: 1 GiB, or what the largest requests need (docs/http.md)",
    )
    body_timeout_seconds: float = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="seconds for a request's body to arrive after its headers",
    )
    min_response_bytes_per_second: int = Field(
        default=256 * 1024,
        ge=0,
        description="minimum bytes per second that a client reads of a response that does not fit into the "
        "socket's buffers, as a mean over `keep_alive_seconds`; 0: any",
    )
    max_header_bytes: int = Field(
        default=64 * 1024, ge=1024, description="maximum bytes of the request line and headers"
    )
    max_headers: int = Field(default=100, ge=1, description="maximum headers per request")
    header_timeout_seconds: float = Field(
        default=10,
        gt=0,
        allow_inf_nan=False,
        description="seconds for a request's headers to arrive after its first byte",
    )
    max_connections: int = Field(
        default=4096, ge=1, description="maximum open connections; further ones are answered 503 and closed"
    )

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        check_agreement(
            f"max_request_tokens: expected at most {name} ({most}), got {self.max_request_tokens}"
            for name in ("max_batch_tokens", "max_queue_tokens")
            if self.max_request_tokens > (most := getattr(self, name))
        )
        return self


class SharedMemorySettings(_Frozen):
    """Memory of callers on this machine, which requests name instead of carrying tensors."""

    enabled: bool = Field(
        default=False, description="whether callers may register shared memory; see docs/http.md"
    )
    key_prefix: str = Field(
        default="",
        pattern="^[^/]*$",
        description="beginning of the names in /dev/shm that may be registered; empty: any name",
    )
    max_regions: int = Field(default=64, ge=1, le=4096, description="maximum registered regions")
    max_bytes: int = Field(
        default=4096 * MIB,
        ge=1,
        description="maximum bytes of all registered regions; on a GPU, those of /dev/shm are pinned",
    )
    idle_seconds: float = Field(
        default=600,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which a region that no request uses is unregistered",
    )


class ChannelSettings(_Frozen):
    """Channels: requests through shared memory (docs/channels.md)."""

    socket: Path | None = Field(
        default=None,
        description="path of the Unix socket where the server's user claims channels; null: no channels",
    )
    max_channels: int = Field(default=64, ge=1, description="maximum open channels")
    max_bytes: int = Field(
        default=1024 * MIB,
        ge=1,
        description="maximum bytes of all channels' data regions; on a GPU, those in host memory are pinned",
    )
    spin_microseconds: int = Field(
        default=50,
        ge=0,
        le=1_000_000,
        description="microseconds after each step in which the server looks for requests of channels without "
        "sleeping; it occupies a CPU core meanwhile",
    )


class PlacementSettings(_Frozen):
    """Which rank holds which experts (docs/parallel.md)."""

    policy: Literal["static", "balanced"] | None = Field(
        default=None,
        description="static: placements change by `POST /v1/placement` only; balanced: by measured loads, "
        "too; null: each rank holds a contiguous part of the experts",
    )
    replicas: int = Field(
        default=0,
        ge=0,
        description="physical experts of each layer beyond its routed experts, on all ranks together, for "
        "replicas of busy ones",
    )
    interval_seconds: float = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="seconds between two plans, and until a measured load counts half",
    )
    max_moves: int = Field(
        default=64, ge=1, description="maximum experts, of all layers together, that move by one plan"
    )
    objective: Literal["tokens", "activated"] = Field(
        default="tokens",
        description="what ranks get equal shares of: tokens, or experts that are activated in a step, which "
        "suits small steps",
    )


class WeightsSettings(_Frozen):
    """The source of a layer's weights: a random seed or a safetensors file."""

    seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="seed of reproducible random weights; 0 if `weights` is omitted",
    )
    path: Path | None = Field(default=None, description="safetensors file in the format of docs/weights.md")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.seed is None) == (self.path is None):
            got = "neither" if self.seed is None else "both"
            raise ValueError(f"expected exactly one of seed and path, got {got}")
        return self


class RoutingSettings(_Frozen):
    """The router's scoring function and its selection of experts; see `Routing`."""

    scoring_func: Literal["softmax", "sigmoid"] = Field(
        default="softmax",
        description="scoring of router logits: softmax over all experts, or sigmoid of each",
    )
    renormalize: bool = Field(
        default=True, description="whether a token's routing weights are divided by their sum"
    )
    routed_scaling_factor: float = Field(
        default=1.0, gt=0, le=1e6, description="factor on the routing weights, after renormalization"
    )
    num_expert_groups: int = Field(
        default=1, ge=1, description="number of equal groups the experts are divided into"
    )
    topk_group: int = Field(
        default=1, ge=1, description="number of best groups a token's experts are chosen from"
    )

    @property
    def rule(self) -> Routing:
        """The rule for the kernels. Raises ValueError for an impossible one."""
        return Routing(**self.model_dump())

    @model_validator(mode="after")
    def _rule_is_possible(self) -> Self:
        assert self.rule
        return self


_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_Datatype = Literal["BF16", "FP16", "FP32"]


class ModelSettings(_Frozen):
    """One MoE layer served under a name."""

    name: str = Field(pattern=_NAME, description="name of the layer in requests")
    hidden_size: int = Field(
        ge=SCALE_BLOCK, multiple_of=SCALE_BLOCK, description="elements of a token's hidden state"
    )
    intermediate_size: int = Field(
        ge=SCALE_BLOCK,
        multiple_of=SCALE_BLOCK,
        description="elements of an expert's activation between up and down projection",
    )
    num_experts: int = Field(ge=1, le=MAX_EXPERTS, description="number of routed experts")
    top_k: int = Field(ge=1, description="number of routed experts per token")
    num_shared_experts: int = Field(
        default=0,
        ge=0,
        description="number of shared experts, each of `intermediate_size`; every token uses all of them",
    )
    local_experts: Span | None = Field(
        default=None, description="routed experts held here, e.g. `0-63`; null: all"
    )
    routing: RoutingSettings = Field(default=RoutingSettings(), description="routing rule")
    weights: WeightsSettings = Field(default=WeightsSettings(seed=0), description="source of the weights")
    datatype: _Datatype = Field(
        default="BF16",
        description="datatype in the metadata, and of requests without a JSON header",
    )
    masked_max_tokens: int = Field(
        default=0,
        ge=0,
        description="maximum tokens of a step that uses the masked layout; 0: no step uses it",
    )
    partition: str | None = Field(
        default=None, description="name of the SM partition the layer runs in; null: the whole device"
    )

    @property
    def shape(self) -> LayerShape:
        """The layer's sizes. Raises ValueError for unsupported sizes."""
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

    path: Path = Field(description="directory with config.json and safetensors files")
    layers: Layers = Field(description="MoE layers to serve, e.g. `3`, `3-5`, `3-5,9` or `all`")
    experts: Span | None = Field(
        default=None,
        description="routed experts held here, e.g. `0-63`; null: all; shared experts go with expert 0",
    )
    name: str | None = Field(
        default=None,
        pattern=_NAME,
        description="prefix of the layers' names, before `.layers.N`; null: the directory's name",
    )
    datatype: _Datatype = Field(default="BF16", description="see `models.N.datatype`")
    masked_max_tokens: int = Field(default=0, ge=0, description="see `models.N.masked_max_tokens`")
    partition: str | None = Field(default=None, description="see `models.N.partition`")


def _not_shared(key: str, name: str, held: str | None, masked_max_tokens: int) -> Iterator[str]:
    """Why ranks cannot share the layers, of whose experts the setting `name` holds a part."""
    if held is not None:
        yield f"{key}.{name}: expected null with several ranks, got {held}"
    if masked_max_tokens:
        yield f"{key}.masked_max_tokens: expected 0 with several ranks, got {masked_max_tokens}"


class Settings(BaseSettings):
    """All settings of a server. Built directly, it reads neither files nor the environment."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_parse_none_str="null",
        case_sensitive=True,  # else pydantic-settings fails on keys that are not strings
    )

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to listen on; loopback by default, because there is no authentication",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    uds: Path | None = Field(
        default=None,
        description="path of a Unix socket to listen on instead of `host` and `port`, for this user only",
    )
    http_workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="number of processes that speak HTTP; with more than 1, another process owns the device",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        default="info", description="minimum level of log lines, in upper or lower case"
    )
    access_log: bool = Field(default=False, description="whether each request is logged")
    backend: str = Field(
        default="auto", description=f"{' or '.join(BACKENDS)}; auto: the first one that can run"
    )
    devices: Devices | None = Field(
        default=None,
        description="GPUs that share every layer, e.g. `0-1`: each has a process, a rank, with part of the "
        "experts (docs/parallel.md); null: one GPU, or `ranks`",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=64,
        description="number of ranks that share every layer on the CPU; with `devices`, their number",
    )
    nnodes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="number of nodes, each with as many ranks as `devices` or `ranks` say (docs/parallel.md)",
    )
    node_rank: int = Field(
        default=0,
        ge=0,
        description="number of this node; 0 has the front end, the others run its ranks",
    )
    rendezvous: Rendezvous | None = Field(
        default=None,
        description="`HOST:PORT` of node 0, where the nodes meet; anybody who reaches it can interfere",
    )
    rendezvous_timeout_seconds: float = Field(
        default=600,
        gt=0,
        allow_inf_nan=False,
        description="seconds in which the other nodes must arrive, or the front end on the other nodes",
    )
    step_timeout_seconds: float = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a step may take on the ranks; then one of them hangs, and all start again "
        "(docs/parallel.md)",
    )
    placement: PlacementSettings = Field(
        default=PlacementSettings(), description="which rank holds which experts"
    )
    exact_combine: bool | None = Field(
        default=None,
        description="whether ranks send back a row for each expert, not one for each token: the bits of one "
        "rank, whatever the placement, for up to `top_k` times the bytes; null: with `placement.policy`",
    )
    partitions: dict[str, int] = Field(default={}, description="number of SMs of each SM partition, by name")
    limits: Limits = Field(default=Limits(), description="limits on requests, steps and queues")
    shared_memory: SharedMemorySettings = Field(
        default=SharedMemorySettings(), description="regions of shared memory"
    )
    channels: ChannelSettings = Field(default=ChannelSettings(), description="channels")
    keep_alive_seconds: int = Field(default=75, ge=1, description="seconds an idle connection stays open")
    shutdown_delay_seconds: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds new requests are still accepted after SIGTERM, while not ready",
    )
    drain_timeout_seconds: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds for accepted requests to finish after that delay",
    )
    models: tuple[ModelSettings, ...] = Field(default=(), description="layers to serve")
    checkpoints: tuple[CheckpointSettings, ...] = Field(
        default=(), description="checkpoint directories whose layers are served in addition to `models`"
    )

    def __init__(self, /, **values: Any) -> None:
        # BaseSettings.__init__ would read the environment and accept options such as _env_file.
        BaseModel.__init__(self, **values)

    @field_validator("backend")
    @classmethod
    def _backend_is_known(cls, name: str) -> str:
        if name not in (names := ("auto", *BACKENDS)):
            raise ValueError(f"expected one of {', '.join(names)}, got {shown(name)}")
        return name

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        check_agreement(
            chain(
                self._wrong_names(),
                self._wrong_partitions("models", self.models),
                self._wrong_partitions("checkpoints", self.checkpoints),
                self._wrong_nodes(),
                self._wrong_ranks(),
                self._wrong_buffers(),
            )
        )
        return self

    @property
    def ranks_per_node(self) -> int:
        """The ranks of each node, numbered node by node."""
        return self.ranks if self.devices is None else len(numbers(self.devices))

    @property
    def num_ranks(self) -> int:
        """The processes that share every layer; 1: this one computes."""
        return self.nnodes * self.ranks_per_node

    def _wrong_names(self) -> Iterator[str]:
        if not self.models and not self.checkpoints:
            yield "models or checkpoints: expected at least one layer to serve, got none"
        for name, count in Counter(model.name for model in self.models).items():
            if count > 1:
                yield f"models: expected different names, got {name!r} {count} times"
        for partition, sms in self.partitions.items():
            if sms < 1:
                yield f"partitions.{partition}: expected at least 1 SM, got {sms}"

    def _wrong_partitions(
        self, key: str, served: Sequence[ModelSettings | CheckpointSettings]
    ) -> Iterator[str]:
        expected = f"one of partitions ({', '.join(self.partitions) or 'none'})"
        for number, entry in enumerate(served):
            if entry.partition is not None and entry.partition not in self.partitions:
                yield f"{key}.{number}.partition: expected {expected}, got {entry.partition!r}"

    def _wrong_nodes(self) -> Iterator[str]:
        if self.node_rank >= self.nnodes:
            yield f"node_rank: expected less than nnodes ({self.nnodes}), got {self.node_rank}"
        if self.nnodes > 1 and self.rendezvous is None:
            yield f"rendezvous: expected HOST:PORT with nnodes {self.nnodes}, got none"

    def _wrong_ranks(self) -> Iterator[str]:
        count = self.num_ranks
        if self.devices is not None:
            if self.backend not in ("auto", "hopper"):
                yield f"devices: expected backend hopper, got {self.backend!r}"
            if count < 2:
                yield f"devices: expected two GPUs or more, got {self.devices}"
            if self.ranks not in (1, self.ranks_per_node):
                expected = f"the number of devices ({self.ranks_per_node})"
                yield f"ranks: expected {expected}, got {self.ranks}"
        yield from self._wrong_placement(count)
        if count == 1:
            return
        for number, model in enumerate(self.models):
            held, key = model.local_experts, f"models.{number}"
            yield from _not_shared(key, "local_experts", held, model.masked_max_tokens)
            if model.num_experts < count:
                expected = f"at most num_experts of model {model.name} ({model.num_experts})"
                yield f"ranks: expected {expected}, got {count}"
        for number, served in enumerate(self.checkpoints):
            key = f"checkpoints.{number}"
            yield from _not_shared(key, "experts", served.experts, served.masked_max_tokens)

    def _wrong_buffers(self) -> Iterator[str]:
        needed, got = self._needed_bytes, self.buffered_bytes
        if got < needed:
            yield f"limits.max_buffered_bytes: expected at least {needed}, got {got}"

    def _wrong_placement(self, num_ranks: int) -> Iterator[str]:
        policy, replicas = self.placement.policy, self.placement.replicas
        if policy is None and replicas:
            yield f"placement.replicas: expected 0 without placement.policy, got {replicas}"
            return
        if self.devices is not None and policy is not None:
            yield f"placement.policy: expected null with devices, got {policy!r}"
        if self.devices is not None and self.exact_combine:
            yield "exact_combine: expected false with devices, got true"
        if num_ranks == 1 and policy is not None:
            yield f"placement.policy: expected null with one rank, got {policy!r}"
            return
        for model in self.models:
            most = model.num_experts * (num_ranks - 1)
            if replicas > most:
                what = f"{most}, with which every rank has all experts of model {model.name}"
                yield f"placement.replicas: expected at most {what}, got {replicas}"

    @property
    def combines_exactly(self) -> bool:
        """`exact_combine`, or its default."""
        return self.placement.policy is not None if self.exact_combine is None else self.exact_combine

    @property
    def buffered_bytes(self) -> int:
        """`limits.max_buffered_bytes`, or its default."""
        return self.limits.max_buffered_bytes or default_bytes(self._needed_bytes)

    @property
    def _needed_bytes(self) -> int:
        regions = 0
        if self.shared_memory.enabled:
            tokens = self.limits.max_request_tokens
            regions = max(
                (region_bytes(tokens, model.hidden_size, model.top_k) for model in self.models), default=0
            )
        return needed_bytes(self.limits.max_body_bytes, regions, self.http_workers)

    def with_models(self, models: Sequence[ModelSettings]) -> Self:
        """These settings with `checkpoints` replaced by their layers in `models`, validated again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return self.model_validate(values | {"models": (*self.models, *models), "checkpoints": ()})
