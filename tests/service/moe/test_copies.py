"""Copies by address, of which neighbors are merged, and those of the host, which are counted."""

import mmap

import numpy as np
import pytest
import torch

from expertd.service.device import Copies, device_of
from expertd.service.memory import Mapped
from expertd.service.moe.step.step_counts import HostCopies


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


@pytest.mark.parametrize("num_bytes", [0, 4, 64 * 1024, 64 * 1024 + 4, 300_000])
def test_bytes_are_copied_and_counted_whatever_their_format(num_bytes: int) -> None:
    copies = HostCopies()
    source = np.random.default_rng(num_bytes).integers(256, size=num_bytes, dtype=np.uint8)
    for given in (memoryview(source.tobytes()), source.view(np.float32).data):
        memory = bytearray(b"\x5a" * (num_bytes + 8))
        copies.copy(memoryview(memory)[4:-4], given)
        assert memory == b"\x5a" * 4 + source.tobytes() + b"\x5a" * 4
    assert copies.num_bytes == 2 * num_bytes
    assert copies.seconds > 0


@pytest.mark.parametrize("num_bytes", [8, 100_000])
def test_another_size_is_an_error(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"memoryview assignment|broadcast"):
        HostCopies().copy(memoryview(bytearray(num_bytes - 4)), memoryview(bytes(num_bytes)))
