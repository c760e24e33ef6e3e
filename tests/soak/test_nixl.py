"""What the soak of channels over NIXL takes for a mistake."""

from typing import Any

import pytest

from tests.soak.nixl import EXECUTOR_THREADS, mistakes

BEFORE = {"channels": 0, "agents": 0, "descriptors": 19, "threads": 8, "memory": 100}
AFTER = {**BEFORE, "threads": 8 + EXECUTOR_THREADS, "memory": 200}


def result(**last: int) -> dict[str, Any]:
    return {"wrong": 0, "exit_code": 0, "errors": [], "looks": [BEFORE, AFTER, AFTER, {**AFTER, **last}]}


@pytest.mark.parametrize(
    ("name", "most"),
    [("channels", 0), ("agents", 0), ("descriptors", 19), ("threads", 8 + EXECUTOR_THREADS), ("memory", 210)],
)
def test_what_is_left_is_named(name: str, most: int) -> None:
    assert mistakes(result(**{name: most}), growth=0.05) == []
    text = f"{name}: expected at most {most}, got {most + 1}"
    assert mistakes(result(**{name: most + 1}), growth=0.05) == [text]


def test_answers_exit_codes_and_errors_count() -> None:
    wrong = result() | {"wrong": 1, "exit_code": 2, "errors": ["Traceback"]}
    assert mistakes(wrong, growth=0.05) == [
        "wrong: expected 0, got 1",
        "exit_code: expected 0, got 2",
        "Traceback",
    ]
