"""Whole checkpoints of four bits in their publishers' files, served by a GPU as they are, and in FP8."""

from pathlib import Path

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.weight_format import WeightFormat
from tests.kernels.helpers import diff, fresh_generator
from tests.service.checkpoints.vendors import VENDORS, expected_rows, new_tokens, served, write

pytestmark = pytest.mark.gpu

MOST = 4e-3
"""For FP8 activations, whose error is 4.4% of the output (docs/numerics.md), and weights rounded to FP8."""
TAKEN = [
    (backend, name)
    for backend, can in BACKENDS.items()
    for name, vendor in VENDORS.items()
    if can.on_gpu and vendor.format in can.weight_formats
]


@pytest.mark.parametrize(("backend", "name"), TAKEN)
async def test_a_checkpoint_is_served_as_it_is(backend: str, name: str, tmp_path: Path) -> None:
    generator = fresh_generator()
    layer, tokens = write(tmp_path, name, generator), new_tokens(generator)
    expected, is_clear = expected_rows(name, layer, tokens)
    _, about, answer = await served(tmp_path, tokens, backend=backend)
    assert about["weight_format"] == VENDORS[name].format
    assert diff(answer[is_clear], expected[is_clear]) < MOST


@pytest.mark.parametrize("name", VENDORS)
async def test_hopper_serves_all_of_them_in_fp8(name: str, tmp_path: Path) -> None:
    """MXFP4 is exact in FP8: without shared experts, which have calls of their own, the bits are the same."""
    generator = fresh_generator()
    layer, tokens = write(tmp_path, name, generator), new_tokens(generator)
    expected, is_clear = expected_rows(name, layer, tokens)
    _, about, answer = await served(tmp_path, tokens, backend="hopper", requantize="always")
    assert about["weight_format"] == "FP8"
    assert diff(answer[is_clear], expected[is_clear]) < MOST
    if VENDORS[name].format == WeightFormat.MXFP4 and VENDORS[name].shared is None:
        _, _, as_it_is = await served(tmp_path, tokens, backend="hopper")
        assert torch.equal(answer, as_it_is)
