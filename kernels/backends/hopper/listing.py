"""The Hopper backend's kernels, for `expertd kernels`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from expertd.kernels import jit
from expertd.kernels.backends.hopper import variants
from expertd.kernels.backends.listing import Compiled, KernelList


class HopperKernels(KernelList):
    """All variants of kernels/csrc."""

    def __init__(self) -> None:
        self._variants = {variant.source.name: variant for variant in variants.VARIANTS}

    @property
    def names(self) -> Sequence[str]:
        """See `KernelList`."""
        return tuple(self._variants)

    def shared_bytes(self, name: str, num_groups: int) -> int:
        """See `KernelList`."""
        return self._variants[name].shared_bytes(num_groups)

    def find(self, name: str) -> Compiled | None:
        """See `KernelList`."""
        binary = jit.find(self._variants[name].source)
        return None if binary is None else _compiled(binary)

    def build(self, name: str) -> Compiled:
        """See `KernelList`."""
        return _compiled(jit.build(self._variants[name].source))

    def build_all(self, directory: Path | None = None) -> Iterator[tuple[str, Compiled]]:
        """See `KernelList`."""
        sources = [variant.source for variant in self._variants.values()]
        for source, binary in jit.build_all(sources, directory):
            yield source.name, _compiled(binary)

    def source(self, name: str) -> str:
        """See `KernelList`."""
        return self._variants[name].source.text()

    def ptx(self, name: str) -> str:
        """See `KernelList`."""
        return jit.to_ptx(self._variants[name].source)


def _compiled(binary: jit.Binary) -> Compiled:
    usage = binary.usage
    spills = usage.spill_store_bytes + usage.spill_load_bytes
    return Compiled(binary.cubin, usage.registers, usage.stack_bytes, spills, binary.seconds, binary.cached)
