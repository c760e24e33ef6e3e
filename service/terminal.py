"""Log lines and progress bars on stderr. Without a terminal there are only log lines."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from expertd.service.log_lines import Form, lines, set_level

_NO_LINES = 6  # above the levels that the profiler has

_bars = True


def configure_logging(level: str, source: str = "", bars: bool = True, form: Form = "text") -> None:
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
