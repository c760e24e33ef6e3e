"""What the ranks of a node read of a checkpoint: each byte once from the storage."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from expertd.service.engine.layers import weights_of
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.rendezvous import Rendezvous
from expertd.service.ranks.setup import RankSetup
from expertd.service.ranks.worker.mover import RankPlacements
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import PlacementSettings
from expertd.service.settings.served import ModelSettings

RANKS = 2


def load_on_ranks(settings: Settings, physical: list[int] | None = None) -> None:
    """Have each rank of a node read its part of the only model, one after another, in this process.

    physical  the expert of each physical one; None: contiguous parts
    """
    (model,) = settings.models
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("placements", json.dumps([physical]))
    for rank in range(settings.num_ranks):
        setup = RankSetup(settings, rank, Rendezvous("127.0.0.1", 1, "127.0.0.1", "lo"), 0)
        placements = RankPlacements(setup, store, MappedRegions())
        weights_of(model, torch.device("cpu"), lambda: False, placements.held(model))


def forget(path: Path) -> None:
    """Have the page cache drop a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A weights file of 40 MB."""
    path = tmp_path_factory.mktemp("file") / "layer.safetensors"
    save_weights(path, random_weights(large("x").shape, 0, "cpu"))
    yield path
    path.unlink()


def large(path: Any) -> ModelSettings:
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_experts": 12, "top_k": 2}
    more = {"name": "large", "num_shared_experts": 1, "weights": {"path": path}}
    return ModelSettings.model_validate({**sizes, **more})


def storage_bytes(call: Callable[[], object]) -> int:
    """What this process reads from storage meanwhile."""

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[9])

    before = read()
    call()
    return read() - before


@pytest.mark.parametrize("physical", [None, [*range(12), 5, 0]], ids=["parts", "replicas"])
def test_ranks_read_each_byte_of_the_storage_once(file: Path, physical: list[int] | None) -> None:
    """What several need (router, shared expert, replicas), they have from the page cache."""
    size = file.stat().st_size
    forget(file)
    if storage_bytes(file.read_bytes) < size:
        pytest.skip("the file system does not count what it reads, or does not forget files")
    forget(file)
    placed = PlacementSettings(policy="static", replicas=2) if physical else PlacementSettings()
    settings = Settings(backend="reference", ranks=RANKS, models=(large(file),), placement=placed)
    got = storage_bytes(lambda: load_on_ranks(settings, physical))
    assert size <= got + os.sysconf("SC_PAGE_SIZE") * 4, "the ends of a file may lie in the page cache"
    assert got < 1.03 * size, f"expected {size} bytes, got {got}"
