"""The identity of a layer's weights, against the document's rule on tensors that safetensors reads whole."""

import json
import re
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertd.service.checkpoints import models_of
from expertd.service.checkpoints.model import PREFIXES
from expertd.service.engine.layers import weights_ids
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights, save_weights
from expertd.service.settings.served import CheckpointSettings, ModelSettings
from expertd_client.weights import weights_id
from tests.families import Sizes
from tests.service.checkpoints.builders import INDEX, Checkpoint, edit_tensors, shard_of

DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8",
}  # fmt: skip
EXPERT = "model.layers.1.mlp.experts.3"


def identity(directory: Path, layer: int = 1, experts: str | None = None, shared: bool = True) -> str:
    settings = CheckpointSettings(
        path=directory, layers=str(layer), experts=experts, shared_experts=shared, requantize="allow"
    )
    (found,) = weights_ids(models_of(settings)).values()
    assert weights_id(directory, layer) == found, "the client's is the same"
    return found


def by_the_document(directory: Path, layer: int) -> str:
    """Another implementation of docs/checkpoints.md."""
    start = rf"(?:{'|'.join(map(re.escape, PREFIXES))}){layer}\."
    tensors = {
        re.sub(f"^{start}", "", name): tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if re.match(start, name)
    }
    chosen = [name for name in tensors if ".experts." in name and "e_score_correction_bias" not in name]
    chosen = chosen or [name for name in tensors if tensors[name].ndim >= 3]
    data = b""
    for name in sorted(chosen):
        tensor = tensors[name]
        data += f"{name} {DTYPES[tensor.dtype]} {str(list(tensor.shape))[1:-1].replace(' ', '')}\n".encode()
        for matrix in tensor if tensor.ndim >= 3 else [tensor]:
            whole = matrix.contiguous().view(torch.uint8).numpy().tobytes()
            if len(whole) > 65536:
                middle = len(whole) // 2
                whole = whole[:1024] + whole[middle - 1024 : middle + 1024] + whole[-1024:]
            data += whole
    return sha256(data).hexdigest()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint with a shared expert, whose matrices are not read whole."""
    directory = tmp_path_factory.mktemp("identity") / "model"
    return Checkpoint("deepseek-v3", directory, torch.float32, sizes=Sizes(384, 256)).directory


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.mark.parametrize(
    ("family", "scales", "mxfp4"),
    [
        ("deepseek-v3", torch.float32, False),
        pytest.param("qwen3", None, False, marks=pytest.mark.thorough),
        ("qwen2", torch.bfloat16, False),  # a gate of the shared expert
        pytest.param("mixtral", None, False, marks=pytest.mark.thorough),
        ("llama-4", None, False),  # all experts in one tensor, transposed
        ("granite-3", None, False),  # and not under `experts`
        pytest.param("step-3.7", torch.float32, False, marks=pytest.mark.thorough),
        ("gpt-oss", None, True),
        ("laguna", None, False),  # the router's bias is among the experts
    ],
)
def test_it_is_the_documents(family: str, scales: torch.dtype | None, mxfp4: bool, tmp_path: Path) -> None:
    sizes = Sizes() if family == "mixtral" else Sizes(384, 256)  # 64 KiB, the largest that is read whole
    checkpoint = Checkpoint(family, tmp_path / "model", scales, mxfp4=mxfp4, sizes=sizes)
    ids = [identity(checkpoint.directory, layer) for layer in (1, 2)]
    assert ids == [by_the_document(checkpoint.directory, layer) for layer in (1, 2)]
    assert len({*ids}) == 2


@pytest.mark.parametrize(("experts", "shared"), [(None, False), ("0-3", True), ("4-7", True), ("5", False)])
def test_it_is_that_of_the_whole_layer(made: Path, experts: str | None, shared: bool) -> None:
    assert identity(made, 1, experts, shared) == by_the_document(made, 1)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_it_depends_on_neither_files_nor_prefixes(made: Path, directory: Path, prefix: str) -> None:
    tensors = {
        name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()
    }
    for file in (*directory.glob("*.safetensors"), directory / INDEX):
        file.unlink()
    renamed = {name.replace("model.layers.", prefix): value for name, value in tensors.items()}
    save_file(renamed, directory / "model.safetensors")
    assert identity(directory) == identity(made)


@pytest.mark.parametrize(
    ("name", "at", "differs"),
    [
        (f"{EXPERT}.gate_proj.weight", 0, True),
        (f"{EXPERT}.down_proj.weight", 384 * 256 // 2, True),
        (f"{EXPERT}.down_proj.weight", 384 * 256 // 4, False),  # not among the bytes that are read
        *((f"{EXPERT}.gate_proj.weight_scale_inv", at, True) for at in (0, 3, 5, -1)),
        ("model.layers.1.mlp.gate.weight", 0, False),
        ("model.layers.1.mlp.gate.e_score_correction_bias", 0, False),
        ("model.layers.2.mlp.experts.3.gate_proj.weight", 0, False),
    ],
)
def test_what_changes_it(made: Path, directory: Path, name: str, at: int, differs: bool) -> None:
    file = shard_of(directory, name)
    values = load_file(file)[name]
    values.view(-1)[at] = 1.0 if values.view(-1)[at].float() != 1 else 2.0
    edit_tensors(file, **{name: values})
    assert (identity(directory) != identity(made)) == differs


def test_a_part_of_a_checkpoint_without_the_other_files_has_none(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is served all the same."""
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"] |= {
        name: "elsewhere.safetensors" for name in index["weight_map"] if name.startswith(f"{EXPERT}.")
    }
    (directory / INDEX).write_text(json.dumps(index))
    settings = CheckpointSettings(path=directory, layers="1", experts="0-2")
    assert weights_ids(models_of(settings)) == {}
    assert "model model.layers.1: its weights have no identity: " in caplog.text


SIZES = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2}


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"top_k": 1, "local_experts": "0-1", "masked_max_tokens": 0}, False),
        ({"shared_experts": False}, False),
        ({"weights": {"seed": 1}}, True),
        ({"num_experts": 8}, True),
        ({"num_shared_experts": 0}, True),  # the random numbers after them are others
    ],
)
def test_layers_of_random_weights(changes: dict[str, object], differs: bool) -> None:
    ids = [
        weights_ids([ModelSettings.model_validate({"name": "a", **SIZES, "num_shared_experts": 1, **each})])
        for each in ({}, changes)
    ]
    assert (ids[0] != ids[1]) == differs


def test_layers_of_a_weights_file(tmp_path: Path) -> None:
    def of(seed: int, **changes: object) -> str:
        path, shape = tmp_path / f"{seed}.safetensors", LayerShape(256, 128, 4, 2, 1)
        weights = random_weights(shape, seed, "cpu")
        weights.router.normal_()
        save_weights(path, weights)
        values = {"name": "a", **SIZES, "num_shared_experts": 1, "weights": {"path": path}, **changes}
        (found,) = weights_ids([ModelSettings.model_validate(values)]).values()
        return found

    assert of(0) == of(0) == of(0, shared_experts=False), "whatever the router"
    assert of(0) != of(1)
