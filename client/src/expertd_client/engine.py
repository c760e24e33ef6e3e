"""A checkpoint's layers on a server, as plugins of inference engines call them. It needs torch.

A process has one client, and one channel for all its layers.
"""

import argparse
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd_client.client import ExpertClient
from expertd_client.errors import ExpertError, TransportUnavailableError
from expertd_client.metadata import ModelMetadata
from expertd_client.nixl.installed import is_installed
from expertd_client.weights import weights_id

logger = logging.getLogger("expertd_client")

# mlp.experts.3.up_proj.weight, experts.gate_up_proj; Granite's and Step's stacks. Not .shared_experts.
EXPERTS = re.compile(
    r"\.experts\.(?!e_score_correction_bias)|\.block_sparse_moe\.(in|out)put_linear\.|\.moe\.(gate|up|down)_proj\."
)
_DATATYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}
_LOOK_SECONDS = 5e-3  # between two looks at whether a call of the GPU has failed
SLOTS = 2  # of a batch, which may be larger than a request: one is copied while another is computed


@dataclass(frozen=True)
class PluginSettings:
    """Of a plugin.

    url            of the server, or of a pool: dns:NAME:PORT or file:/PATH
    name           of the checkpoint there, whose layers are {name}.layers.{N}; "": as the server names it
    transport      auto, channel, nixl or http, as in expertd-client; device: the GPU makes calls by itself,
                   also from full CUDA graphs, and large batches go over a channel
    max_tokens     of a request over a channel; larger batches are cut
    retry_seconds  how long a call waits for a server that has gone, before it fails
    check_weights  on: the server's experts must be those of the checkpoint here; off: only sizes are compared
    """

    url: str
    name: str = ""
    transport: str = "auto"
    max_tokens: int = 1024
    retry_seconds: float = 60.0
    check_weights: str = "on"

    def __post_init__(self) -> None:
        is_size = isinstance(self.max_tokens, int) and self.max_tokens > 0
        is_time = isinstance(self.retry_seconds, (int, float)) and self.retry_seconds >= 0
        expect(isinstance(self.url, str), "url", "text", self.url)
        expect(isinstance(self.name, str), "name", "text", self.name)
        expect(
            self.transport in ("auto", "channel", "nixl", "http", "device"),
            "transport",
            "auto, channel, nixl, http or device",
            self.transport,
        )
        expect(is_size, "max_tokens", "1 or more", self.max_tokens)
        expect(is_time, "retry_seconds", "0 or more", self.retry_seconds)
        expect(self.check_weights in ("on", "off"), "check_weights", "on or off", self.check_weights)


def make_settings(given: Mapping[str, Any], model: str) -> PluginSettings:
    """Those that an engine was given, which serves `model`, a directory or a name. Raises ValueError."""
    names = [field.name for field in fields(PluginSettings)]
    for key in given:
        expect(key in names, "expertd's settings", " or ".join(names), key)
    return PluginSettings(**{"name": _served_name(model), **given})


def expect(is_good: bool, name: str, expected: object, got: object) -> None:
    """Raises ValueError unless `is_good`."""
    if not is_good:
        raise ValueError(f"{name}: expected {expected}, got {got}")


@cache
def server_of(settings: PluginSettings) -> "RemoteServer":
    """The one of this process."""
    return RemoteServer(settings)


