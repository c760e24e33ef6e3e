"""Every family's checkpoint on a real server, through tritonclient, compared with transformers' own block."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import tritonclient.http as triton
from torch import Tensor

from expertd.service.settings.model import Settings
from expertd.service.settings.served import CheckpointSettings
from tests.families import FAMILIES, HIDDEN
from tests.kernels.helpers import diff, fresh_generator
from tests.service.checkpoints.builders import Checkpoint
from tests.service.processes import ServerProcess, server_process, serving

pytestmark = [pytest.mark.slow, pytest.mark.thorough]  # checkpoints are written and served

TOKENS = 64
SERVED = (*FAMILIES, "qwen2", "hunyuan-4", "minimax-m3", "deepseek-v4", "llama-4")  # one for each rule


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Checkpoint]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return {family: Checkpoint(family, directory / family, torch.float32) for family in SERVED}


@pytest.fixture(scope="module")
def server(
    checkpoints: Mapping[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    served = tuple(CheckpointSettings(path=c.directory, layers="1-2") for c in checkpoints.values())
    with server_process(
        Settings(backend="reference", checkpoints=served), tmp_path_factory.mktemp("server")
    ) as process:
        yield process


def ask(server: ServerProcess, model: str, hidden_states: Tensor, **routing: Tensor) -> Tensor:
    inputs = []
    for name, values in {"hidden_states": hidden_states, **routing}.items():
        datatype = "INT32" if values.dtype == torch.int32 else "FP32"
        tensor = triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values.numpy())
        inputs.append(tensor)
    with triton.InferenceServerClient(server.url) as client:
        out: Any = client.infer(model, inputs).as_numpy("hidden_states")
    return torch.from_numpy(out.copy())


def tokens() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=fresh_generator())


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("family", SERVED)
def test_a_family_matches_transformers(
    server: ServerProcess, checkpoints: Mapping[str, Checkpoint], family: str, layer: int
) -> None:
    hidden_states = tokens()
    expected, topk_ids, topk_weights = checkpoints[family].run(layer, hidden_states)
    model = f"{family}.layers.{layer}"
    assert diff(ask(server, model, hidden_states), expected) < 2e-4
    given = ask(server, model, hidden_states, topk_ids=topk_ids.int(), topk_weights=topk_weights)
    assert diff(given, expected) < 2e-4


def test_the_command_line_serves_a_checkpoint(checkpoints: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    checkpoint, hidden_states = checkpoints["kimi-k2"], tokens()
    expected, _, _ = checkpoint.run(2, hidden_states)
    arguments = [
        "--model",
        str(checkpoint.directory),
        "--layers",
        "2",
        "--name",
        "kimi",
        "--backend",
        "reference",
    ]
    total = torch.zeros_like(expected)
    for experts in ("0-4", "5-7"):
        with serving([*arguments, "--experts", experts], tmp_path) as server:
            assert "MB/s" in server.log()
            total += ask(server, "kimi.layers.2", hidden_states)
    assert diff(total, expected) < 2e-4
