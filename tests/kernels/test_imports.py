"""The kernels package stands alone."""

import subprocess
import sys

FORBIDDEN = ("fastapi", "pydantic", "yaml", "prometheus_client", "uvicorn", "expertd.service")


def test_importing_kernels_loads_nothing_of_the_service_and_needs_no_cuda_extra() -> None:
    code = (
        "import sys; sys.modules['cuda.core'] = None; import expertd.kernels, expertd.kernels.partitions\n"
        f"print([name for name in {FORBIDDEN} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
