"""Lists a checkpoint's MoE layers, with their sizes and the format of their weights."""

from dataclasses import dataclass
from pathlib import Path

from expertd.service.checkpoints.files import TensorFiles
from expertd.service.checkpoints.find import find_layer, present_layers
from expertd.service.checkpoints.model import MoEModel
from expertd.service.checkpoints.read import read_model


@dataclass(frozen=True)
class ListedLayer:
    """A layer; num_bytes counts its experts' weights in the files, shared experts included."""

    layer: int
    format: str
    num_bytes: int


def list_layers(directory: Path) -> tuple[MoEModel, list[ListedLayer]]:
    """The checkpoint's sizes and MoE layers. Reads only headers.

    Raises CheckpointError if the checkpoint cannot be served.
    """
    model = read_model(directory, requantize=True)
    layers = []
    with TensorFiles(directory) as files:
        for layer in present_layers(files, model):
            source = find_layer(files, model, layer, range(model.num_experts), model.num_shared_experts, True)
            form = " and ".join(source.formats)
            layers.append(ListedLayer(layer, form, source.num_bytes))
    return model, layers
