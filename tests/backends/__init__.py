"""Registers a further backend, and a device whose steps go the way of a GPU's in the host's memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from expertd.backends import BACKENDS, Capabilities
from expertd.kernels import backends
from expertd.service import device
from expertd.service.device.cpu import CpuDevice


class CopyingDevice(CpuDevice):
    """Has streams, copies and memory of its own, as a GPU has, all of which are the host's."""

    is_host = False
    name = "copying"

    def memory(self) -> tuple[int, int]:
        return 0, 1 << 30


HOST = Capabilities(weight_bytes=1)
GPU = Capabilities(device_type="cuda", weight_bytes=1)
KINDS = [
    pytest.param((HOST, CpuDevice), id="host"),
    pytest.param((HOST, CopyingDevice), id="copying"),
    pytest.param((GPU, CpuDevice), id="gpu", marks=pytest.mark.gpu),
]
"""The backend's capabilities, and what stands for the CPU."""


@contextmanager
def plain_backend(kind: tuple[Capabilities, type[CpuDevice]]) -> Iterator[None]:
    """Have the backend "plain": its folder, and its line in the registry."""
    capabilities, cpu = kind
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backends, "__path__", [*backends.__path__, str(Path(__file__).parent)])
        patched.setattr(backends, "_instances", {})
        patched.setitem(BACKENDS, "plain", capabilities)
        patched.setitem(device.DEVICES, "cpu", cpu)
        device._device_of.cache_clear()
        yield
    device._device_of.cache_clear()
