"""Hugging Face checkpoint directories: what their config.json says, and where a layer's tensors lie.

Nothing here reads a weight: `service.moe.checkpoint` does. Nothing anywhere reads a pickle.
"""

from service.checkpoints.config import CheckpointError
from service.checkpoints.layer import LayerSource, Matrix, find_layer
from service.checkpoints.model import MoEModel, read_model
from service.checkpoints.models import models_of, source_of

__all__ = [
    "CheckpointError",
    "LayerSource",
    "Matrix",
    "MoEModel",
    "find_layer",
    "models_of",
    "read_model",
    "source_of",
]
