"""Makes a model of the service out of every layer that is asked of a checkpoint."""

from pydantic import ValidationError

from service.checkpoints.config import CheckpointError
from service.checkpoints.layer import LayerSource, find_layer
from service.checkpoints.model import MoEModel, read_model
from service.settings import CheckpointSettings, ModelSettings
from service.spans import numbers, spans


def models_of(checkpoint: CheckpointSettings) -> list[ModelSettings]:
    """The checkpoint's layers, each under its name and with its sizes and rule; headers are read and checked.

    Raises CheckpointError for what cannot be served.
    """
    directory, model = checkpoint.path, read_model(checkpoint.path)
    name = checkpoint.name or directory.resolve().name
    models = []
    for layer in numbers(checkpoint.layers):
        if layer not in model.layers:
            known = spans(model.layers) or "none"
            raise CheckpointError(f"{directory}: layers: expected MoE layers ({known}), got {layer}")
        try:
            made = _model(checkpoint, model, name, layer)
        except ValidationError as error:
            raise CheckpointError(_sentence(checkpoint, error)) from error
        source_of(made)
        models.append(made)
    return models


def source_of(model: ModelSettings) -> LayerSource:
    """Where the tensors of a model lie whose weights come from a checkpoint. Raises CheckpointError."""
    directory, layer = model.weights.checkpoint, model.weights.layer
    assert directory is not None
    assert layer is not None
    held = model.local_range or range(model.num_experts)
    return find_layer(directory, read_model(directory), layer, held, model.num_shared_experts)


def _model(checkpoint: CheckpointSettings, model: MoEModel, name: str, layer: int) -> ModelSettings:
    values = {
        "name": f"{name}.layers.{layer}",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "local_experts": checkpoint.experts,
        # With expert 0 and nowhere else, so that the parts of a layer add up to it.
        "num_shared_experts": model.num_shared_experts if 0 in _held(checkpoint, model) else 0,
        "routing": model.routing,
        "weights": {"checkpoint": checkpoint.path, "layer": layer},
        "datatype": checkpoint.datatype,
        "masked_max_tokens": checkpoint.masked_max_tokens,
        "partition": checkpoint.partition,
    }
    return ModelSettings.model_validate(values)


def _held(checkpoint: CheckpointSettings, model: MoEModel) -> list[int] | range:
    return range(model.num_experts) if checkpoint.experts is None else numbers(checkpoint.experts)


def _sentence(checkpoint: CheckpointSettings, error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
    else:
        text = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    return f"{checkpoint.path / 'config.json'}: {where}: {text}" if where else f"{checkpoint.path}: {text}"
