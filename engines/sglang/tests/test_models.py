"""SGLang's own models on a CPU say the same with their experts on a server.

Needs SGLANG_SOURCES, and in SGLANG_PYTHON a Python with torch, transformers and what else SGLang imports of
common packages, as build/engines-venv/bin/python has; tests/absent.py stands in for the kernels.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving import serving

PYTHON, SOURCES = os.environ.get("SGLANG_PYTHON", ""), os.environ.get("SGLANG_SOURCES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (PYTHON and SOURCES), reason="needs SGLANG_SOURCES and SGLANG_PYTHON"),
]
ROOT = Path(__file__).resolve().parents[3]
CHECKPOINTS = ROOT / "engines/vllm/tests/checkpoints.py"
ENTRY_POINTS = "[sglang.srt.plugins]\nexpertd = expertd_sglang:register\n"
FAMILIES = ("qwen3_moe", "granitemoe")  # SGLang has others' attention or shared experts for GPUs only


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Python finds the plugin's entry point."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "expertd_sglang-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: expertd-sglang\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def generate(installed: Path, model: Path, dtype: str = "bfloat16", **settings: Any) -> tuple[int, Tensor]:
    """What tests/generating.py says. Raises RuntimeError with SGLang's messages if it fails."""
    folders = (SOURCES, installed, ROOT / "engines/sglang/src", ROOT / "client/src", ROOT / "engines/sglang")
    variables = {**os.environ, "PYTHONPATH": ":".join(map(str, folders)), "PYTHONDONTWRITEBYTECODE": "1"}
    if settings:
        variables["SGLANG_EXPERTD"] = json.dumps(settings)
    command = [PYTHON, "-m", "tests.generating", str(model), dtype]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-5000:])
    said = json.loads(done.stdout.splitlines()[-1])
    return said["expert_parameters"], torch.tensor(said["log_probabilities"], dtype=torch.float64)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_agree(family: str, installed: Path, tmp_path: Path) -> None:
    """With plain SGLang's as well as those do with float32."""
    model = tmp_path / family
    subprocess.run([PYTHON, CHECKPOINTS, model, family], check=True, capture_output=True)
    plain_count, plain = generate(installed, model)
    _, exact = generate(installed, model, "float32")
    with serving(model, tmp_path) as url:
        for transport in ("channel", "http"):
            count, got = generate(installed, model, url=url, transport=transport, max_tokens=16)
            assert count == 0 < plain_count
            assert distance(got, plain) <= distance(plain, exact)
