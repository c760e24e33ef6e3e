"""Memory that the server shares with one caller: a file without a name, which nobody can shrink."""

import fcntl
import mmap
import os
from typing import Protocol

import numpy as np

from expertd.service.memory import Mapped, Register, Span, nothing_to_register

# Neither side can change the size, so no access by this process ends in SIGBUS.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class DataRegion(Protocol):
    """The data region of a channel: shared host memory, or memory of a GPU that the caller has exported."""

    @property
    def span(self) -> Span: ...

    def close(self) -> None:
        """End the device's access; no step uses the region any more."""


class SealedMemory:
    """`num_bytes` of zeros, registered with the device, for as long as a span or a view of it exists."""

    def __init__(self, name: str, num_bytes: int, register: Register = nothing_to_register) -> None:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(descriptor, num_bytes)
            address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
            self._unregister = register(Mapped(address, num_bytes, descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        # The owner is the mapping, not this object: a circle of references would keep the memory for long.
        self.span = Span(address, num_bytes, None, memoryview(mapped), mapped)

    @property
    def view(self) -> memoryview:
        """The bytes, writable."""
        assert self.span.view is not None
        return self.span.view

    def take_descriptor(self) -> int:
        """The file, to send to the caller; the receiver of this number closes it."""
        descriptor, self._descriptor = self._descriptor, None
        assert descriptor is not None, "a channel is claimed once"
        return descriptor

    def close(self) -> None:
        """Unregister the memory. It is unmapped once nothing refers to it."""
        self._unregister()
        if self._descriptor is not None:
            os.close(self.take_descriptor())
