"""Log lines and progress bars on stderr: on a terminal both, without getting into each other's lines, else
log lines only."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log lines with time, level and module on stderr, for this process and the libraries in it."""
    logging.basicConfig(level=level.upper(), handlers=[_Handler()], format=_FORMAT)
    logging.captureWarnings(True)  # they would be written over the bars
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its life is told in our own words


def shows_bars() -> bool:
    """Whether there is a terminal to draw bars on; what they show goes to the log where there is none."""
    # One without a size (a container's, before anybody attaches) shows nothing of them.
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextmanager
def progress_bar(what: str, total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal, taken away at the end; none where there is nothing to do.

    Yields a function to call with how much has been done since the last call, and what is being done.
    """
    hidden = total == 0 or not shows_bars()
    scaled = unit == "B"
    with tqdm(desc=what, total=total, unit=unit, unit_scale=scaled, disable=hidden, leave=False) as bar:

        def advance(done: int, name: str = "") -> None:
            bar.set_postfix_str(name, refresh=done == 0)
            bar.update(done)

        yield advance


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines above the bars, which are taken away first and then drawn again."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except Exception:  # as in every handler: a line that cannot be written stops nothing
            self.handleError(record)
