"""A model that does not fit in memory is refused with one sentence."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.service.device import device_of
from expertd.service.moe.needs import needs_of, weights_bytes
from expertd.service.moe.out_of_memory import in_one_sentence
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.service.apps import MODEL, serving, tiny_settings

REFERENCE = BACKENDS["reference"]

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=4, top_k=2, num_shared_experts=1)
CPU = device_of("cpu")
NEEDS = needs_of(SHAPE, 16, REFERENCE)


def test_the_bytes_of_weights() -> None:
    weights = random_weights(SHAPE, 0, "cpu")
    tensors = (weights.gate_up.data, weights.gate_up.scales, weights.down.data, weights.down.scales)
    # A router's bytes are those of float32, which is the widest that it may have.
    router = weights.router.numel() * 4
    assert weights_bytes(SHAPE) == router + sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(2**60, dtype=torch.uint8),
        lambda: torch.empty((2**62, 2**62)),
        lambda: torch.empty(2**62, dtype=torch.float64),
        lambda: _raise(torch.OutOfMemoryError("CUDA out of memory")),
        lambda: _raise(MemoryError()),
    ],
)
def test_every_error_of_an_allocation_says_what_was_needed(fail: Callable[[], object]) -> None:
    expected = rf"model a: expected {re.escape(str(NEEDS))} of free memory, got \d+\.\d MB"
    with pytest.raises(MemoryError, match=f"^{expected}$"), in_one_sentence("a", NEEDS, CPU):
        fail()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^a kernel failed$"), in_one_sentence("a", NEEDS, CPU):
        raise RuntimeError("a kernel failed")


async def test_a_server_logs_the_sentence_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    # More than any address space, whatever the system lets a process allocate.
    model: dict[str, Any] = {**MODEL, "hidden_size": 128 << 40}
    async with serving(tiny_settings({"max_body_bytes": 1 << 60}, models=[model])) as server:
        assert server.app.engine.loaded is None
    (record,) = [record for record in caplog.records if record.message.startswith("loading failed")]
    assert re.search(r"model tiny: expected \d+\.\d MB \(weights .*\) of free memory, got", record.message)
    assert not record.exc_info


@pytest.mark.gpu
def test_a_full_gpu_is_reported_likewise() -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(MemoryError, match=r"^model a: expected .*, got \d+\.\d MB$"):  # noqa: SIM117
        with in_one_sentence("a", NEEDS, device_of(device)):
            torch.empty(2**50, dtype=torch.uint8, device=device)


def _raise(error: Exception) -> None:
    raise error
