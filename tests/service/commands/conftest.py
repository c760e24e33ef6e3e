"""What tests of the commands share: a small checkpoint, a configuration, a machine without a GPU."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.service.checkpoints.builders import Checkpoint


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERTD_CONFIG", raising=False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and no backend resolved yet."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in ("backends", "backends.no_gpu"):
        monkeypatch.setattr(f"expertd.kernels.{module}.driver_version", lambda: None)
    monkeypatch.setattr("expertd.kernels.backends._instances", {})
    monkeypatch.setattr("expertd.kernels.backends._auto_choices", {})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoint("deepseek-v3", tmp_path_factory.mktemp("made") / "model", torch.float32).directory


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    model = {"name": "m", "hidden_size": 256, "intermediate_size": 128, "num_experts": 3, "top_k": 2}
    path.write_text(yaml.safe_dump({"port": 0, "backend": "reference", "models": [model]}))
    return path
