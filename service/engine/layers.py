"""Makes the layers that the settings describe, with their weights on a device."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from expertd.activation import COMMON, ExpertRule
from expertd.kernels import Backend
from expertd.service.checkpoints import CheckpointModelSettings, LayerSource
from expertd.service.checkpoints.files import TensorFiles
from expertd.service.checkpoints.identity import checkpoint_id, file_id, random_id
from expertd.service.checkpoints.weights import read_layer
from expertd.service.moe.base import Layer
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.tensor_file import TensorFile, TensorFileError
from expertd.service.moe.weights import (
    MATRICES,
    ExpertWeights,
    check_weights,
    load_weights,
    random_weights,
)
from expertd.service.moe.weights_file import BIASES
from expertd.service.settings.served import ModelSettings
from expertd.service.util.logs import progress_bar, shows_bars

logger = logging.getLogger(__name__)

Cancelled = Callable[[], bool]


class LoadCancelledError(Exception):
    """The server was stopped during loading."""


class MakeLayer(Protocol):
    """Makes the layer that a model describes; `layer_of` is one."""

    def __call__(
        self, model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled, /
    ) -> Layer: ...


def layer_of(model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled) -> MoELayer:
    """The layer that `model` describes, with its weights on `device`. Raises as `load` does."""
    return MoELayer(
        model.shape,
        weights_of(model, device, cancelled),
        backend,
        routing=model.routing.rule,
        rule=rule_of(model),
        masked_max_tokens=model.masked_max_tokens,
    )


def packed_layer_of(
    model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled
) -> MoELayer:
    """As `layer_of`, with no more memory than calls need: `weights` may have no data."""
    layer = layer_of(model, backend, device, cancelled)
    with packing(model):
        for name in MATRICES:
            layer.pack(name)
    return layer


@contextmanager
def packing(model: ModelSettings) -> Iterator[None]:
    """Raise errors of weights that the backend cannot pack with the model's name, and what to do."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"model {model.name}: {error} (requantize: always serves them in FP8)") from error


def stored_layers(memory: StoreMemory, slots: Mapping[str, int]) -> MakeLayer:
    """What makes layers with stores of their experts, by their slots; others as `packed_layer_of`."""

    def make(model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled) -> MoELayer:
        if model.name not in slots:
            return packed_layer_of(model, backend, device, cancelled)
        weights = weights_for_store(model, device, cancelled)
        with packing(model):
            store = ExpertStore(memory, model.name, model.shape, weights, slots[model.name], backend)
        own, rule, routing = store.on_device(weights), rule_of(model), model.routing.rule
        return MoELayer(model.shape, own, backend, routing=routing, rule=rule, store=store)

    return make


def weights_for_store(
    model: ModelSettings, device: torch.device, cancelled: Cancelled, held: Sequence[int] | None = None
) -> ExpertWeights:
    """As `weights_of`, with the experts in the host's memory, and only the others on `device`."""
    weights = weights_of(model, device, cancelled, held, experts_on=torch.device("cpu"))
    return replace(
        weights,
        router=weights.router.to(device),
        router_bias=None if weights.router_bias is None else weights.router_bias.to(device),
        shared_gate=None if weights.shared_gate is None else weights.shared_gate.to(device),
    )


def rule_of(model: ModelSettings) -> ExpertRule:
    """What the experts of `model` compute."""
    return model.rule if isinstance(model, CheckpointModelSettings) else COMMON


def has_biases(model: ModelSettings) -> bool:
    """Whether the experts of `model` have biases, by the headers of its files."""
    if isinstance(model, CheckpointModelSettings):
        return model.source.biases is not None
    if model.weights.path is None:
        return False
    try:
        with TensorFile(model.weights.path) as file:
            return BIASES[0] in file.tensors
    except TensorFileError:  # loading says so
        return False


def weights_of(
    model: ModelSettings,
    device: torch.device,
    cancelled: Cancelled,
    held: Sequence[int] | None = None,
    experts_on: torch.device | None = None,
) -> ExpertWeights:
    """The weights of `model` on `device`. Raises as `load` does.

    held        these of the model's routed experts in this order, also several times, then the shared ones
                that are computed here; None: the model's
    experts_on  where the experts' matrices are, and other tensors may be; None: `device`
    """
    every = model.shape.held_experts
    part = None if held is None else [expert - every.start for expert in held]
    if isinstance(model, CheckpointModelSettings):
        shape, source = model.shape, model.source
        if part is not None:
            shape = replace(shape, local_experts=range(len(part)))
            source = source.part(part, len(every))
        return _from_checkpoint(model.name, source, shape, experts_on or device, cancelled)
    shape, given = model.stored_shape, (part, model.shared_experts)
    if model.weights.path is not None:
        return load_weights(model.weights.path, shape, experts_on or device, *given)
    return random_weights(shape, model.weights.seed or 0, device, *given, experts_on)


def weights_ids(models: Iterable[ModelSettings]) -> dict[str, str]:
    """The identities of the weights of `models`, by name, whichever experts are held; reads little of files.

    A model whose files cannot all be read, maybe those of experts that are held elsewhere, has none.
    """
    found: dict[str, str] = {}
    with ExitStack() as stack:
        opened: dict[Path, TensorFiles] = {}
        for model in models:
            try:
                if isinstance(model, CheckpointModelSettings):
                    directory = model.source.router.file.parent
                    if directory not in opened:
                        opened[directory] = stack.enter_context(TensorFiles(directory))
                    found[model.name] = checkpoint_id(opened[directory], model.source.start)
                elif model.weights.path is not None:
                    found[model.name] = file_id(model.weights.path)
                else:
                    shape = model.stored_shape
                    sizes = shape.hidden_size, shape.intermediate_size, shape.num_experts
                    found[model.name] = random_id(model.weights.seed or 0, *sizes, shape.num_shared_experts)
            except ValueError as error:
                logger.warning("model %s: its weights have no identity: %s", model.name, error)
    return found


def _from_checkpoint(
    name: str, source: LayerSource, shape: LayerShape, device: torch.device, cancelled: Cancelled
) -> ExpertWeights:
    start = time.perf_counter()
    with progress_bar(name, source.num_bytes, "B") as advance:

        def progress(num_bytes: int) -> None:
            stop_if(cancelled)
            advance(num_bytes, "")

        weights = read_layer(source, device, progress)
    check_weights(shape, weights)
    if not shows_bars():
        seconds, megabytes = time.perf_counter() - start, source.num_bytes / 1e6
        logger.info("read %.1f MB of %s, %.0f MB/s", megabytes, name, megabytes / seconds)
    return weights


def stop_if(cancelled: Cancelled) -> None:
    """Raise LoadCancelledError once `cancelled` returns True."""
    if cancelled():
        raise LoadCancelledError
