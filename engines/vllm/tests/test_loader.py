"""What the loader reads of a checkpoint's files, and that the plugin is idle without it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from vllm.config.load import LoadConfig
from vllm.model_executor.models.utils import extract_layer_index, make_layers

from expertd_vllm.loader import DummyLoader, ExpertdLoader
from tests.checkpoints import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_else_is_read(
    family: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = checkpoints[family].glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        names = set(tensors.keys())
    asked: list[str] = []
    monkeypatch.setattr("safetensors.safe_open", lambda *given: Recording(*given, asked=asked))
    loader = ExpertdLoader(LoadConfig(load_format="expertd"))
    source = loader.Source(str(checkpoints[family]), None)
    read = {name for name, _ in loader._get_weights_iterator(source)}
    left = names - read
    assert read == set(asked)
    assert len(left) >= 4
    assert all("shared" not in name and ("experts" in name or "_linear" in name) for name in left)
    assert not any("experts" in name and "shared" not in name for name in read)


class Recording:
    """A safetensors file that notes what is read of it."""

    def __init__(self, *given: str, asked: list[str]) -> None:
        self._file, self._asked = safe_open(*given), asked

    def __enter__(self) -> "Recording":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> object:
        self._asked.append(name)
        return self._file.get_tensor(name)


@pytest.mark.parametrize("name", ["mlp.experts.w13_weight", "block_sparse_moe.experts.mega.w2"])
def test_experts_of_other_classes_are_refused(name: str) -> None:
    model = torch.nn.Module()
    owner, last = model, name.split(".")[-1]
    for part in ["model", "layers", "0", *name.split(".")[:-1]]:
        owner.add_module(part, torch.nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter(last, torch.nn.Parameter(torch.empty(8, 2, 2)))
    with pytest.raises(ValueError, match=f"experts: expected those of .*, got .*0.{name}"):
        ExpertdLoader(LoadConfig(load_format="expertd")).load_weights(model, None)


def test_a_measurement_needs_no_checkpoint() -> None:
    model = torch.nn.Linear(8, 8)
    torch.nn.init.zeros_(model.weight)
    DummyLoader(LoadConfig(load_format="expertd_dummy")).load_weights(model, None)
    assert model.weight.all()


def test_a_later_pipeline_stage_has_the_models_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(rank_in_group=1, world_size=2)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_pp_group", lambda: stage)
    asked: list[int] = []

    def layer(prefix: str) -> torch.nn.Module:
        asked.append(extract_layer_index(f"{prefix}.mlp.experts"))
        return torch.nn.Module()

    make_layers(8, layer, "model.layers")
    assert asked == [4, 5, 6, 7]


def test_the_plugin_is_idle_without_the_loader() -> None:
    program = (
        "import sys; from vllm.plugins import load_general_plugins; load_general_plugins()\n"
        "from vllm.model_executor.custom_op import op_registry_oot\n"
        "from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders\n"
        "print('expertd' in loaders, op_registry_oot, 'expertd_vllm.experts' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True {} False"


@pytest.mark.parametrize("is_first", [True, False])
def test_vllms_log_has_the_clients_messages(is_first: bool) -> None:
    """Whether vLLM loads plugins before it sets its log up, as in a process that it forks, or after."""
    steps = ["load_general_plugins()", "configure_logging(LoggingConfig())"]
    program = (
        "import logging; from vllm.config.logging import LoggingConfig\n"
        "from vllm.logger import configure_logging; from vllm.plugins import load_general_plugins\n"
        f"{'; '.join(steps if is_first else reversed(steps))}\n"
        "logging.getLogger('expertd_client').info('calls go over %s', 'a channel')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    shown = [line for line in done.stdout.splitlines() if line.endswith("] calls go over a channel")]
    assert len(shown) == 1
    assert " INFO " in shown[0]
