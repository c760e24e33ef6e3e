"""Hugging Face checkpoint directories: their config.json, and the locations of a layer's tensors.

Only `expertd.service.checkpoints.weights` reads weights. Pickles are never read.
"""

from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.describe import read_model
from expertd.service.checkpoints.expand import CheckpointModelSettings, models_of, resolve_checkpoints
from expertd.service.checkpoints.model import LayerSource, Matrix, MoEModel

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
