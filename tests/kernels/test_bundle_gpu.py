"""Binaries that were built without a GPU are those that a GPU uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expertd.kernels import jit
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.variants import VARIANTS

pytestmark = pytest.mark.gpu

_BUILD = """
import sys
from pathlib import Path
from expertd.kernels import jit
from expertd.kernels.backends.hopper.variants import VARIANTS
for _ in jit.build_all([variant.source for variant in VARIANTS], Path(sys.argv[1])):
    pass
"""


def test_a_bundle_from_a_machine_without_a_gpu_serves_every_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, empty = tmp_path / "built", tmp_path / "cache"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", jit.CACHE_DIR_VARIABLE: str(tmp_path / "no")}
    subprocess.run([sys.executable, "-c", _BUILD, str(bundle)], env=environment, check=True, timeout=280)
    monkeypatch.setattr("expertd.kernels.jit.cache.BUNDLE", bundle)
    monkeypatch.setenv(jit.CACHE_DIR_VARIABLE, str(empty))
    torch.zeros(1, device="cuda")

    before, kernels = jit.stats(), Kernels()
    for variant in VARIANTS:
        kernels.load(0, variant, jit.build(variant.source))

    assert jit.stats().compilations == before.compilations
    assert not empty.exists()
