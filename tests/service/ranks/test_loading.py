"""Ranks load weights of every kind, each byte once, and one that cannot is reported in a sentence."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import load_file

from expertd.kernels import ExpertBiases
from expertd.service.checkpoints import CheckpointError, resolve_checkpoints
from expertd.service.engine.layers import LoadCancelledError, weights_of
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks.front.loading import load_ranks
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.rendezvous import Rendezvous
from expertd.service.ranks.setup import RankSetup
from expertd.service.ranks.worker.mover import RankPlacements
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import PlacementSettings
from expertd.service.settings.served import CheckpointSettings, ModelSettings
from tests.families import HIDDEN, Sizes
from tests.service.apps import MODEL, tiny_settings
from tests.service.checkpoints.builders import Checkpoint, edit_tensors
from tests.service.checkpoints.layouts import write
from tests.service.ranks.servers import close, computed, computed_by_all, rank_processes

pytestmark = pytest.mark.slow  # each start of ranks takes seconds

SHAPE = LayerShape(HIDDEN, 128, 4, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoint("deepseek-v3", tmp_path_factory.mktemp("made") / "model", torch.float32).directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer."""
    directory = tmp_path_factory.mktemp("small")
    write(directory, "fp8 by block")
    return directory


def of_checkpoint(directory: Path, ranks: int, replicas: int = 0) -> Settings:
    """The last layer of a checkpoint."""
    layer = json.loads((directory / "config.json").read_text())["num_hidden_layers"] - 1
    served = CheckpointSettings(path=directory, layers=str(layer), datatype="FP32")
    placed = PlacementSettings(policy="static" if replicas else None, replicas=replicas)
    return resolve_checkpoints(
        Settings(backend="reference", ranks=ranks, checkpoints=(served,), placement=placed)
    )


PARTS = {"all": None, "first": "0-4", "last": "3-7"}  # of a checkpoint's experts
FAMILIES = ["qwen2", "hunyuan-4", "minimax-m3", "deepseek-v4", "step-3.7"]  # with other rules
ON_CPUS = {
    "gpt-oss": Sizes(192, 160),
    "llama-4": Sizes(),
}  # biases, or weights on inputs: see test_devices_gpu
FOUR_BITS = ["gpt-oss-mxfp4", "kimi-int4"]
FILES = ["plain", "biased"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Models with weights from a file, without and with biases."""
    folder = tmp_path_factory.mktemp("files")
    weights, (groups, i) = random_weights(SHAPE, 3, "cpu"), (SHAPE.num_groups, SHAPE.intermediate_size)
    biases = ExpertBiases(*(torch.randn(groups, n).to(torch.bfloat16) for n in (2 * i, HIDDEN)))
    save_weights(folder / "plain", weights)
    save_weights(folder / "biased", replace(weights, biases=biases))
    return {
        name: {**MODEL, "name": name, "hidden_size": HIDDEN, "weights": {"path": folder / name}}
        for name in FILES
    }


@pytest.fixture(scope="module")
def outputs(
    checkpoint: Path, files: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, NDArray[np.float32]]]:
    """What one process and two ranks compute: layers of all kinds together, since ranks start slowly."""
    folder = tmp_path_factory.mktemp("families")
    made = [Checkpoint(family, folder / family) for family in FAMILIES]
    for family, sizes in ON_CPUS.items():
        made.append(Checkpoint(family, folder / family, dtype=torch.float32, sizes=sizes))
    made.append(Checkpoint("gpt-oss", folder / "gpt-oss-mxfp4", mxfp4=True))
    made.append(Checkpoint("kimi-k2.5", folder / "kimi-int4", routed="int4"))
    served = [CheckpointSettings(path=each.directory, layers="1", datatype="FP32") for each in made]
    for name, experts in PARTS.items():
        part = {"path": checkpoint, "name": name, "layers": "1", "datatype": "FP32", "experts": experts}
        served.append(CheckpointSettings.model_validate(part))
    settings = {"backend": "reference", "models": list(files.values()), "checkpoints": served}
    return [
        computed_by_all(resolve_checkpoints(Settings.model_validate({**settings, "ranks": ranks})))
        for ranks in (1, 2)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [*(f"{name}.layers.1" for name in (*PARTS, *FAMILIES, *ON_CPUS, *FOUR_BITS)), *FILES]
)
def test_a_layer_is_split(name: str, outputs: list[dict[str, NDArray[np.float32]]]) -> None:
    one, two = outputs
    assert close(two[name], one[name])


@pytest.mark.thorough
def test_biases_never_move(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    directory = Checkpoint("gpt-oss", tmp_path / "model", sizes=ON_CPUS["gpt-oss"]).directory
    with pytest.raises(CheckpointError, match=r"with placement\.policy, a family whose .* no biases, got"):
        of_checkpoint(directory, 2, replicas=1)
    moving = tiny_settings(models=[files["biased"]], ranks=2, placement={"policy": "static"})
    with pytest.raises(ValueError, match=r"with placement\.policy, .* got biases of the experts"):
        load_ranks(moving, lambda: False)


@pytest.mark.parametrize("replicas", [1, 3])
def test_ranks_load_replicas(small: Path, replicas: int) -> None:
    got = computed(of_checkpoint(small, 2, replicas))
    assert close(got, computed(of_checkpoint(small, 1)))


def test_one_rank_that_cannot_load_ends_the_load_with_its_sentence(small: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(small, tmp_path / "model"))
    name = "model.layers.0.block_sparse_moe.experts.3.w3.weight"  # the last expert: rank 1 has it
    file = directory / "model.safetensors"
    values = load_file(file)[name]
    values[0, 0] = torch.nan
    edit_tensors(file, **{name: values})
    with pytest.raises(ValueError, match=rf"rank 1: .*{name}: expected finite numbers, got others"):
        load_ranks(of_checkpoint(directory, 2), lambda: False)
    assert rank_processes() == []


def test_a_load_that_is_cancelled_leaves_no_ranks() -> None:
    with pytest.raises(LoadCancelledError):
        load_ranks(tiny_settings(ranks=2), lambda: len(rank_processes()) == 2)
    assert rank_processes() == []


RANKS = 2


def read_on_ranks(settings: Settings, physical: list[int] | None = None) -> None:
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
    got = storage_bytes(lambda: read_on_ranks(settings, physical))
    assert size <= got + os.sysconf("SC_PAGE_SIZE") * 4, "the ends of a file may lie in the page cache"
    assert got < 1.03 * size, f"expected {size} bytes, got {got}"
