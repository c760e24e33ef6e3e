"""Hugging Face checkpoint directories: what their config.json says, and where a layer's tensors lie.

Nothing here reads a weight: `service.moe.checkpoint` does. Nothing anywhere reads a pickle.
"""

from service.checkpoints.config import CheckpointError
from service.checkpoints.expand import CheckpointModelSettings, models_of
from service.checkpoints.layer import LayerSource, Matrix
from service.checkpoints.model import MoEModel, read_model

__all__ = [
    "CheckpointError",
    "CheckpointModelSettings",
    "LayerSource",
    "Matrix",
    "MoEModel",
    "models_of",
    "read_model",
]
