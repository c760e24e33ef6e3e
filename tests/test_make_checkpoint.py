"""The service loads checkpoints of random weights, for every family."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.make_checkpoint import make_checkpoint
from examples.remote_experts import PROMPT, as_ids, load_tokenizer, main
from expertd.kernels import resolve_backend
from expertd.service.checkpoints import CheckpointError, models_of
from expertd.service.engine.layers import layer_of
from expertd.service.settings.served import CheckpointSettings
from tests.families import FAMILIES, HIDDEN, quiet_transformers

pytestmark = pytest.mark.thorough


def run(directory: Path, layer: int) -> torch.Tensor:
    """The layer's output for five random tokens."""
    (model,) = models_of(CheckpointSettings(path=directory, layers=str(layer)))
    made = layer_of(model, resolve_backend("reference"), torch.device("cpu"), lambda: False)
    return made(torch.randn(5, HIDDEN))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_made(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    with quiet_transformers():
        values = case.config().to_dict() | {"model_type": case.model_type}
    values["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}  # not of what is made
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    assert make_checkpoint(tmp_path / "made", tmp_path, "1-2") == [1, 2]
    for layer in (1, 2):
        out = run(tmp_path / "made", layer)
        assert out.isfinite().all()
        assert 0.05 < out.std() < 5


def test_the_default_checkpoint_needs_no_config(tmp_path: Path) -> None:
    assert make_checkpoint(tmp_path / "made") == [1, 2]
    assert run(tmp_path / "made", 2).isfinite().all()


@pytest.mark.parametrize("family", [None, "mixtral"])
def test_transformers_loads_a_whole_checkpoint(family: str | None, tmp_path: Path) -> None:
    like = None
    with quiet_transformers():
        if family is not None:
            like = tmp_path
            config = FAMILIES[family].config()
            config.dtype = torch.bfloat16
            config.save_pretrained(like)
        make_checkpoint(tmp_path / "made", like)
        load = partial(AutoModelForCausalLM.from_pretrained, tmp_path / "made", dtype="auto")
        model, about = load(output_loading_info=True)
    assert {name: found for name, found in about.items() if found} == {}
    with torch.inference_mode():
        logits = model(torch.arange(8)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def test_an_example_uses_its_fp8_weights_and_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # for other tests
    make_checkpoint(tmp_path / "made")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "made")
    tokenizer = load_tokenizer(tmp_path / "made")
    assert as_ids("ab", tokenizer).tolist() == [[alphabet.index("a"), alphabet.index("b")]]
    arguments = ["--checkpoint", str(tmp_path / "made"), "--compare", "--new-tokens", "4"]
    with quiet_transformers():
        assert main(arguments) == 0
    first, _, third = capsys.readouterr().out.splitlines()
    assert repr(PROMPT)[:-1] in first
    assert third.startswith("experts in this process: the same text, logits differ by 0.")


def test_a_missing_layer_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers: expected MoE layers of the model, got 0"):
        make_checkpoint(tmp_path / "made", layers="0-1")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="model_type"):
        make_checkpoint(tmp_path / "made", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
