"""The memory for bodies and outputs: enough for the largest request, by default and at least."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from expertd.service.settings.model import Settings

MIB = 1 << 20
ROUNDING = 5 * MIB // 16
MODEL = {"name": "m", "hidden_size": 256, "intermediate_size": 128, "num_experts": 4, "top_k": 2}


def settings(limits: dict[str, int], **changes: Any) -> Settings:
    return Settings.model_validate({"models": [MODEL], "limits": limits, **changes})


def test_the_default_follows_from_the_largest_body_and_the_number_of_processes() -> None:
    assert settings({}).buffered_bytes == 1024 * MIB
    assert settings({"max_body_bytes": 255 * MIB}).buffered_bytes == 1024 * MIB
    assert settings({"max_body_bytes": 512 * MIB}).buffered_bytes == 2048 * MIB + ROUNDING
    assert settings({}, http_workers=8).buffered_bytes == 8 * (256 * MIB + ROUNDING)


def test_the_default_follows_from_the_largest_tensors_in_regions() -> None:
    limits = dict.fromkeys(("max_request_tokens", "max_batch_tokens", "max_queue_tokens"), 1 << 20)
    assert settings(limits).buffered_bytes == 1024 * MIB, "without regions, tensors are in bodies"
    needed = (1 << 20) * (2 * 4 * 256 + 12 * 2) + ROUNDING
    regions = {"enabled": True}
    assert settings(limits, shared_memory=regions).buffered_bytes == needed
    assert settings(limits, shared_memory=regions, http_workers=2).buffered_bytes == 2 * needed


@pytest.mark.parametrize("http_workers", [1, 3])
def test_less_than_the_largest_request_needs_is_refused(http_workers: int) -> None:
    needed = http_workers * (4 * 100_000 + ROUNDING)
    limits = {"max_body_bytes": 100_000, "max_buffered_bytes": needed}
    assert settings(limits, http_workers=http_workers).buffered_bytes == needed
    expected = f"limits.max_buffered_bytes: expected at least {needed}, got {needed - 1}"
    with pytest.raises(ValidationError, match=re.escape(expected)):
        settings({**limits, "max_buffered_bytes": needed - 1}, http_workers=http_workers)
