"""Every family of transformers with its experts on a server: the text of the same experts in this process."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from examples.in_process import load_layers
from examples.remote_experts import RemoteExperts, Traffic, replace_blocks
from expertd_client import ExpertClient
from tests.families import LAYERS, Sizes, quiet_transformers
from tests.more_families import ALL_FAMILIES
from tests.service.checkpoints.builders import Checkpoint
from tests.service.processes import ServerProcess, serving

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

NEW_TOKENS = 3
SIZES = {"gpt-oss": Sizes(192, 160)}  # no multiples of 128, as in the published models
SERVED = {"deepseek-v4": "1-2"}  # layer 0 chooses by the token's id


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    directory = tmp_path_factory.mktemp("checkpoints")
    return {
        family: Checkpoint(family, directory / family, dtype=torch.float32, sizes=SIZES.get(family, Sizes()))
        for family in ALL_FAMILIES
    }


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server with the layers of all of them."""
    directory = tmp_path_factory.mktemp("server")
    entries = [
        {"path": str(checkpoint.directory), "layers": SERVED.get(family, "all")}
        for family, checkpoint in checkpoints.items()
    ]
    (directory / "config.yaml").write_text(yaml.safe_dump({"checkpoints": entries}))
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("EXPERTD_")]:
            patched.delenv(name)
        with serving(["--config", directory / "config.yaml"], directory) as process:
            yield process


@torch.inference_mode()
def greedy(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """`ids` [1, length] with new tokens, and the last logits; a model without a head gets its embedding's."""
    logits: Any = None
    for _ in range(NEW_TOKENS):
        output = model(ids, use_cache=False)
        logits = getattr(output, "logits", None)
        if logits is None:
            logits = output.last_hidden_state @ model.get_input_embeddings().weight.t()
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    return ids, logits


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_family_writes_the_text_of_its_experts_in_process(
    family: str, checkpoints: dict[str, Checkpoint], server: ServerProcess
) -> None:
    checkpoint, traffic = checkpoints[family], Traffic()
    model, name = checkpoint.oracle, checkpoint.directory.name
    local = load_layers(checkpoint.directory, "cpu", SERVED.get(family, "all"))
    ids = torch.arange(20)[None]
    with quiet_transformers(), ExpertClient(f"http://{server.url}", transport="http") as client:
        _, whole = greedy(model, ids)
        blocks: dict[int, torch.nn.Module] = {}

        def remote(index: int) -> torch.nn.Module | None:
            key = f"{name}.layers.{index}"
            blocks[index] = local.get(key, torch.nn.Identity())
            return RemoteExperts(client, key, traffic) if key in local else None

        replace_blocks(model, remote)
        text, logits = greedy(model, ids)
        assert traffic.calls == NEW_TOKENS * len(local)
        assert 0 < len(local) <= LAYERS
        swap(model, blocks)
        local_text, local_logits = greedy(model, ids)
    assert torch.equal(text, local_text)
    assert (logits - local_logits).norm() <= 1e-4 * local_logits.norm()
    first = slice(ids.shape[1])  # beside transformers' own blocks, whose weights are not rounded to FP8
    assert (logits[:, first] - whole[:, first]).norm() < 0.45 * whole[:, first].norm()


def swap(model: Any, blocks: dict[int, torch.nn.Module]) -> None:
    """Put these in the places of remote experts."""
    for index, layer in enumerate(model.get_decoder().layers):
        for name, child in list(layer.named_children()):
            if isinstance(child, RemoteExperts):
                setattr(layer, name, blocks[index])
            elif isinstance(getattr(child, "block", None), RemoteExperts):
                child.block = blocks[index]
