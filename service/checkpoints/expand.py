"""Turns each requested layer of a checkpoint into a model of the service, and lists its layers."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from pydantic import Field, InstanceOf, ValidationError

from expertd.activation import COMMON, ExpertRule
from expertd.backends import BACKENDS, Capabilities
from expertd.limits import HIDDEN_STEP, SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.describe import read_model
from expertd.service.checkpoints.files import TensorFiles
from expertd.service.checkpoints.find import find_layer, present_layers
from expertd.service.checkpoints.model import LayerSource, MoEModel
from expertd.service.moe.shape import LayerShape
from expertd.service.settings.model import Settings
from expertd.service.settings.served import CheckpointSettings, ModelSettings, Requantize
from expertd.service.settings.spans import ALL, numbers, spans
from expertd.service.util.sentences import expected_and_got, shown
from expertd.weight_format import WeightFormat


class _LayerSettings(ModelSettings):
    hidden_size: int = Field(ge=SCALE_BLOCK, multiple_of=HIDDEN_STEP)


class CheckpointModelSettings(_LayerSettings):
    """A layer with weights in a checkpoint. Not a setting: the checkpoint determines sizes and routing.

    checkpoint      its index in `checkpoints`
    weights_budget  is for all layers of that entry together
    """

    checkpoint: int = 0
    source: InstanceOf[LayerSource]
    rule: InstanceOf[ExpertRule] = COMMON

    @property
    def stored_shape(self) -> LayerShape:
        """See `ModelSettings.stored_shape`; the experts may have four bits."""
        source = self.source
        return replace(
            super().stored_shape, weight_layout=source.weight_layout, shared_layout=source.shared_layout
        )


def _check_moves(model: CheckpointModelSettings, settings: Settings) -> None:
    """Raise CheckpointError if experts are to move that have biases; as `check_moves`, by headers alone."""
    if settings.placement.policy is not None and model.source.biases is not None:
        expected = "expected, with placement.policy, a family whose experts have no biases"
        raise CheckpointError(f"{model.source.router.file}: {model.name}: {expected}, got another")


Chosen = Callable[[Settings, Set[WeightFormat]], Capabilities | None]
"""What "auto" will choose for weights of these formats, beside those of the settings, if it can run."""


def _only_fp8() -> Set[WeightFormat]:
    return Capabilities().weight_formats


def resolve_checkpoints(settings: Settings, chosen: Chosen = lambda settings, formats: None) -> Settings:
    """The settings, with the layers of `checkpoints` added to `models`.

    chosen  asked only where weights have four bits: it imports torch

    Reads only headers. Raises CheckpointError if a layer cannot be served.
    """

    def takes(checkpoint: CheckpointSettings) -> Set[WeightFormat]:
        can = BACKENDS.get(settings.backend)
        if can is None and checkpoint.requantize == "allow":  # the first one may take FP8 alone
            can = chosen(settings, frozenset())
        if can is not None:
            return can.weight_formats
        return {each for each in WeightFormat if chosen(settings, {each}) is not None}

    found = (
        models_of(checkpoint, partial(takes, checkpoint), number)
        for number, checkpoint in enumerate(settings.checkpoints)
    )
    models = list(chain.from_iterable(found))
    for model in models if settings.num_ranks > 1 else ():
        _check_moves(model, settings)
    try:
        return settings.with_models(models)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise CheckpointError(f"checkpoints: {expected_and_got(first)}") from error


def models_of(
    checkpoint: CheckpointSettings, takes: Callable[[], Set[WeightFormat]] = _only_fp8, number: int = 0
) -> list[CheckpointModelSettings]:
    """The requested layers, each with its name, sizes and routing. Reads only headers.

    takes   the formats in which weights may be served, asked only if some have four bits, and may keep them
    number  the checkpoint's index in the settings

    Raises CheckpointError if a layer cannot be served.
    """
    directory = checkpoint.path.expanduser()
    requantize = checkpoint.requantize != "refuse"
    if checkpoint.requantize == "always":
        takes = _only_fp8
    model = read_model(directory)
    held = range(model.num_experts)
    if checkpoint.experts is not None:
        requested = numbers(checkpoint.experts)
        if requested[-1] not in held:
            raise CheckpointError(
                f"{directory}: experts: expected a range of 0 to {held[-1]}, got {checkpoint.experts}"
            )
        held = range(requested[0], requested[-1] + 1)
    models = []
    with TensorFiles(directory) as files:
        for layer in _layers(checkpoint.layers, directory, files, model):
            # Only together with expert 0, so that the parts of a layer sum to the whole layer.
            num_shared_experts = model.num_shared_experts if 0 in held else 0
            settings = _settings(checkpoint, directory, model, layer, num_shared_experts)
            num_found = num_shared_experts if checkpoint.shared_experts else 0
            source = find_layer(files, model, layer, held, num_found, requantize, takes)
            found = {"source": source, "rule": model.rules.get(layer, COMMON), "checkpoint": number}
            models.append(CheckpointModelSettings.model_validate(settings | found))
    return models


def _layers(requested: str, directory: Path, files: TensorFiles, model: MoEModel) -> list[int]:
    known = spans(model.layers) or "none"
    if model.refused and requested == ALL:
        first = min(model.refused)
        raise CheckpointError(
            f"{directory}: layers: expected {known}, got all: in layer {first}, {model.refused[first]}"
        )
    layers = present_layers(files, model) if requested == ALL else numbers(requested)
    if not layers:
        raise CheckpointError(f"{directory}: layers: expected a model with MoE layers, got none")
    for layer in layers:
        if layer not in model.layers:
            why = f": there, {model.refused[layer]}" if layer in model.refused else ""
            raise CheckpointError(f"{directory}: layers: expected MoE layers ({known}), got {layer}{why}")
    return layers


def _settings(
    checkpoint: CheckpointSettings, directory: Path, model: MoEModel, layer: int, num_shared_experts: int
) -> dict[str, object]:
    """The layer's settings, validated like those of other models before any tensor is looked up."""
    settings: dict[str, object] = {
        "name": f"{checkpoint.name or _name(directory)}.layers.{layer}",
        "hidden_size": model.hidden_size,
        "intermediate_size": -(-model.intermediate_size // SCALE_BLOCK) * SCALE_BLOCK,  # whole blocks
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "local_experts": checkpoint.experts,
        "num_shared_experts": num_shared_experts,
        "shared_experts": checkpoint.shared_experts,
        "routing": model.routing,
        "datatype": checkpoint.datatype,
        "masked_max_tokens": checkpoint.masked_max_tokens,
        "partition": checkpoint.partition,
        "load": checkpoint.load,
        "weights_budget": checkpoint.weights_budget,
        "weight": checkpoint.weight,
    }
    try:
        _LayerSettings.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["loc"] == ("name",):
            raise CheckpointError(
                f"{directory}: name: expected --name (name in a file) with only letters, digits, dots, "
                f"dashes and underscores, got {shown(checkpoint.name or _name(directory))}"
            ) from error
        where = ".".join(map(str, first["loc"]))
        text = f"{where}: {expected_and_got(first)}" if where else expected_and_got(first)
        raise CheckpointError(f"{directory / 'config.json'}: {text}") from error
    return settings


def _name(directory: Path) -> str:
    """The directory's name, or MODEL in the hub's cache: models--ORGANIZATION--MODEL/snapshots/HASH."""
    path = directory.absolute()  # not resolved: a link keeps its own name
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.rsplit("--", 1)[-1]
    return path.name


@dataclass(frozen=True)
class ListedLayer:
    """A layer; num_bytes counts its experts' weights in the files, shared_bytes those of shared ones.

    served  the format in which they are served, if a backend takes it; the routed experts' first
    """

    layer: int
    format: str
    served: str
    num_bytes: int
    shared_bytes: int


def list_layers(directory: Path, requantize: Requantize) -> tuple[MoEModel, list[ListedLayer]]:
    """The checkpoint's sizes and MoE layers. Reads only headers.

    requantize  as in `CheckpointSettings`

    Raises CheckpointError if the checkpoint cannot be served, with what `models_of` says.
    """
    model = read_model(directory)
    with TensorFiles(directory) as files:
        layers = present_layers(files, model)
    settings = CheckpointSettings(
        path=directory, layers=spans(layers) or ALL, requantize=requantize, name="model"
    )
    listed = []
    for layer, each in zip(layers, models_of(settings, lambda: frozenset(WeightFormat)), strict=True):
        shared = replace(each.source, groups=each.source.groups[model.num_experts :])
        form = " and ".join(each.source.formats)
        formats = [each.shape.weight_layout.format]
        if each.shape.splits_shared:
            formats.append(each.shape.shared_layout.format)
        served = " and ".join(formats)
        listed.append(ListedLayer(layer, form, served, each.source.num_bytes, shared.num_bytes))
    return model, listed
