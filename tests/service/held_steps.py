"""Servers whose steps take as long as a test wants, without the CPU."""

import os
from pathlib import Path

from tests.service.waiting import wait_for

# Python runs it at the start of the server.
_PROGRAM = """
import time
from pathlib import Path

from expertd.service.moe.runner import LayerRunner

begin = LayerRunner.begin


def held(*arguments):
    while Path({file!r}).exists():
        Path({waits!r}).touch()
        time.sleep(0.005)
    return begin(*arguments)


LayerRunner.begin = held
"""


class HeldSteps:
    """Servers that start with this `environment` begin no step from `hold` to `release`."""

    def __init__(self, directory: Path) -> None:
        self._file, self._waits = directory / "held", directory / "waits"
        program = _PROGRAM.format(file=str(self._file), waits=str(self._waits))
        (directory / "sitecustomize.py").write_text(program)
        paths = [str(directory), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def hold(self) -> None:
        self._file.touch()

    def wait_for_one(self) -> None:
        """Return when a step is held."""
        wait_for(self._waits.exists, "a step is held")

    def release(self) -> None:
        self._file.unlink()
