"""Hugging Face checkpoint directories: their config.json, and the locations of a layer's tensors.

Only `expertd.service.checkpoints.weights` reads weights. Pickles are never read.
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
