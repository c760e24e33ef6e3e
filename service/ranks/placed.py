"""What a rank does about placements: which experts it loads, where tokens are, and moves."""

import logging
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import Store

from expertd.service.device import device_of
from expertd.service.moe.parallel import PlacedExperts, held_by
from expertd.service.moe.split import part_of
from expertd.service.ranks.messages import ERROR_BYTES
from expertd.service.ranks.mover import Mover
from expertd.service.ranks.moves import MoveCommand
from expertd.service.ranks.peer_transport import PeerTransport
from expertd.service.ranks.placements import read_placements
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.setup import RankSetup, largest_expert
from expertd.service.ranks.transport import SharedTransport, TorchTransport, Transport
from expertd.service.settings.served import ModelSettings

logger = logging.getLogger(__name__)


class RankPlacements:
    """For one rank. Without `placement.policy` it holds contiguous parts, for good. Raises RuntimeError."""

    def __init__(self, setup: RankSetup, store: Store, regions: MappedRegions) -> None:
        self._setup, self._regions = setup, regions
        self._models = list(setup.settings.models)
        self._placements: list[list[int]] | None = None
        if setup.settings.placement.policy is not None:
            self._placements = read_placements(store)
        self._layers: list[PlacedExperts] = []
        self._mover: Mover | None = None

    def physical(self, model: ModelSettings) -> Sequence[int] | None:
        """The expert of each of the model's physical experts; None: contiguous parts."""
        return None if self._placements is None else self._placements[self._models.index(model)]

    def held(self, model: ModelSettings) -> Sequence[int]:
        """The experts that this rank loads."""
        physical = self.physical(model) or model.shape.held_experts
        return held_by(self._setup.rank, self._setup.num_ranks, physical)

    def set_layers(self, layers: Sequence[PlacedExperts]) -> None:
        """Say what moves change, once all layers are loaded, in the order of the models. Collective."""
        if self._placements is None:
            return
        self._layers = list(layers)
        transport = self._transport(layers[0].places.device)
        transport.connect()
        self._mover = Mover(self._setup.rank, self._layers, transport)

    def _transport(self, device: torch.device) -> Transport:
        num_bytes = largest_expert(self._setup.settings)
        if self._setup.settings.nnodes > 1:
            return TorchTransport(num_bytes, device)
        if device_of(device).is_host:
            return SharedTransport(self._setup.rank, num_bytes, self._regions.span)
        return PeerTransport(num_bytes, device)

    def begin_step(self, number: int, model: int, num_tokens: int, place: int, count: int) -> None:
        """Say where this rank's tokens are: by rows of the whole step, or by the step's number.

        place, count  the rank computes the part number `place` of `count`
        """
        if not self._layers:
            return
        layer = self._layers[model]
        if self._setup.settings.placement.objective == "activated":
            layer.begin_step(number, by_row=False)
        else:
            layer.begin_step(part_of(num_tokens, place, count).start)

    def move(self, command: MoveCommand) -> tuple[int, float, str]:
        """Carry out a command, after the steps before it: its number, its seconds, and an error or ""."""
        assert self._mover is not None
        try:
            with torch.inference_mode():
                return command.number, self._mover.run(command), ""
        except Exception as error:
            logger.debug("move %d failed", command.number, exc_info=error)
            return command.number, 0.0, f"{type(error).__name__}: {error}"[:ERROR_BYTES]
