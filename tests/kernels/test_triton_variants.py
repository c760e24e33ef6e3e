"""Every variant of the Triton backend compiles for every target, without a GPU, and fits its SMs."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from expertd.kernels import jit
from expertd.kernels.backends.triton.targets import TARGETS
from expertd.kernels.backends.triton.variants import variants_for
from tests.paths import ROOT

if TYPE_CHECKING:
    from tests.kernels.triton_compilations import Compiled

pytest.importorskip("triton", reason="needs Triton")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]  # compiling takes two minutes on two idle cores

REGISTERS_OF_AN_SM = 65_536
CAPABILITIES = (80, 86, 89, 90, 120)
STACK_BYTES = (
    128  # a thread's, at most: some of the tallest tiles keep a few values there, by Triton's version
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> "list[Compiled]":
    """All of them, by two processes."""
    from tests.kernels.triton_compilations import Compiled

    folder = str(tmp_path_factory.mktemp("cache"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", jit.CACHE_DIR_VARIABLE: folder}

    def compile_for(*capabilities: int) -> str:
        command = [sys.executable, "-m", "tests.kernels.triton_compilations", *map(str, capabilities)]
        made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return made.stdout

    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(compile_for, *each) for each in (CAPABILITIES[::2], CAPABILITIES[1::2])]
        return [Compiled(**json.loads(line)) for part in parts for line in part.result().splitlines()]


def test_every_variant_compiles_and_fits_an_sm(compiled: "list[Compiled]") -> None:
    assert {(each.capability, each.name) for each in compiled} == {
        (capability, variant.name)
        for capability in CAPABILITIES
        for variant in variants_for(TARGETS[capability])
    }
    for each in compiled:
        assert each.registers * each.threads <= REGISTERS_OF_AN_SM, each
        assert each.shared_bytes <= TARGETS[each.capability].shared_bytes, each
        assert each.stack_bytes <= STACK_BYTES, each
        assert each.scratch_bytes == 0, each


def test_gemms_of_a_target_have_one_kind_of_instruction(compiled: "list[Compiled]") -> None:
    """With others, tiles might round differently."""
    for each in compiled:
        kinds = {name[: name.index("k")] for name in each.instructions}
        if not re.search("contiguous|masked|gated|router_logits", each.name):
            assert not kinds, each
            continue
        has_four_bits = "4_" in each.name
        dtype = "e4m3.e4m3" if each.capability >= 89 and not has_four_bits else "f16.f16"
        if each.name == "router_logits":
            dtype = "bf16.bf16"
        assert all(dtype in name for name in each.instructions), each
        if each.capability == 90:
            assert all("wgmma" in name for name in kinds), each
            assert kinds, each
        else:
            assert kinds == {"mma.sync.aligned.m16n8"}, each


def test_kernels_take_what_they_are_given(compiled: "list[Compiled]") -> None:
    """Behind a variant's arguments Triton has pointers to memory that these kernels do not need."""
    assert {each.unused for each in compiled} <= {0, 1, 2}
