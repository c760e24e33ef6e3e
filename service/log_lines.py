"""Log lines as text or as JSON, with times in UTC; a record's `fields` (in `extra`) are keys of its JSON."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

Form = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")


class TextLines(logging.Formatter):
    """`2026-11-22T18:57:33.981Z INFO module: text`; source: what each text begins with."""

    def __init__(self, source: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s %(name)s: {source}%(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _utc(record)


class JsonLines(logging.Formatter):
    """A JSON object on each line: time, level, logger, message, the record's fields, an exception's trace."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = {"process": source.rstrip(": ")} if source else {}

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record; values that JSON does not know become text."""
        line: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._source,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def lines(form: Form, source: str) -> logging.Formatter:
    """The formatter of `form`; source: what names this process, if several write to one stderr."""
    return JsonLines(source) if form == "json" else TextLines(source)


def with_fields(**fields: object) -> Mapping[str, object]:
    """For a logging call's `extra`; None is left out."""
    return {"fields": {name: value for name, value in fields.items() if value is not None}}


def set_level(level: str) -> None:
    """Change the minimum level of this process's log lines. Raises ValueError."""
    if level not in LEVELS:
        raise ValueError(f"level: expected {', '.join(LEVELS)}, got {level!r}")
    logging.getLogger().setLevel(level.upper())
    # Start and shutdown are logged by the server itself.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "debug" else logging.WARNING)


def level() -> str:
    """The minimum level of this process's log lines."""
    return logging.getLevelName(logging.getLogger().level).lower()


def _utc(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
