"""What the host copies between requests and the memory of steps, and its count."""

import numpy as np
import pytest

from expertd.service.moe.step.step_counts import HostCopies


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
