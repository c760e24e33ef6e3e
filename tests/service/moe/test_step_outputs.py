"""Where a step's outputs go on their way from the GPU; no GPU is needed to say so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.service.device import Copies
from expertd.service.memory import Span
from expertd.service.moe.step.batch import Batch
from expertd.service.moe.step.device_step import DeviceSteps
from tests.service.moe.requests import as_bytes, layer_request

WIDTH = 128


def in_place(tensor: torch.Tensor) -> Span:
    data = tensor.view(torch.uint8).view(-1)
    return Span(data.data_ptr(), data.numel(), None, memoryview(data.numpy()), data)  # type: ignore[arg-type]


class Pinned:
    """Counts what is taken of the host's pinned memory."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        self.taken.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("outputs", "taken"),
    [
        ([("BF16", True), ("FP32", True)], 0),
        ([("BF16", False)], 3 * WIDTH * 2),
        ([("FP16", False), ("FP32", True), ("FP32", False), ("BF16", False)], 3 * WIDTH * (2 + 4 + 2)),
    ],
)
def test_pinned_memory_is_taken_for_outputs_without_a_place_and_for_no_more(
    outputs: list[tuple[str, bool]], taken: int
) -> None:
    tokens = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    requests = [
        layer_request(tokens, "BF16", None, as_bytes, datatype, in_place if has_place else None)
        for datatype, has_place in outputs
    ]
    steps: Any = DeviceSteps(None, None, None, None)  # type: ignore[arg-type]
    slot, copies = SimpleNamespace(host_out=Pinned(), kept=[]), Copies()
    found = steps._outputs(Batch(requests), slot, torch.zeros(3 * len(requests), WIDTH), copies)
    assert slot.host_out.taken == [taken]
    own = [output for output in found if isinstance(output, torch.Tensor)]
    sizes = [3 * WIDTH * (4 if datatype == "FP32" else 2) for datatype, has_place in outputs if not has_place]
    assert [output.numel() for output in own] == sizes
    starts = [output.data_ptr() for output in own]
    assert [start - starts[0] for start in starts] == [sum(sizes[:place]) for place in range(len(sizes))]
    assert [to for to, _, _ in copies._copies] == [
        output.data_ptr() if isinstance(output, torch.Tensor) else output.address for output in found
    ]
