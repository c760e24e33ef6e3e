"""Lists a checkpoint's MoE layers, with their sizes and the format of their weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from expertd.service.checkpoints.expand import models_of
from expertd.service.checkpoints.files import TensorFiles
from expertd.service.checkpoints.find import present_layers
from expertd.service.checkpoints.model import MoEModel
from expertd.service.checkpoints.read import read_model
from expertd.service.settings.served import CheckpointSettings
from expertd.service.settings.spans import ALL, spans


@dataclass(frozen=True)
class ListedLayer:
    """A layer; num_bytes counts its experts' weights in the files, shared_bytes those of shared ones."""

    layer: int
    format: str
    num_bytes: int
    shared_bytes: int


def list_layers(
    directory: Path, requantize: Literal["allow", "refuse"]
) -> tuple[MoEModel, list[ListedLayer]]:
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
    for layer, each in zip(layers, models_of(settings), strict=True):
        shared = replace(each.source, groups=each.source.groups[model.num_experts :])
        form = " and ".join(each.source.formats)
        listed.append(ListedLayer(layer, form, each.source.num_bytes, shared.num_bytes))
    return model, listed
