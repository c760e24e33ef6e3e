"""All settings with their defaults, bounds and meanings."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from expertd.backends import BACKENDS
from expertd.service.settings.parts import (
    ChannelSettings,
    GrpcSettings,
    LaneSettings,
    Limits,
    MetricsSettings,
    OverlapSettings,
    PageSettings,
    PlacementSettings,
    SharedMemorySettings,
    TlsSettings,
    TracingSettings,
)
from expertd.service.settings.rendezvous import RendezvousAddress
from expertd.service.settings.served import CheckpointSettings, ModelSettings
from expertd.service.settings.spans import Devices, numbers
from expertd.service.settings.values import HostName, NumBytes
from expertd.service.util.sentences import shown

ENV_PREFIX = "EXPERTD_"
ENV_DELIMITER = "__"

_BODIES = 4  # a body, a copy for the device if its tensors are not aligned, and twice its bytes in FP32
_ROUNDING_BYTES = 5 * 64 * 1024  # of the whole and of up to four blocks, to multiples of 64 KiB
_DEFAULT_BYTES = 1024 * 1024 * 1024


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class Fields(BaseSettings):
    """The fields, each valid by itself, and what follows from them. `Settings` checks that they agree."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        env_parse_none_str="null",
        case_sensitive=True,  # else pydantic-settings fails on keys that are not strings
    )

    host: HostName = Field(
        default="127.0.0.1",
        min_length=1,
        description="address to listen on; beyond loopback only with `keys`, or `insecure`",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: any free one")
    uds: Path | None = Field(
        default=None,
        description="path of a Unix socket to listen on instead of `host` and `port`, for this user only",
    )
    keys: Path | None = Field(
        default=None,
        description="path of a YAML file with the API keys, read again when it changes (docs/access.md); "
        "null: everybody who reaches the server may call everything",
    )
    insecure: bool = Field(
        default=False, description="whether `host` and `rendezvous` may be beyond loopback without `keys`"
    )
    tls: TlsSettings = Field(default=TlsSettings(), description="HTTPS")
    http_workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="number of processes that speak HTTP; with more than 1, another process owns the device",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        default="info", description="minimum level of log lines, in upper or lower case"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="form of log lines; json: an object on each line (docs/operating.md)"
    )
    access_log: bool = Field(default=False, description="whether each request is logged")
    backend: str = Field(
        default="auto",
        description=f"{' or '.join(BACKENDS)}; auto: the first one that can run, cpu only with AVX512-BF16",
    )
    devices: Devices | None = Field(
        default=None,
        description="GPUs that share every layer, e.g. `0-1`, two to eight of one host: each has a process, "
        "a rank, with part of the experts (docs/ranks.md); null: one GPU, or `ranks`",
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
        description="number of nodes, each with as many ranks as `devices` or `ranks` say (docs/ranks.md)",
    )
    node_rank: int = Field(
        default=0,
        ge=0,
        description="number of this node; 0 has the front end, the others run its ranks",
    )
    rendezvous: RendezvousAddress | None = Field(
        default=None,
        description="`HOST:PORT` of node 0, where the nodes meet; beyond loopback only with `keys`, or "
        "`insecure`; keys do not protect it: anybody who reaches it can interfere",
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
        description="seconds after which a step counts as hung: the process exits (docs/operating.md), or "
        "with ranks, all start again (docs/ranks.md)",
    )
    placement: PlacementSettings = Field(
        default=PlacementSettings(), description="which rank holds which experts"
    )
    exact_combine: bool | None = Field(
        default=None,
        description="whether ranks send back a row for each expert, not one for each token: bitwise the "
        "results of one rank, whatever the placement, for up to `top_k` times the bytes; null: if "
        "`placement.policy` is set",
    )
    overlap: OverlapSettings = Field(
        default=OverlapSettings(), description="communication between GPUs while GEMMs run"
    )
    weights_budget: NumBytes | None = Field(
        default=None,
        description="bytes on the device, or on that of each rank, for the experts of all layers without a "
        "budget of their own, e.g. `10GiB`; if they need more, all are in the host's memory, and the device "
        "has those that were used last (docs/expert-store.md); null: the device has all of them",
    )
    partitions: dict[str, int] = Field(
        default={},
        description="number of SMs of each SM partition, by name; at most 32, names of up to 64 characters",
    )
    lanes: LaneSettings = Field(default=LaneSettings(), description="steps that run at the same time")
    limits: Limits = Field(default=Limits(), description="limits on requests, steps and queues")
    shared_memory: SharedMemorySettings = Field(
        default=SharedMemorySettings(), description="regions of shared memory"
    )
    channels: ChannelSettings = Field(default=ChannelSettings(), description="channels")
    grpc: GrpcSettings = Field(default=GrpcSettings(), description="the protocol over gRPC")
    metrics: MetricsSettings = Field(default=MetricsSettings(), description="metrics")
    page: PageSettings = Field(default=PageSettings(), description="the page at `/`")
    tracing: TracingSettings = Field(default=TracingSettings(), description="OpenTelemetry spans")
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

    @property
    def ranks_per_node(self) -> int:
        """The ranks of each node, numbered node by node."""
        return self.ranks if self.devices is None else len(numbers(self.devices))

    @property
    def num_ranks(self) -> int:
        """The processes that share every layer; 1: this one computes."""
        return self.nnodes * self.ranks_per_node

    @property
    def has_budget(self) -> bool:
        """Whether some experts have a budget."""
        budgets = [self.weights_budget, *(model.weights_budget for model in self.models)]
        budgets += [checkpoint.weights_budget for checkpoint in self.checkpoints]
        return any(budget is not None for budget in budgets)

    @property
    def combines_exactly(self) -> bool:
        """`exact_combine`, or its default."""
        return self.placement.policy is not None if self.exact_combine is None else self.exact_combine

    @property
    def buffered_bytes(self) -> int:
        """`limits.max_buffered_bytes`, or its default."""
        return self.limits.max_buffered_bytes or max(_DEFAULT_BYTES, self.min_buffered_bytes)

    @property
    def min_buffered_bytes(self) -> int:
        """What `limits.max_buffered_bytes` has to be at least."""
        regions = 0  # the bytes of the largest request whose tensors are copied from regions
        if self.shared_memory.enabled:
            # FP32 in and out, INT64 and FP32 for its routing
            row = max((8 * model.hidden_size + 12 * model.top_k for model in self.models), default=0)
            regions = self.limits.max_request_tokens * row
        return self.http_workers * (max(_BODIES * self.limits.max_body_bytes, regions) + _ROUNDING_BYTES)
