"""vLLM says the same with its experts on a server, in every family, and has no parameters of experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES
from tests.generating import Outcome, generate
from tests.running import Running

Plain = Callable[..., Outcome]


def remote(model: Path, expertd: Running, transport: str = "channel", **options: Any) -> Outcome:
    settings = {"url": expertd.url, "transport": transport}
    return generate(model, load_format="expertd", additional_config={"expertd": settings}, **options)


def check(got: Outcome, plain: Outcome, exact: Outcome) -> None:
    """As near to plain vLLM as that is to float32; another text begins only where two tokens nearly tie."""
    bound = plain.distance(exact)
    assert got.expert_parameters == 0 < plain.expert_parameters
    assert got.distance(plain) <= bound
    for text, expected, margins in zip(got.texts, plain.texts, plain.margins, strict=True):
        ties = [
            margin for token, other, margin in zip(text, expected, margins, strict=True) if token != other
        ]
        assert all(margin < 6 * bound for margin in ties[:1]), f"expected {expected}, got {text}"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, checkpoints: dict[str, Path], expertd: Running, plain: Plain) -> None:
    got = remote(checkpoints[family], expertd)
    check(got, plain(family, "bfloat16"), plain(family, "float32"))
