"""The kernels of a backend, for `expertd kernels`: their names, their texts, and what is compiled of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple


class Compiled(NamedTuple):
    """A compiled kernel.

    registers    of a thread
    stack_bytes  of a thread
    spill_bytes  of a thread, stored and loaded; None: the compiler does not say
    seconds      to compile it
    cached       whether it came from disk
    """

    cubin: bytes
    registers: int
    stack_bytes: int
    spill_bytes: int | None
    seconds: float
    cached: bool


class KernelList(ABC):
    """All kernels of a backend for one architecture; needs no GPU.

    What compiles raises CompileError if the compiler rejects a kernel, and CompilerMissingError.
    """

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """In the order in which they are listed."""

    @abstractmethod
    def shared_bytes(self, name: str, num_groups: int) -> int | None:
        """Dynamic shared memory of a CTA; None: only known of a compiled kernel."""

    @abstractmethod
    def find(self, name: str) -> Compiled | None:
        """The kernel, if the cache or the bundle has it; never compiles. Raises CompilerMissingError."""

    @abstractmethod
    def build(self, name: str) -> Compiled:
        """The kernel from the cache or the bundle, else compiled and stored."""

    @abstractmethod
    def build_all(self, directory: Path | None = None) -> Iterator[tuple[str, Compiled]]:
        """Build all, in parallel; with `directory`, from there alone, else compiled and stored there."""

    @abstractmethod
    def source(self, name: str) -> str:
        """The text that is compiled."""

    @abstractmethod
    def ptx(self, name: str) -> str:
        """The kernel's PTX."""
