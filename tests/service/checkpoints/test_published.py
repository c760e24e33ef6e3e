"""The config.json of published models are understood, or refused for the documented reason."""

import re

import pytest

from expertd.service.checkpoints import CheckpointError
from expertd.service.checkpoints.families import REFUSED
from tests.paths import ROOT
from tests.service.checkpoints.published import PUBLISHED, has_four_bits, replaced, report, understood


def test_most_are_understood() -> None:
    assert len(PUBLISHED) == 65
    found = re.match(r"(\d+) of 65 are understood\.\n", report())
    assert found
    assert int(found[1]) >= 52


def test_the_documented_report_is_the_current_one() -> None:
    text = (ROOT / "docs" / "internals" / "published.md").read_text()
    assert replaced(text) == text, "python -m tests.service.checkpoints.published docs/internals/published.md"
    with pytest.raises(ValueError, match="each on a line of its own"):
        replaced("no markers")


def test_the_others_are_refused_for_a_known_reason() -> None:
    for name, files in PUBLISHED.items():
        why = REFUSED.get(files["config.json"]["model_type"])
        if why is None:
            understood(name)
            continue
        with pytest.raises(CheckpointError, match=f"{why}$"):
            understood(name)


@pytest.mark.parametrize(
    ("name", "layers", "sizes", "routing"),
    [
        ("deepseek-ai/DeepSeek-V3", (3, 61), (7168, 2048, 256, 8, 1), ("sigmoid", True, 2.5, 8, 4)),
        ("zai-org/GLM-5.2-FP8", (3, 78), (6144, 2048, 256, 8, 1), ("sigmoid", True, 2.5, 1, 1)),
        ("moonshotai/Kimi-K2.5", (1, 60), (7168, 2048, 384, 8, 1), ("sigmoid", True, 2.827, 1, 1)),
        ("Qwen/Qwen3.5-397B-A17B", (0, 59), (4096, 1024, 512, 10, 1), ("softmax", True)),
        ("Qwen/Qwen3-30B-A3B", (0, 47), (2048, 768, 128, 8, 0), ("softmax", True)),
        ("deepseek-ai/DeepSeek-V4-Pro", (3, 60), (7168, 3072, 384, 6, 1), ("sqrtsoftplus", True, 2.5)),
        ("stepfun-ai/Step-3.7-Flash", (3, 44), (4096, 1280, 288, 8, 1), ("sigmoid", True, 3.0)),
        ("MiniMaxAI/MiniMax-M3", (3, 59), (6144, 3072, 128, 4, 1), ("sigmoid", True, 2.0)),
        ("openai/gpt-oss-120b", (0, 35), (2880, 2880, 128, 4, 0), ("softmax", True, "logits")),
        ("XiaomiMiMo/MiMo-V2-Flash", (1, 47), (4096, 2048, 256, 8, 0), ("sigmoid", True, 1.0, 1, 1)),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", (0, 47), (5120, 8192, 16, 1, 1), ("sigmoid", False)),
    ],
)
def test_facts_of_published_models(
    name: str, layers: tuple[int, int], sizes: tuple[int, ...], routing: tuple[object, ...]
) -> None:
    model = understood(name)
    assert (model.layers[0], model.layers[-1]) == layers
    got = model.hidden_size, model.intermediate_size, model.num_experts, model.top_k, model.num_shared_experts
    assert got == sizes
    assert tuple(model.routing.values()) == routing


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V4-Flash", "nvidia/DeepSeek-V4-Pro-NVFP4"])
def test_four_bits_of_experts_are_found(name: str) -> None:
    assert has_four_bits(understood(name))
    assert not has_four_bits(understood("deepseek-ai/DeepSeek-V3"))
