"""Log lines as text and as JSON; on a terminal progress bars and log lines, else log lines alone."""

import json
import logging
import os
import pty
import re
import select
import socket
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from expertd.service.util.logs import JsonLines, TextLines, level, set_level, with_fields
from tests.service.checkpoints.builders import Checkpoint
from tests.service.processes import EXPERTD, clean_environment, serving, started

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING|ERROR) [\w.]+: .+")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Checkpoint("qwen3", tmp_path_factory.mktemp("made") / "model", torch.float32).directory


class Screen:
    """A terminal emulator, with a cursor and lines that never wrap."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\s\S]", text):
            if token == "\r":
                self._column = 0
            elif token == "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            elif token == "\x1b[A":
                self._row -= 1
            elif token == "\x1b[K":
                self.lines[self._row] = self.lines[self._row][: self._column]
            else:
                assert not token.startswith("\x1b"), (
                    f"a sequence that this screen knows is expected: {token!r}"
                )
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + token + line[self._column + 1 :]
                self._column += 1


def serve_on_a_terminal(*arguments: str | Path, columns: int = 200) -> str:
    """The output of `expertd serve` on a terminal until it is ready."""
    command = [str(EXPERTD), "serve", *map(str, arguments), "--host", "127.0.0.1", "--port", "0"]
    return on_a_terminal(command, ": ready: ", columns)


def on_a_terminal(command: list[str], end: str, columns: int = 200) -> str:
    """The output of a command on a terminal until it contains `end`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    environment = clean_environment(TERM="xterm")
    with os.fdopen(theirs, "wb", buffering=0) as terminal:
        process = started(command, terminal, environment, command[0] == str(EXPERTD), terminal)
    written = b""
    try:
        while end.encode() not in written:
            assert select.select([ours], [], [], 60)[0], written.decode()
            written += os.read(ours, 65536)
    finally:
        process.terminate()
        process.wait()
        os.close(ours)
    return written.decode()


def whole_lines(written: str) -> list[str]:
    """The final screen, after checking that it has only log lines."""
    screen = Screen()
    screen.write(written)
    shown = [line.rstrip() for line in screen.lines if line.strip()]
    assert [line for line in shown if not LINE.fullmatch(line)] == []
    return shown


def test_bars_and_log_lines_do_not_overwrite_each_other() -> None:
    program = """
import logging, warnings
from expertd.service.util.logs import configure_logging, progress_bar
configure_logging("info")
with progress_bar("outer", 3, "layer") as outer:
    for number in range(3):
        logging.info("before %d", number)
        with progress_bar("inner", 20, "B") as inner:
            for part in range(20):
                inner(1, "part")
                logging.info("within %d.%d", number, part)
        outer(1, "done")
with progress_bar("empty", 0, "layer"):
    warnings.warn("a warning")
logging.info("the end")
"""
    written = on_a_terminal([sys.executable, "-c", program], "the end\r\n")
    assert "outer: " in written
    assert "inner: " in written
    assert "empty: " not in written
    shown = [line.rpartition(": ")[2] for line in whole_lines(written)]
    expected = [
        text for n in range(3) for text in (f"before {n}", *(f"within {n}.{part}" for part in range(20)))
    ]
    assert shown == [*expected, "a warning", "the end"]


def test_each_log_line_is_written_at_once() -> None:
    program = """
import logging
from expertd.service.util.logs import configure_logging
configure_logging("info")
for number in range(3):
    logging.info("line %d", number)
"""
    # Each write to this socket is one packet; stderr without a buffer, as PYTHONUNBUFFERED=1 has it.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            subprocess.run(
                [sys.executable, "-u", "-c", program], stderr=theirs.fileno(), check=True, timeout=300
            )
        written = list(iter(lambda: ours.recv(65536).decode(), ""))
    assert [text.rpartition(": ")[2] for text in written] == [f"line {number}\n" for number in range(3)]


@pytest.mark.slow
def test_on_a_terminal_bars_replace_log_lines(checkpoint: Path) -> None:
    written = serve_on_a_terminal("--model", checkpoint, "--layers", "all")
    assert "\rlayers: " in written
    assert "model.layers.2: " in written, "a bar of bytes"
    assert any("listening on http://" in line for line in whole_lines(written))
    assert "loading model" not in written
    for module in ("loading", "layers", "local_models"):
        assert f"INFO expertd.service.engine.{module}" not in written
    assert "kernels: " not in written, "nothing is compiled for a CPU"


@pytest.mark.slow
def test_a_terminal_without_a_size_gets_log_lines(checkpoint: Path) -> None:
    written = serve_on_a_terminal("--model", checkpoint, "--layers", "0", columns=0)
    assert "loading model model.layers.0" in written
    assert "\rlayers: " not in written


@pytest.mark.slow
def test_without_a_terminal_there_are_only_log_lines(checkpoint: Path, tmp_path: Path) -> None:
    with serving(["--model", checkpoint, "--layers", "0-1"], tmp_path) as server:
        log = server.log().splitlines()
    assert [line for line in log if not LINE.fullmatch(line)] == []
    for layer in (0, 1):
        assert any(f"loading model model.layers.{layer}" in line for line in log)
        assert any(f"MB of model.layers.{layer}, " in line for line in log)


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


def test_levels_are_known() -> None:
    before = level()
    try:
        set_level("error")
        assert level() == "error"
        with pytest.raises(ValueError, match="level: expected debug, info, warning, error, got 'loud'"):
            set_level("loud")
    finally:
        logging.getLogger().setLevel(before.upper())
