"""The bodies of the API in the OpenAPI document; infer itself parses and builds them without pydantic."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag

from expertd.service.engine.profile_limits import MAX_SECONDS, MAX_STEPS, SECONDS, STEPS
from expertd.service.settings.parts import MAX_PARTITION_NAME, MAX_PARTITIONS


class ErrorResponse(BaseModel):
    """The body of every error."""

    error: str = Field(description="what was expected and what was received; and the request id, if any")


class ServerMetadataResponse(BaseModel):
    name: str
    version: str
    extensions: list[str]
    parameters: dict[str, str] = Field(
        description="instance: differs after each start; client_versions: of expertd-client, what those have "
        "in front that this server works with"
    )


class LiveResponse(BaseModel):
    live: Literal[True]


class ReadyResponse(BaseModel):
    ready: Literal[True]


class ModelReadyResponse(BaseModel):
    name: str
    ready: Literal[True]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1: any size")
    parameters: dict[str, str | int] | None = Field(
        default=None, description="of an input: the datatypes that it may have, and what FP8 needs besides"
    )


class ModelMetadataResponse(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str | int] = Field(description="of the layer (docs/http.md)")


class RoutingResponse(BaseModel):
    topk_ids: list[list[int]] = Field(description="[tokens, top_k]: experts, in the router's order")
    topk_weights: list[list[float]] = Field(description="[tokens, top_k]: their weights")


class ModelIndexEntry(BaseModel):
    name: str
    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str


class ModelStateResponse(BaseModel):
    name: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


class PartitionInfo(BaseModel):
    requested_sms: int
    num_sms: int = Field(description="granted SMs: requested_sms, rounded up to the device's granularity")


class PartitionsResponse(BaseModel):
    device: str
    total_sms: int
    granularity: int
    partitions: dict[str, PartitionInfo]


class PartitionsRequest(BaseModel):
    """The complete new set of partitions: name -> SMs."""

    model_config = ConfigDict(extra="forbid", strict=True)

    partitions: dict[Annotated[str, Field(max_length=MAX_PARTITION_NAME)], PositiveInt] = Field(
        max_length=MAX_PARTITIONS
    )


class ProfileRequest(BaseModel):
    """How much is recorded: `steps`, or those of `seconds` if they are fewer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    steps: int = Field(default=STEPS, ge=1, le=MAX_STEPS)
    seconds: float = Field(default=SECONDS, gt=0, le=MAX_SECONDS, allow_inf_nan=False)


class LogLevel(BaseModel):
    """The minimum level of log lines."""

    model_config = ConfigDict(extra="forbid", strict=True)

    level: Literal["debug", "info", "warning", "error"]


class SystemRegion(BaseModel):
    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(BaseModel):
    name: str
    device_id: int
    byte_size: int


class SystemRegionRequest(BaseModel):
    """A part of a file in /dev/shm."""

    model_config = ConfigDict(strict=True)

    key: str = Field(max_length=256, description="name in /dev/shm; a leading slash is accepted")
    offset: int = Field(default=0, ge=0, le=2**62)
    byte_size: int = Field(ge=1, le=2**62)


class IpcHandle(BaseModel):
    model_config = ConfigDict(strict=True)

    b64: str = Field(max_length=256, description="base64 of the 64 bytes of a cudaIpcMemHandle_t")


class CudaRegionRequest(BaseModel):
    """The beginning of an allocation on a GPU."""

    model_config = ConfigDict(strict=True)

    raw_handle: IpcHandle
    device_id: int = Field(
        ge=0, le=2**31 - 1, description="the GPU, as the caller counts them; the handle tells which it is"
    )
    byte_size: int = Field(ge=1, le=2**62)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SystemMemorySize(_Strict):
    byte_size: PositiveInt = Field(
        description="bytes of the data region; the caller places its tensors in it"
    )


class SystemMemoryRegion(_Strict):
    """Host memory of a given size."""

    system: SystemMemorySize


class CudaMemoryHandle(_Strict):
    device_id: NonNegativeInt = Field(description="as the caller counts GPUs; the handle tells which it is")
    raw_handle: IpcHandle
    byte_size: PositiveInt


class CudaMemoryRegion(_Strict):
    """The caller's memory on a GPU of this host."""

    cuda: CudaMemoryHandle


class NoFields(_Strict):
    """{}"""


class CallMemoryRegion(_Strict):
    """Memory of the server's GPU, for calls that the caller's GPU makes by itself."""

    device_calls: NoFields


