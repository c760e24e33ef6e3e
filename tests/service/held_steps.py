"""Servers whose steps take as long as a test wants, without the CPU."""

import os
from pathlib import Path

# Python runs it at the start of the server.
_PROGRAM = """
import time
from pathlib import Path

from expertd.service.moe.runner import LayerRunner

begin = LayerRunner.begin


def held(*arguments):
    while Path({file!r}).exists():
        time.sleep(0.005)
    return begin(*arguments)


LayerRunner.begin = held
"""


class HeldSteps:
    """Servers that start with this `environment` begin no step from `hold` to `release`."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "held"
        (directory / "sitecustomize.py").write_text(_PROGRAM.format(file=str(self._file)))
        paths = [str(directory), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def hold(self) -> None:
        self._file.touch()

    def release(self) -> None:
        self._file.unlink()
