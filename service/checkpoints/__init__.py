"""Hugging Face checkpoint directories: what their config.json says, and where a layer's tensors lie.

Nothing here reads a weight: `expertd.service.checkpoints.weights` does. Nothing anywhere reads a pickle.
"""

from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.expand import CheckpointModelSettings, models_of, resolve_checkpoints
from expertd.service.checkpoints.layer import LayerSource, Matrix
from expertd.service.checkpoints.model import MoEModel
from expertd.service.checkpoints.read import read_model

__all__ = [
    "CheckpointError",
    "CheckpointModelSettings",
    "LayerSource",
    "Matrix",
    "MoEModel",
    "models_of",
    "read_model",
    "resolve_checkpoints",
]