class RemoteServer:
    """A client of it, or of a pool, and the channel that is opened for all layers at the first call."""

    def __init__(self, settings: PluginSettings) -> None:
        seconds = settings.retry_seconds
        self.client = ExpertClient(
            settings.url, transport="http", timeout=60 + seconds, retry_seconds=seconds
        )
        if self.client.servers():
            _expose_pools()
        self.settings = settings
        self._layers: dict[str, RemoteLayer] = {}
        self._channel: Any = None
        self._has_channels = settings.transport != "http"
        wants_fastest = settings.transport == "auto" and not self.client.is_local
        self.is_over_nixl = settings.transport == "nixl" or (wants_fastest and is_installed())
        self.device_channel: Any = None  # for calls that the GPU makes by itself

    def layer(self, number: int) -> "RemoteLayer":
        """Layer `number` of the checkpoint, once the server has loaded it. Raises UnknownModelError."""
        name = f"{self.settings.name}.layers.{number}"
        metadata, end = self.client.metadata(name), time.monotonic() + self.settings.retry_seconds
        while metadata.weights_id is None and not self.client.ready(name) and time.monotonic() < end:
            time.sleep(0.1)
            metadata = self.client.metadata(name)
        self._layers[name] = RemoteLayer(self, name, number, metadata)
        return self._layers[name]

    def open_device_channel(self, device: torch.device | None, num_slots: int) -> None:
        """If the settings want it, and once all layers are known: no graph may be captured meanwhile."""
        if self.settings.transport == "device" and self.device_channel is None:
            expect(device is not None, "transport", "auto, channel, nixl or http without a GPU", "device")
            self.device_channel = self.client.open_device_channel(
                list(self._layers),
                num_slots=num_slots,
                device=str(device),
                nan_on_failure=False,  # tokens of it might be sent before `_watch` looks
            )
            max_tokens = self.device_channel.max_tokens
            logger.info("expertd: the GPU makes calls of up to %d tokens by itself", max_tokens)
            threading.Thread(target=self._watch, name="expertd-device-calls", daemon=True).start()

    def _watch(self) -> None:
        while True:
            try:
                self.device_channel.check()
            except ExpertError as error:
                end_process(error)
            time.sleep(_LOOK_SECONDS)

    def channel(self, x: Tensor, num_slots: int) -> Any:
        """The channel; None if this process has none, so that calls go over HTTP."""
        if self._channel is None and self._has_channels:
            max_tokens = self.settings.max_tokens
            limits = [layer.metadata.max_request_tokens for layer in self._layers.values()]
            try:
                self._channel = self.client.open_channel(
                    list(self._layers),
                    max_tokens=min(max_tokens, *(limit or max_tokens for limit in limits)),
                    num_slots=num_slots,
                    datatype=_DATATYPES[x.dtype],
                    device="cpu" if self.is_over_nixl else str(x.device),
                    over_nixl=self.is_over_nixl,
                )
                self._channel.on_failure = end_process
                way = "a channel over NIXL" if self.is_over_nixl else "a channel"
                logger.info("expertd: calls go over %s", way)
            except TransportUnavailableError as error:
                if self.settings.transport in ("channel", "nixl", "device"):
                    raise
                logger.warning("expertd: calls go over HTTP: %s", error)
                self._has_channels = False
        return self._channel


def _expose_pools() -> None:
    """Among the engine's metrics, if it has any."""
    with suppress(ImportError):
        from expertd_client.metrics import expose

        expose()


@dataclass(frozen=True, eq=False)
class RemoteLayer:
    """A layer on the server."""

    server: RemoteServer
    name: str
    number: int
    metadata: ModelMetadata

    @property
    def where(self) -> str:
        """Its name, for errors."""
        return f"{self.name} on {self.server.settings.url}"

    def check_sizes(self, engine: str, hidden_size: int, num_experts: int, top_k: int | None) -> None:
        """Raises ValueError if the layer is not the one that `engine` has, with shared experts of its own."""
        has = self.metadata
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "top_k": top_k}
        for name, size in sizes.items():
            expect(size in (None, getattr(has, name)), f"{self.where}: {name}", size, getattr(has, name))
        name, is_good = f"{self.where}: shared_experts", has.shared_experts != "included"
        expect(is_good, name, f"false, as {engine} computes them", "true")

    def makes_device_call(self, x: Tensor) -> bool:
        """Whether the GPU sends x [n, hidden_size] by itself."""
        calls = self.server.device_channel
        return calls is not None and bool(x.shape[0] <= calls.max_tokens)

    def submit(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, part: int, parts: int) -> "Call":
        """Begin to compute the experts of x [n, hidden_size], topk_ids and topk_weights [n, top_k].

        They must not change before `wait`. part: the number of the microbatch, of `parts` that are under way.
        """
        if self.makes_device_call(x):
            return DeviceCall(self.name, self.server.device_channel, part, (x, topk_ids, topk_weights))
        channel = self.server.channel(x, SLOTS * parts)
        if channel is None:
            return HttpCall(self.server.client.submit(self.name, x, topk_ids, topk_weights.float()))
        slots = channel.slots[SLOTS * part : SLOTS * (part + 1)]
        kind = EnqueuedCall if x.is_cuda and not self.server.is_over_nixl else ChannelCall
        return kind(self.name, channel, slots, (x, topk_ids, topk_weights))


class HttpCall:
    """A batch on its way over HTTP."""

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def wait(self, out: Tensor) -> None:
        """Write the weighted sums of the experts' outputs [n, hidden_size]. Raises ExpertError."""
        out.copy_(self._pending.wait())


