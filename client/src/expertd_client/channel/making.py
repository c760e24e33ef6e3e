"""From the arguments of a client's open_channel to a channel."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from expertd_client.arenas import Sizes
from expertd_client.calls import check_model
from expertd_client.channel.base import BaseChannel, Made
from expertd_client.channel.device_channel import CallWay, DeviceChannel, GpuCalls, HostCalls
from expertd_client.channel.layout import CODES, MAX_SLOTS, MODEL, VERSION, aligned
from expertd_client.channel.link import SPIN_SECONDS
from expertd_client.channel.opening import Opened, open_channel, post
from expertd_client.channel.slots import Shapes, make_slots
from expertd_client.deadline import Deadline
from expertd_client.device_memory import DeviceMemoryError
from expertd_client.directory import ArenaRefusedError
from expertd_client.errors import InvalidRequestError, TransportUnavailableError
from expertd_client.http.requests import model_path
from expertd_client.metadata import ModelMetadata, read_metadata
from expertd_client.steps import Steps, Work, run
from expertd_client.transport import Asker

logger = logging.getLogger("expertd_client")

_SLOT_ALIGNMENT = 4096
C = TypeVar("C", bound=BaseChannel)


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """What a caller wants of a channel; datatypes None: the model's, and the same."""

    models: str | Sequence[str]
    num_slots: int
    max_tokens: int
    datatype: str | None
    output_datatype: str | None
    device: object
    deadline: Deadline  # of the opening; requests have as many seconds
    spin_seconds: float = SPIN_SECONDS
    over_nixl: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names."""
        return (self.models,) if isinstance(self.models, str) else tuple(self.models)

    def check(self) -> None:
        """Raises InvalidRequestError for arguments that cannot work."""
        if not self.names or len(set(self.names)) < len(self.names):
            raise InvalidRequestError(f"models: expected different names, got {self.names!r:.200}")
        for name in self.names:
            check_model(name)
        for name, value in (("num_slots", self.num_slots), ("max_tokens", self.max_tokens)):
            if not 1 <= value < 1 << 32:
                raise InvalidRequestError(f"{name}: expected at least 1, got {value}")
        if self.num_slots > MAX_SLOTS:
            raise InvalidRequestError(f"num_slots: expected at most {MAX_SLOTS}, got {self.num_slots}")
        for name, datatype in (("datatype", self.datatype), ("output_datatype", self.output_datatype)):
            if datatype is not None and datatype not in CODES:
                raise InvalidRequestError(f"{name}: expected {', '.join(CODES)} or None, got {datatype!r}")
        if self.device is not None and re.fullmatch("cpu|cuda(:[0-9]+)?", str(self.device)) is None:
            raise InvalidRequestError(f"device: expected None, cpu or cuda:0, got {str(self.device)!r}")
        if self.over_nixl and str(self.device) not in ("None", "cpu"):
            raise InvalidRequestError(f"device: expected None or cpu over NIXL, got {str(self.device)!r}")
        if not self.spin_seconds >= 0:
            raise InvalidRequestError(f"spin_seconds: expected at least 0, got {self.spin_seconds}")


def make_channel(http: Asker, kind: type[C], options: ChannelOptions) -> Steps[C]:
    """Ask for the layers' sizes, and open a channel for them. Raises as ExpertClient.open_channel."""
    deadline, names = options.deadline, options.names
    options.check()
    gpu = _gpu(options.device)
    layers = yield from _layers(http, names, deadline)
    first = layers[0]
    datatype = options.datatype or first.datatype
    shapes = Shapes(
        options.max_tokens, first.hidden_size, first.top_k, datatype, options.output_datatype or datatype
    )
    sizes = Sizes(options.max_tokens, aligned(shapes.layout.num_bytes, _SLOT_ALIGNMENT), options.num_slots)

    opening = _Opening(http, names, layers, sizes, gpu, options)
    opened = yield from opening.open(deadline)
    slots = make_slots(opened, shapes, options.device is not None)
    models = {name: MODEL.pack(number) for number, name in enumerate(names)}
    return kind(Made(opened, shapes, slots, models, deadline, opening.reopen))


@dataclass(frozen=True, slots=True)
class _Opening:
    """Opens a channel, and again once its server has gone."""

    http: Asker
    names: tuple[str, ...]
    layers: list[ModelMetadata]
    sizes: Sizes
    gpu: int | None
    options: ChannelOptions
    num_slots: int | None = None

    def open(self, deadline: Deadline, lost: Opened | None = None) -> Steps[Opened]:
        """Raises as ExpertClient.open_channel."""
        options = self.options
        try:
            return (
                yield from open_channel(
                    self.http, self.names, self.sizes, self.gpu, deadline,
                    options.spin_seconds, lost, options.over_nixl, self.num_slots,
                )
            )  # fmt: skip
        except ArenaRefusedError as refused:
            raise refused.error from None
        except DeviceMemoryError as error:
            raise TransportUnavailableError(str(error)) from None

    def reopen(self, lost: Opened, deadline: Deadline) -> Steps[Opened]:
        """With the same memory, if the layers are the same."""
        opened = yield from self.open(deadline, lost)
        try:
            for before, now in zip(
                self.layers, (yield from _layers(self.http, self.names, deadline)), strict=True
            ):
                check_same(before, now)
        except BaseException:
            opened.link.close()
            raise
        return opened


