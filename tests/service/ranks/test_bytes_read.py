"""What the ranks of a node read of a checkpoint: each byte once from the storage."""

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from expertd.service.checkpoints import resolve_checkpoints
from expertd.service.engine.layers import weights_of
from expertd.service.moe.tensor_file import TensorEntry, TensorFile
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks.meeting import Meeting
from expertd.service.ranks.placed import RankPlacements
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.setup import RankSetup
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import PlacementSettings
from expertd.service.settings.served import CheckpointSettings, ModelSettings
from tests.service.checkpoints.builders import Checkpoint
from tests.service.moe.test_direct_reading import forget

RANKS = 2
Read = tuple[Path, int, int, bool]
"""A file, the first byte and the one behind the last, and whether through the page cache."""


def load_on_ranks(settings: Settings, physical: list[int] | None = None) -> None:
    """Have each rank of a node read its part of the only model, one after another, in this process.

    physical  the expert of each physical one; None: contiguous parts
    """
    (model,) = settings.models
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("placements", json.dumps([physical]))
    for rank in range(settings.num_ranks):
        setup = RankSetup(settings, rank, Meeting("127.0.0.1", 1, "127.0.0.1", "lo"), 0)
        placements = RankPlacements(setup, store, MappedRegions())
        held, again = placements.held(model), placements.read_by_others(model)
        weights_of(model, torch.device("cpu"), lambda: False, held, again)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """All that is read of tensors."""
    found: list[Read] = []
    read = TensorReader.read

    def noting(
        reader: TensorReader,
        file: TensorFile,
        tensor: TensorEntry,
        out: torch.Tensor,
        start: int = 0,
        *,
        cached: bool = False,
    ) -> None:
        begin = tensor.start + start
        found.append((file.path, begin, begin + out.nbytes, cached))
        read(reader, file, tensor, out, start, cached=cached)

    monkeypatch.setattr(TensorReader, "read", noting)
    return found


def check_once(reads: list[Read]) -> None:
    """Nothing that is read around the page cache is read a second time."""
    ordered = sorted(reads)
    direct = [read for read in ordered if not read[3]]
    assert direct
    for (file, _, end, _), (other, begin, _, _) in pairwise(direct):
        assert file != other or begin >= end
    for file, begin, end, _ in (read for read in ordered if read[3]):
        assert not any(file == other and first < end and begin < last for other, first, last, _ in direct)


FAMILIES = ["mixtral", "deepseek-v3", "deepseek-v2", "llama-4", "gpt-oss", "granite-3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_read_each_byte_of_a_checkpoint_once(family: str, tmp_path: Path, reads: list[Read]) -> None:
    directory = Checkpoint(family, tmp_path / "model").directory
    check_ranks(directory, reads)


def test_ranks_read_each_byte_of_mxfp4_once(tmp_path: Path, reads: list[Read]) -> None:
    check_ranks(Checkpoint("gpt-oss", tmp_path / "model", mxfp4=True).directory, reads)


def check_ranks(directory: Path, reads: list[Read]) -> None:
    served = CheckpointSettings(path=directory, layers="1", requantize="allow")
    settings = resolve_checkpoints(Settings(backend="reference", ranks=RANKS, checkpoints=(served,)))
    load_on_ranks(settings)
    check_once(reads)


def test_replicas_are_read_through_the_page_cache(tmp_path: Path, reads: list[Read]) -> None:
    directory = Checkpoint("mixtral", tmp_path / "model").directory
    served = CheckpointSettings(path=directory, layers="1")
    placed = PlacementSettings(policy="static", replicas=2)
    settings = resolve_checkpoints(
        Settings(backend="reference", ranks=RANKS, checkpoints=(served,), placement=placed)
    )
    load_on_ranks(settings, [0, 1, 2, 3, 5, 5, 4, 6, 7, 0])  # expert 5 twice on the first, expert 0 on both
    check_once(reads)
    assert sum(read[3] for read in reads) == 2 + 4 * 3, "two routers, and four experts"


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


def test_ranks_read_each_byte_of_the_storage_once(file: Path) -> None:
    size = file.stat().st_size
    forget(file)
    if storage_bytes(file.read_bytes) < size:
        pytest.skip("the file system does not count what it reads, or does not forget files")
    forget(file)
    settings = Settings(backend="reference", ranks=RANKS, models=(large(file),))
    got = storage_bytes(lambda: load_on_ranks(settings))
    assert size <= got + os.sysconf("SC_PAGE_SIZE") * 4, "the ends of a file may lie in the page cache"
    assert got < 1.03 * size, f"expected {size} bytes, got {got}"