class NixlAgent(_Strict):
    """The end of a channel over NIXL: an agent with one registered memory."""

    byte_size: PositiveInt = Field(description="of the memory, the same at both ends")
    address: NonNegativeInt = Field(description="of the memory, as its agent has registered it")
    metadata: str = Field(max_length=65536, description="base64 of the agent's metadata")


class NixlMemoryRegion(_Strict):
    """Host memory at both ends, between which NIXL carries tensors."""

    nixl: NixlAgent


def _form_of(memory: object) -> str | None:
    """The form of a channel's memory, so that errors are those of this form."""
    if isinstance(memory, str):
        return "system" if memory == "system" else None
    if isinstance(memory, dict):
        memory = [key for key in ("system", "cuda", "device_calls", "nixl") if key in memory]
        return f"{memory[0]} object" if len(memory) == 1 else None
    return None


_Memory = Annotated[
    Annotated[Literal["system"], Tag("system")]
    | Annotated[SystemMemoryRegion, Tag("system object")]
    | Annotated[CudaMemoryRegion, Tag("cuda object")]
    | Annotated[CallMemoryRegion, Tag("device_calls object")]
    | Annotated[NixlMemoryRegion, Tag("nixl object")],
    Discriminator(
        _form_of,
        custom_error_type="memory_form",
        custom_error_message='expected "system", {"system": ...}, {"cuda": ...}, {"device_calls": {}} or '
        '{"nixl": ...}',
    ),
]


class ChannelRequest(_Strict):
    """A channel to open, for `model` or for all of `models`."""

    version: int = Field(description="of the layout that the caller knows; another one is refused")
    model: str | None = None
    models: Annotated[list[str], Field(min_length=1, max_length=65536)] | None = None
    num_slots: PositiveInt = Field(description="requests that may be in flight at once, at most 4096")
    max_tokens: PositiveInt = Field(description="maximum tokens per request")
    datatype: Literal["BF16", "FP16", "FP32"] | None = Field(
        default=None, description="the widest datatype of a slot's default places; null: the model's"
    )
    memory: _Memory = Field(
        default="system", description="where the tensors are; system: host memory with room for every slot"
    )


class ChannelResponse(BaseModel):
    id: str
    instance: str = Field(description="of the server's process: after a restart, ids begin anew")
    version: int = Field(description="of the layout")
    model: str | None = Field(default=None, description="the only one")
    models: list[str] | None = Field(default=None, description="in the order of their numbers")
    socket: str | None = Field(
        default=None, description="path of the Unix socket at which the channel is claimed"
    )
    token: str | None = Field(
        default=None, description="32 bytes in hexadecimal, which claim the channel once"
    )
    nixl: NixlAgent | None = Field(default=None, description="the server's end of a channel over NIXL")
    geometry: dict[str, int] = Field(
        description="sizes and offsets in bytes, and numbers of slots and tokens"
    )


class ChannelInfo(BaseModel):
    id: str
    model: str | None = Field(default=None, description="the only one")
    models: list[str] | None = Field(default=None, description="in the order of their numbers")
    memory: Literal["system", "cuda", "device_calls", "nixl"]
    data_bytes: int
    owner: int | None = Field(description="process id; null: not yet claimed")
    requests: int = Field(description="requests so far")


class ChannelsResponse(BaseModel):
    channels: list[ChannelInfo]


class InferTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: Literal["BF16", "FP16", "FP32", "FP8", "UINT8", "INT32", "INT64"]
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="in place of data, binary_data_size: bytes of the tensor after the JSON; or "
        "shared_memory_region, shared_memory_byte_size and shared_memory_offset",
    )
    data: list[Any] | None = Field(default=None, description="numbers, flat or nested, row-major")


class InferOutput(BaseModel):
    name: Literal["hidden_states"]
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="binary_data: true or false; datatype: BF16, FP16 or FP32; or shared_memory_region, "
        "shared_memory_byte_size and shared_memory_offset",
    )


class InferJsonRequest(BaseModel):
    """Input hidden_states [tokens, hidden_size]; optionally topk_ids with topk_weights [tokens, top_k].

    FP8 hidden_states (FP8 or UINT8, e4m3) have hidden_states_scale FP32 [tokens, hidden_size / 128], too.
    """

    id: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="binary_data_output: true for binary outputs; timeout: microseconds from the whole body "
        "to the answer, 0: no limit; priority: 0 to 255, a lower one goes first, 0: 128",
    )
    inputs: list[InferTensor]
    outputs: list[InferOutput] | None = None


class InferJsonResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferTensor]