def make_device_channel(
    http: Asker, options: ChannelOptions, nan_on_failure: bool = True
) -> Steps[DeviceChannel]:
    """A channel for a GPU's own calls. Raises as ExpertClient.open_device_channel."""
    deadline, names = options.deadline, options.names
    options.check()
    index = _gpu(options.device)
    if index is None:
        raise InvalidRequestError(f"device: expected a GPU for device calls, got {options.device}")
    layers = yield from _layers(http, names, deadline)

    def open_way(deadline: Deadline) -> CallWay:
        """On any thread."""
        present = run(_layers(http, names, deadline))
        for before, now in zip(layers, present, strict=True):
            check_same(before, now)
        given = http, layers, index, replace(options, deadline=deadline)
        has_calls = all(layer.device_calls is not None for layer in present)
        return run(_gpu_calls(*given)) if has_calls else run(_host_calls(*given))

    try:
        made: DeviceChannel = yield Work(
            partial(DeviceChannel, open_way, names, index, deadline, nan_on_failure)
        )
    except DeviceMemoryError as error:
        raise TransportUnavailableError(str(error)) from None
    return made


def _gpu_calls(
    http: Asker, layers: list[ModelMetadata], index: int, options: ChannelOptions
) -> Steps[GpuCalls]:
    gpu, names = _uuid(index), options.names
    memory: Any = {"device_calls": {}}
    body = {
        "version": VERSION, "models": names, "memory": memory,
        "num_slots": options.num_slots, "max_tokens": options.max_tokens,
    }  # fmt: skip

    def ask(deadline: Deadline) -> Any:
        """On any thread."""
        present = run(_layers(http, names, deadline))
        for before, now in zip(layers, present, strict=True):
            check_same(before, now)
        _warn_of_shared_gpu(present[0], gpu)
        try:
            return run(post(http, names, body, deadline))
        except ArenaRefusedError as refused:
            raise refused.error from None

    made: GpuCalls = yield Work(partial(GpuCalls, ask, index, options.deadline))
    return made


def _host_calls(
    http: Asker, layers: list[ModelMetadata], index: int, options: ChannelOptions
) -> Steps[HostCalls]:
    first, deadline = layers[0], options.deadline
    shapes = Shapes(options.max_tokens, first.hidden_size, first.top_k, "BF16", "BF16")
    sizes = Sizes(options.max_tokens, aligned(shapes.layout.num_bytes, _SLOT_ALIGNMENT), 1)
    opening = _Opening(http, options.names, layers, sizes, index, options, num_slots=1)
    opened: list[Opened] = []
    try:
        for _ in range(options.num_slots):
            opened.append((yield from opening.open(deadline)))
        made: HostCalls = yield Work(partial(HostCalls, opened, shapes, index, opening.reopen, deadline))
    except BaseException:
        for each in opened:
            each.link.close()
        raise
    logger.info("channel: the server's host launches the calls of GPU %d", index)
    return made


def _layers(http: Asker, names: Sequence[str], deadline: Deadline) -> Steps[list[ModelMetadata]]:
    layers = []
    for name in names:
        layers.append(read_metadata((yield from http.request("GET", model_path(name), deadline))))
    first = layers[0]
    for layer in layers[1:]:
        if (layer.hidden_size, layer.top_k) != (first.hidden_size, first.top_k):
            expected = f"expected the sizes of {first.name}, {first.hidden_size} and top {first.top_k}"
            raise InvalidRequestError(f"{layer.name}: {expected}, got {layer.hidden_size} and {layer.top_k}")
    return layers


def check_same(before: ModelMetadata, now: ModelMetadata) -> None:
    """Raises InvalidRequestError if a server that was started again has another layer, or other weights."""
    known = replace(now, max_request_tokens=before.max_request_tokens)
    if before.weights_id is None or now.weights_id is None:  # while it loads
        known = replace(known, weights_id=before.weights_id)
    if before.weight_format is None or now.weight_format is None:  # an older server
        known = replace(known, weight_format=before.weight_format)
    if known != before:
        raise InvalidRequestError(f"{now.name}: expected the layer as before, {before}, got {now}")


def _warn_of_shared_gpu(layer: ModelMetadata, gpu: str) -> None:
    """If the caller's kernels on the GPU with this UUID, and the server's, wait for each other in turns."""
    if layer.device_calls == gpu and layer.device_calls_own_gpu == "turns":
        logger.warning(
            "channel: device calls of %s: expected a server on another GPU, or CUDA MPS, got the caller's "
            "own, %s, on which both processes take turns",
            layer.name,
            gpu,
        )


def _uuid(index: int) -> str:
    """The UUID of a GPU, as the driver's tools know it."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _gpu(device: object) -> int | None:
    """The number of the GPU, with a context on it; None for the host. Raises InvalidRequestError."""
    if device is None:
        return None
    try:
        import torch
    except ImportError as error:
        raise InvalidRequestError(f"device: expected None where torch is missing, got {device}") from error
    try:
        index: int | None = torch.empty(0, device=str(device)).device.index
    except (AssertionError, RuntimeError) as error:  # a torch without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise InvalidRequestError(f"device: expected one that torch has, got {device}: {reason}") from error
    return index
