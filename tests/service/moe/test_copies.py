"""Copies by address: neighbors are merged, and nothing is copied to itself."""

import mmap

import pytest
import torch

from expertd.service.device import Copies, device_of
from expertd.service.memory import Mapped


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
    copies, owner = Copies(), object()
    for copy in added:
        copies.add(*copy, owner)
    assert len(copies) == count


@pytest.mark.parametrize("owners", [(object(), object()), (None, None), (object(), None)])
def test_neighbors_in_other_allocations_are_not_merged(owners: tuple[object, object]) -> None:
    copies = Copies()
    copies.add(100, 500, 8, owners[0])
    copies.add(108, 508, 4, owners[1])
    assert len(copies) == 2


@pytest.mark.gpu
def test_every_direction() -> None:
    source = torch.randint(256, (1000,), dtype=torch.uint8).pin_memory()
    first, second = (torch.zeros(1000, dtype=torch.uint8, device="cuda") for _ in range(2))
    back = torch.zeros(1000, dtype=torch.uint8).pin_memory()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    for to, origin in ((first, source), (second, first), (back, second)):
        copies = Copies()
        copies.add(to.data_ptr(), origin.data_ptr(), 300, origin)
        copies.add(to.data_ptr() + 300, origin.data_ptr() + 300, 500, origin)
        device_of("cuda").copy(copies, stream)
    stream.synchronize()
    assert torch.equal(back[:800], source[:800])
    assert not back[800:].any()


@pytest.mark.gpu
def test_neighbors_that_are_registered_apart() -> None:
    size, pages = mmap.PAGESIZE, mmap.mmap(-1, 2 * mmap.PAGESIZE)
    source = torch.frombuffer(pages, dtype=torch.uint8)
    source.random_(256)
    copied = torch.zeros(2 * size, dtype=torch.uint8, device="cuda")
    unregister = [
        device_of(copied.device).register(Mapped(source.data_ptr() + start, size, -1)) for start in (0, size)
    ]
    copies, stream = Copies(), torch.cuda.current_stream()
    for start in (0, size):
        copies.add(copied.data_ptr() + start, source.data_ptr() + start, size, object())
    device_of("cuda").copy(copies, stream)
    stream.synchronize()
    assert torch.equal(copied.cpu(), source)
    for end in unregister:
        end()
