"""Folders in which nothing can be written, for any user, root included."""

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REASONS = {
    "missing": "No such file or directory",
    "a file": "Not a directory",
    "denied": "Permission denied",
    "full": "No space left on device",
}


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may be larger: writing ends in the middle, with "File too large"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def break_temporary_files(monkeypatch: pytest.MonkeyPatch, kind: str, directory: Path) -> Path:
    """Have `tempfile` find no folder, and nothing work in the first that it tries, for this reason."""
    tried = directory / "temporary"
    if kind == "a file":
        tried.touch()
    elif kind != "missing":
        tried.mkdir()
        number = {"denied": 13, "full": 28}[kind]
        opened = os.open

        def refusing(path: str | Path, *arguments: Any, **more: Any) -> int:
            if str(path).startswith(str(tried)):
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, *arguments, **more)

        monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tried), "/none/other"])
    return tried
