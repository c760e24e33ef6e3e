"""Log lines as text and as JSON."""

import json
import logging
import sys

import pytest

from expertd.service.log_lines import JsonLines, TextLines, level, set_level, with_fields


def record(text: str, *arguments: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("module", logging.WARNING, "file", 1, text, arguments, None)
    made.created, made.msecs = 1_800_000_000.25, 250.0
    vars(made).update(more)
    return made


def test_times_are_in_utc() -> None:
    assert (
        TextLines("rank 1: ").format(record("a %s", "b"))
        == "2027-01-15T08:00:00.250Z WARNING module: rank 1: a b"
    )


def test_a_line_of_json_has_everything() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        made = record("a\n%s", "\N{SNOWMAN}", exc_info=sys.exc_info(), **with_fields(model="m", reason=None))
    text = JsonLines("rank 1: ").format(made)
    assert "\n" not in text
    line = json.loads(text)
    assert "ValueError: wrong" in line.pop("exception")
    assert line == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "logger": "module",
        "process": "rank 1",
        "message": "a\n\N{SNOWMAN}",
        "model": "m",
    }


def test_what_json_does_not_know_becomes_text() -> None:
    assert json.loads(JsonLines("").format(record("a", **with_fields(path=ValueError("x")))))["path"] == "x"


def test_levels_are_known() -> None:
    before = level()
    try:
        set_level("error")
        assert level() == "error"
        with pytest.raises(ValueError, match="level: expected debug, info, warning, error, got 'loud'"):
            set_level("loud")
    finally:
        logging.getLogger().setLevel(before.upper())
