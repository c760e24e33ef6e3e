"""Copies by address: neighbors are merged, and nothing is copied to itself."""

import pytest
import torch

from expertd.service.moe.copies import Copies


@pytest.mark.parametrize(
    ("added", "count"),
    [
        ([(100, 500, 8), (108, 508, 4)], 1),
        ([(100, 500, 8), (108, 509, 4)], 2),
        ([(100, 500, 8), (109, 508, 4)], 2),
        ([(108, 508, 4), (100, 500, 8)], 2),
        ([(100, 100, 8), (200, 300, 0)], 0),
    ],
)
def test_neighbors_are_merged(added: list[tuple[int, int, int]], count: int) -> None:
    copies = Copies()
    for copy in added:
        copies.add(*copy)
    assert len(copies) == count


@pytest.mark.gpu
def test_every_direction() -> None:
    source = torch.randint(256, (1000,), dtype=torch.uint8).pin_memory()
    first, second = (torch.zeros(1000, dtype=torch.uint8, device="cuda") for _ in range(2))
    back = torch.zeros(1000, dtype=torch.uint8).pin_memory()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    for to, origin in ((first, source), (second, first), (back, second)):
        copies = Copies()
        copies.add(to.data_ptr(), origin.data_ptr(), 300)
        copies.add(to.data_ptr() + 300, origin.data_ptr() + 300, 500)
        copies.enqueue(stream)
    stream.synchronize()
    assert torch.equal(back[:800], source[:800])
    assert not back[800:].any()
