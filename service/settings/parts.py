"""Parts of the settings: limits, shared memory, channels, placement."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from expertd.service.settings.values import check_agreement, matching

MIB = 1024 * 1024
AUTO = Path("auto")
MAX_PARTITIONS = 32
MAX_PARTITION_NAME = 64  # characters, in a file as in a call


class Frozen(BaseModel):
    """Values that do not change, and no other keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _choice_of_text(cls, value: Any, info: ValidationInfo) -> Any:
        """Flags and variables are texts: pydantic takes them for numbers, but not for a choice of numbers."""
        if not isinstance(value, str):
            return value
        annotation = cls.model_fields[str(info.field_name)].annotation
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        return next((choice for choice in choices if str(choice) == value), value)


class Limits(Frozen):
    """Limits on one request, one step and one model's queue."""

    max_batch_tokens: int = Field(default=4096, ge=1, description="maximum tokens per step")
    max_request_tokens: int = Field(default=4096, ge=1, description="maximum tokens per request")
    prefill_chunk_tokens: int = Field(
        default=1024,
        ge=0,
        description="maximum tokens of a chunk: while longer requests compete with others, they are computed "
        "in chunks, between the others' steps (docs/scheduling.md); 0: they are always computed whole",
    )
    join_chunks: bool = Field(
        default=False,
        description="whether a step computes chunks together with other requests (docs/scheduling.md)",
    )
    max_queue_tokens: int = Field(default=65536, ge=1, description="maximum queued tokens per model")
    max_queue_requests: int = Field(default=4096, ge=1, description="maximum queued requests per model")
    max_queue_json: int = Field(
        default=64,
        ge=1,
        description="maximum infer requests whose JSON of more than 64 KiB, or compressed JSON, waits to be "
        "parsed; there is one thread for it, in each HTTP process",
    )
    queue_full_status: Literal[429, 503] = Field(
        default=503, description="status of a request that finds the queue full; with Retry-After"
    )
    max_body_bytes: int = Field(
        default=64 * MIB, ge=1, description="maximum bytes of a request body, compressed and decompressed"
    )
    max_json_bytes: int = Field(
        default=MIB,
        ge=1,
        le=2 * MIB,  # the longest waits: docs/internals/benchmarks-load.md
        description="maximum bytes of JSON in an infer request, decompressed, and of an output as JSON; "
        "larger tensors have to be binary, because other requests wait while JSON is parsed or written",
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
    max_connections_per_address: int = Field(
        default=2048,
        ge=1,
        description="maximum open connections from one address (IPv6: one /64 network); further ones are "
        "answered 503 and closed; behind a proxy, all callers have its address",
    )

    @property
    def blames_callers(self) -> bool:
        """Whether a full queue is said to be the fault of too many requests."""
        return self.queue_full_status == 429

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        check_agreement(
            f"max_request_tokens: expected at most {name} ({maximum}), got {self.max_request_tokens}"
            for name in ("max_batch_tokens", "max_queue_tokens")
            if self.max_request_tokens > (maximum := getattr(self, name))
        )
        return self


class TlsSettings(Frozen):
    """TLS, from version 1.2 on. The files are read again when they change."""

    certificate: Path | None = Field(
        default=None,
        description="path of the server's certificate in PEM, followed by intermediate ones; with `tls.key`, "
        "the server speaks HTTPS; null: HTTP without TLS",
    )
    key: Path | None = Field(
        default=None, description="path of the certificate's private key in PEM, without a password"
    )
    client_ca: Path | None = Field(
        default=None,
        description="path of the CA certificates in PEM, one of which must have signed the certificate that "
        "each client then has to show (mTLS); null: clients need none",
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        values = {"certificate": self.certificate, "key": self.key}
        given = [name for name in ("certificate", "key", "client_ca") if getattr(self, name) is not None]
        check_agreement(
            f"{name}: expected a path with tls.{given[0]}, got null"
            for name, value in values.items()
            if given and value is None
        )
        return self

    @property
    def is_on(self) -> bool:
        """Whether the server speaks HTTPS."""
        return self.certificate is not None


class SharedMemorySettings(Frozen):
    """Memory of callers on this machine, which requests name instead of carrying tensors."""

    enabled: bool = Field(
        default=False, description="whether callers may register shared memory; see docs/transports.md"
    )
    key_prefix: Annotated[str, matching(r"[^/]*", "a text without '/'")] = Field(
        default="",
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


def _text_of_number(value: object) -> object:
    return str(value) if type(value) is int else value


class ChannelSettings(Frozen):
    """Channels: requests through shared memory (docs/transports.md)."""

    socket: Annotated[Path | None, BeforeValidator(lambda value: None if value == "" else value)] = Field(
        default=AUTO,
        description="path of the Unix socket where callers claim channels; auto: with `host` on loopback, "
        "`expertd-UID-PORT.sock` in `$XDG_RUNTIME_DIR`, or else in the folder for temporary files; null: no "
        "channels",
    )
    group: Annotated[str, BeforeValidator(_text_of_number)] | None = Field(
        default=None,
        min_length=1,
        description="name or number of a group whose users may claim channels; null: only the server's user",
    )
    nixl: bool = Field(
        default=False,
        description="callers on other machines open channels over NIXL, by RDMA where there is some; needs "
        "the packages of `expertd[nixl]`, and a network of trusted hosts (docs/rdma.md)",
    )
    max_channels: int = Field(default=64, ge=1, description="maximum open channels")
    max_bytes: int = Field(
        default=2048 * MIB,
        ge=1,
        description="maximum bytes of all channels' data regions; on a GPU, those in host memory are pinned",
    )
    spin_microseconds: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="microseconds after each step in which the server looks for requests of channels without "
        "sleeping, which occupies a CPU core; null: 1000 with GPUs, else 50",
    )


class GrpcSettings(Frozen):
    """The same protocol over gRPC (docs/http.md)."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="port of `host` for gRPC, in addition to HTTP; 0: any free one; null: no gRPC",
    )


class MetricsSettings(Frozen):
    """What /metrics has (docs/monitoring.md)."""

    max_expert_series: int = Field(
        default=1024,
        ge=0,
        description="maximum experts of all models together for which `/metrics` has a series for each; with "
        "more it has only how their loads are distributed",
    )


_URL = r"https?://([^/?#\s\[\]]+|\[[0-9a-fA-F:.]+\](:\d+)?)([/?#]\S*)?"


class PageSettings(Frozen):
    """The page at `/` (docs/monitoring.md)."""

    enabled: bool = Field(
        default=True,
        description="whether `/` is a page that shows what the server does, from `/v1/live`; with `keys`, "
        "its data need one",
    )
    max_viewers: int = Field(
        default=16, ge=1, description="maximum open streams of `/v1/live`; a further one is answered 503"
    )
    peers: tuple[Annotated[str, matching(_URL, "a URL such as http://experts-1:8000/")], ...] = Field(
        default=(),
        description="URLs of the pages of a pool's servers (docs/pool.md), as a browser reaches them, to "
        "which the page links; the server asks them nothing",
    )


class TracingSettings(Frozen):
    """Spans of infer requests, for an OpenTelemetry collector (docs/operating.md)."""

    endpoint: Annotated[str, matching(_URL, "a URL such as http://127.0.0.1:4318/v1/traces")] | None = Field(
        default=None,
        description="URL to which spans are sent, by OTLP over HTTP, e.g. http://127.0.0.1:4318/v1/traces; "
        "null: no spans",
    )
    sample_ratio: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="part of the requests without a trace context that get spans, chosen at random; for the "
        "others, their callers decide",
    )


class OverlapSettings(Frozen):
    """Communication between GPUs while GEMMs run (docs/ranks.md)."""

    mode: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="whether ranks on GPUs of one host exchange parts of a step's outputs while they compute "
        "others, if the hidden size is more than 2048; auto: in steps of 4096 tokens or more for each of 4 "
        "or more ranks",
    )
    communication_sms: int = Field(
        default=40, ge=1, description="number of SMs that exchange them; the others go on computing"
    )


class PlacementSettings(Frozen):
    """Which rank holds which experts (docs/ranks.md)."""

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


class LaneSettings(Frozen):
    """Two lanes, each with queues and steps of its own: `decode` for short requests, `prefill` for others."""

    decode_max_tokens: int = Field(
        default=0,
        ge=0,
        description="maximum tokens of a request on the decode lane, whose steps run at the same time as "
        "those of the prefill lane (docs/scheduling.md); 0: no lanes",
    )
    decode_batch_tokens: int = Field(
        default=256, ge=1, description="maximum tokens of a step on the decode lane"
    )
    decode_partition: str | None = Field(
        default=None, description="name of the SM partition of the decode lane; null: the whole device"
    )
    prefill_partition: str | None = Field(
        default=None, description="name of the SM partition of the prefill lane; null: the whole device"
    )

    @property
    def are_on(self) -> bool:
        """Whether there are lanes."""
        return self.decode_max_tokens > 0

    @property
    def partitions(self) -> dict[str, str]:
        """The partitions that lanes run in, by the setting that names them."""
        named = {"decode_partition": self.decode_partition, "prefill_partition": self.prefill_partition}
        return {setting: name for setting, name in named.items() if name is not None}
