"""The kernels package stands alone."""

import subprocess
import sys

FORBIDDEN = ("fastapi", "pydantic", "yaml", "prometheus_client", "uvicorn", "expertd.service")


def test_importing_kernels_loads_nothing_of_the_service() -> None:
    code = f"import sys, expertd.kernels; print([name for name in {FORBIDDEN} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
