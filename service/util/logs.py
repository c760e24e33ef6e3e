"""Log lines on stderr, as text or as JSON, with times in UTC, and progress bars where stderr is a terminal.

A record's `fields` (in `extra`) are keys of its JSON.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from tqdm import tqdm

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_NO_LINES = 6  # above the levels that the profiler has

_bars = True


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


def lines(form: LogFormat, source: str) -> logging.Formatter:
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


def configure_logging(level: str, source: str = "", bars: bool = True, form: LogFormat = "text") -> None:
    """Log lines with time, level and module on stderr, for this process and the libraries in it.

    source  what names this process, if several write to one stderr
    bars    whether this process may show progress bars; only one of them can, and none with JSON
    """
    global _bars
    _bars = bars and form == "text"
    handler = _Handler()
    handler.setFormatter(lines(form, source))
    logging.basicConfig(handlers=[handler])
    set_level(level)
    logging.captureWarnings(True)  # else they would overwrite the bars
    if form == "json":  # torch's profiler writes lines of its own, by this variable from its first use on
        os.putenv("KINETO_LOG_LEVEL", str(_NO_LINES))


def shows_bars() -> bool:
    """Whether stderr can show progress bars; if not, callers log progress instead."""
    # A terminal without a size (a container's, while nobody is attached) cannot show them.
    if not _bars or sys.stderr is None:  # closed
        return False
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextmanager
def progress_bar(what: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Show a bar on a terminal until the block ends; none if `total` is 0.

    Yields a function that takes the progress since its last call, and the name of the current item.
    """
    hidden = total == 0 or not shows_bars()
    scaled = unit == "B"
    with tqdm(desc=what, total=total, unit=unit, unit_scale=scaled, disable=hidden, leave=False) as bar:

        def advance(done: int, name: str = "") -> None:
            bar.set_postfix_str(name, refresh=done == 0)
            bar.update(done)

        yield advance


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines above the bars, which are cleared first and redrawn afterwards."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            with tqdm.external_write_mode(file=self.stream):
                self.stream.write(line)  # at once: other processes write to the same stderr
                self.flush()
        except Exception:  # as in every handler: a failed log line must not stop the program
            self.handleError(record)


def _utc(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"
