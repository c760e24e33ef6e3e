"""Ranks load weights of every kind, and a rank that cannot load is reported in a sentence."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from expertd.kernels import ExpertBiases
from expertd.service.checkpoints import CheckpointError, resolve_checkpoints
from expertd.service.engine.layers import LoadCancelledError
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.ranks.loading import load_ranks
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import PlacementSettings
from expertd.service.settings.served import CheckpointSettings
from tests.families import HIDDEN, Sizes
from tests.service.apps import MODEL, tiny_settings
from tests.service.checkpoints.builders import Checkpoint, edit_tensors, shard_of
from tests.service.ranks.servers import close, computed, rank_processes

pytestmark = pytest.mark.slow  # each start of ranks takes seconds

SHAPE = LayerShape(HIDDEN, 128, 4, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoint("deepseek-v3", tmp_path_factory.mktemp("made") / "model", torch.float32).directory


def of_checkpoint(directory: Path, ranks: int, replicas: int = 0, experts: str | None = None) -> Settings:
    """Layer 1 of a checkpoint with shared experts, or some of its experts."""
    served = CheckpointSettings(path=directory, layers="1", datatype="FP32", experts=experts)
    placed = PlacementSettings(policy="static" if replicas else None, replicas=replicas)
    return resolve_checkpoints(
        Settings(backend="reference", ranks=ranks, checkpoints=(served,), placement=placed)
    )


@pytest.mark.parametrize("experts", [None, "0-4", "3-7"])
def test_a_checkpoint_is_split(checkpoint: Path, experts: str | None) -> None:
    got = computed(of_checkpoint(checkpoint, 2, experts=experts))
    assert close(got, computed(of_checkpoint(checkpoint, 1, experts=experts)))


@pytest.mark.parametrize("family", ["qwen2", "hunyuan-4", "minimax-m3", "deepseek-v4", "step-3.7"])
def test_families_with_other_rules_are_split(family: str, tmp_path: Path) -> None:
    directory = Checkpoint(family, tmp_path / "model").directory
    assert close(computed(of_checkpoint(directory, 2)), computed(of_checkpoint(directory, 1)))


@pytest.mark.parametrize(("family", "sizes"), [("gpt-oss", Sizes(192, 160)), ("llama-4", Sizes())])
def test_families_with_biases_or_weights_on_inputs_are_split(
    family: str, sizes: Sizes, tmp_path: Path
) -> None:
    """On CPUs; see test_devices_gpu. No biases move."""
    directory = Checkpoint(family, tmp_path / "model", dtype=torch.float32, sizes=sizes).directory
    whole = of_checkpoint(directory, 1)
    got = computed(of_checkpoint(directory, 2), whole.models[0].hidden_size)
    assert close(got, computed(whole, whole.models[0].hidden_size))
    if family == "gpt-oss":
        with pytest.raises(
            CheckpointError, match=r"with placement\.policy, a family whose .* no biases, got"
        ):
            of_checkpoint(directory, 2, replicas=1)


def test_biases_in_a_weights_file_are_split_and_never_move(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    groups, i = SHAPE.num_groups, SHAPE.intermediate_size
    biases = ExpertBiases(*(torch.randn(groups, n).to(torch.bfloat16) for n in (2 * i, HIDDEN)))
    save_weights(path, replace(random_weights(SHAPE, 3, "cpu"), biases=biases))
    models = [{**MODEL, "hidden_size": HIDDEN, "weights": {"path": path}}]
    assert close(computed(tiny_settings(models=models, ranks=2)), computed(tiny_settings(models=models)))
    with pytest.raises(ValueError, match=r"with placement\.policy, .* got biases of the experts"):
        load_ranks(tiny_settings(models=models, ranks=2, placement={"policy": "static"}), lambda: False)


def test_a_weights_file_is_split(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    save_weights(path, random_weights(SHAPE, 3, "cpu"))
    models = [{**MODEL, "hidden_size": HIDDEN, "weights": {"path": path}}]
    assert close(computed(tiny_settings(models=models, ranks=2)), computed(tiny_settings(models=models)))


@pytest.mark.parametrize("replicas", [1, 5])
def test_ranks_load_replicas(checkpoint: Path, replicas: int) -> None:
    got = computed(of_checkpoint(checkpoint, 2, replicas))
    assert close(got, computed(of_checkpoint(checkpoint, 1)))


def test_one_rank_that_cannot_load_ends_the_load_with_its_sentence(checkpoint: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    name = "model.layers.1.mlp.experts.7.up_proj.weight"  # the last expert: rank 1 has it
    file = shard_of(directory, name)
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
