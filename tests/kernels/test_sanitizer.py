"""compute-sanitizer finds nothing in any kernel variant."""

import shutil
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.gpu

TOOL = shutil.which("compute-sanitizer")


@pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer on PATH")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_report_no_errors(tool: str) -> None:
    # cuda.core's probes of driver entry points fail by design: only errors in kernels count.
    command = [str(TOOL), "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    program = [sys.executable, "-m", "tests.kernels.sanitizer_program"]
    run = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "every variant ran" in run.stdout