class ChannelCall:
    """A batch in the slots of a channel, in as many requests as it takes."""

    def __init__(
        self, name: str, channel: Any, slots: Sequence[Any], inputs: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        self._name, self._channel, self._inputs = name, channel, inputs
        self._num_tokens = inputs[0].shape[0]  # len() of a tensor takes longer
        self._begins = deque(range(0, self._num_tokens, channel.max_tokens))
        self._sent: deque[tuple[Any, int]] = deque()
        for slot in slots:
            self._send(slot)

    def wait(self, out: Tensor) -> None:
        """As HttpCall.wait."""
        while self._sent:
            ticket, begin = self._sent.popleft()
            sums, num_tokens = self._wait(ticket), ticket.num_tokens
            (out if num_tokens == self._num_tokens else out[begin : begin + num_tokens]).copy_(sums)
            self._send(ticket.slot)

    def _send(self, slot: Any) -> None:
        if self._begins:
            begin, rows = self._begins.popleft(), self._inputs
            num_tokens = min(self._num_tokens - begin, self._channel.max_tokens)
            if num_tokens < self._num_tokens:
                x, ids, weights = (tensor[begin : begin + num_tokens] for tensor in rows)
                rows = x, ids, weights
            for target, source in zip(slot.first(num_tokens), rows, strict=False):
                target.copy_(source)
            self._sent.append((self._submit(slot, num_tokens), begin))

    def _submit(self, slot: Any, num_tokens: int) -> Any:
        return self._channel.submit(slot, num_tokens, routed=True, model=self._name)

    def _wait(self, ticket: Any) -> Any:
        return self._channel.wait(ticket)


class EnqueuedCall(ChannelCall):
    """A ChannelCall of a GPU, whose stream waits: the thread only enqueues. `last`: its last request."""

    last: Any = None

    def _submit(self, slot: Any, num_tokens: int) -> Any:
        self.last = self._channel.enqueue(slot, num_tokens, routed=True, model=self._name)
        return self.last

    def _wait(self, ticket: Any) -> Any:
        return self._channel.enqueue_wait(ticket)


class DeviceCall:
    """A batch that the GPU sends and waits for by itself, in a slot of its microbatch."""

    def __init__(self, name: str, channel: Any, slot: int, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        self._channel, self._slot = channel, slot
        x, topk_ids, topk_weights = (tensor.contiguous() for tensor in inputs)
        channel.send(x, topk_ids.int(), topk_weights.float(), model=name, slot=slot)

    def wait(self, out: Tensor) -> None:
        """As HttpCall.wait, by the stream."""
        self._channel.wait(out, slot=self._slot)


Call = HttpCall | ChannelCall | DeviceCall


def command_parser(command: str, engine: str, epilog: str) -> argparse.ArgumentParser:
    """Of a plugin's `COMMAND serve MODEL --expertd URL`; what it does not know are the engine's flags."""
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = f"serve a model by {engine}, with its routed experts on an expertd server"
    serve = commands.add_parser("serve", help=text, description=text, allow_abbrev=False, epilog=epilog)
    serve.add_argument("model", help="directory of the checkpoint, or its name on the Hugging Face hub")
    serve.add_argument("--expertd", required=True, metavar="URL", help="of the server that has the experts")
    return parser


def end_process(error: Exception) -> None:
    """For a GPU whose outputs are missing: its engine is ahead, and would make tokens of anything else."""
    logger.critical("expertd: this process ends, because it has no outputs of experts: %s", error)
    logging.shutdown()
    os._exit(1)


def check_weights(layers: Sequence[RemoteLayer], find_directory: Callable[[], str]) -> None:
    """Raises ValueError if the server's experts are not those of the checkpoint in the directory."""
    if not layers or layers[0].server.settings.check_weights == "off":
        return
    directory = find_directory()
    for layer in layers:
        here, there = weights_id(directory, layer.number), layer.metadata.weights_id
        expected = f"{here}, of {directory} (or check_weights: off, if encodings differ on purpose)"
        expect(here == there, f"{layer.where}: weights_id", expected, there)


def tensors_of_others(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in files of safetensors but for the experts, which stay unread."""
    from safetensors import safe_open

    read = skipped = 0
    for file in sorted(files):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no dict
                if EXPERTS.search(name):
                    skipped += 1
                else:
                    read += 1
                    yield name, tensors.get_tensor(name)
    logger.info("expertd: read %d tensors, left %d of routed experts in the files", read, skipped)


def _served_name(model: str) -> str:
    """By what `expertd serve --model` calls it: a directory's name, or the model's in the hub's cache."""
    path = Path(model).absolute()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rsplit("--", 1)[-1]
    return path.name
