"""A file of settings with one mistake, for tests."""

from itertools import pairwise
from pathlib import Path

import pytest

from expertd.service.settings.loader import SettingsError, load_settings

MODEL = "{name: m, hidden_size: 256, intermediate_size: 128, num_experts: 4, top_k: 2}"


BILLION_VALUES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)
"""Nine lines whose aliases stand for 9^9 values."""


def check_refused(directory: Path, text: str, expected: str) -> None:
    """The file `text` is refused with one sentence that names it and matches `expected`."""
    path = directory / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=expected) as caught:
        load_settings(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
