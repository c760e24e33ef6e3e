"""vLLM says the same with its experts on a server, and has no parameters of experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.generating import Outcome, generate
from tests.running import Running

_NEXT_TOKEN = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}


def remote(model: Path, expertd: Running, settings: dict[str, Any], **options: Any) -> Outcome:
    """With the plugin's settings, and vLLM's options."""
    additional = {"expertd": {"url": expertd.url, "transport": "channel"} | settings}
    return generate(model, load_format="expertd", additional_config=additional, **options)


@pytest.mark.parametrize(
    ("family", "settings", "options"),
    [
        *((family, {}, {}) for family in FAMILIES),
        ("qwen3_moe", {"transport": "http"}, {}),
        ("qwen3_moe", {"max_tokens": 16}, {}),
        ("qwen2_moe", {}, {"enforce_eager": False}),  # with torch.compile
        ("qwen3_moe", {}, {"model_impl": "transformers"}),
        ("qwen3_moe", {}, {"model_impl": "transformers", "enforce_eager": False}),
        ("qwen2_moe", {}, {"tensor_parallel_size": 2}),
        ("deepseek_v3", {}, _NEXT_TOKEN),
    ],
    ids=str,
)
def test_texts_and_log_probabilities_agree(
    family: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    checkpoints: dict[str, Path],
    expertd: Running,
    plain: Callable[..., Outcome],
) -> None:
    """With plain vLLM as well as that does with float32; other texts begin where two tokens nearly tie."""
    got = remote(checkpoints[family], expertd, settings, **options)
    expected = plain(family, **options)
    bound = expected.distance(plain(family, dtype="float32"))
    assert got.expert_parameters == 0 < expected.expert_parameters
    assert got.distance(expected) <= bound
    assert all(margin < 6 * bound for margin in expected.ties(got.texts))


def test_another_checkpoint_of_the_same_shape_is_refused(
    expertd: Running, plain: Callable[..., Outcome], tmp_path: Path
) -> None:
    other = tmp_path / "qwen3_moe"
    make_checkpoint(other, "qwen3_moe", seed=1)
    with pytest.raises(
        RuntimeError, match=r"qwen3_moe\.layers\.0 on http\S+: weights_id: expected \w+, of \S+ \(or"
    ):
        remote(other, expertd, {})
    got = remote(other, expertd, {"check_weights": "off"})
    assert got.expert_parameters == 0
    assert got.texts != plain("qwen3_moe").texts  # experts of one, the rest of the other
