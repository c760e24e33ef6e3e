"""The expert layers of a checkpoint in this process, by the server's own code, to compare with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd.kernels import resolve_backend
from expertd.service.checkpoints import models_of
from expertd.service.engine.layers import layer_of
from expertd.service.moe.layer import MoELayer
from expertd.service.settings.served import CheckpointSettings


class LocalExperts(torch.nn.Module):
    """Takes the place of a MoE block: one layer of expertd, called directly."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """The block's output [batch, length, H], of the dtype of `hidden_states` [batch, length, H]."""
        tokens = hidden_states.flatten(0, 1)
        return self._layer(tokens, out=torch.empty_like(tokens)).view_as(hidden_states)


def load_layers(checkpoint: Path, device: str, layers: str = "all") -> dict[str, LocalExperts]:
    """These MoE layers of the checkpoint, by the names under which a server has them."""
    backend = resolve_backend("auto", device)  # the one that a server takes there
    settings = CheckpointSettings(path=checkpoint, layers=layers)
    return {
        model.name: LocalExperts(layer_of(model, backend, backend.device, lambda: False))
        for model in models_of(settings)
    }
