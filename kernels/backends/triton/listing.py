"""The Triton backend's kernels, for `expertd kernels`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from expertd.kernels.backends.listing import Compiled, KernelList
from expertd.kernels.backends.triton import build
from expertd.kernels.backends.triton.targets import Target
from expertd.kernels.backends.triton.variants import variants_for


class TritonKernels(KernelList):
    """All variants for a target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._variants = {variant.name: variant for variant in variants_for(target)}

    @property
    def names(self) -> Sequence[str]:
        """See `KernelList`."""
        return tuple(self._variants)

    def shared_bytes(self, name: str, num_groups: int) -> int | None:
        """See `KernelList`; whatever the number of groups is."""
        binary = build.find(self._variants[name], self._target)
        return None if binary is None else binary.shared_bytes

    def find(self, name: str) -> Compiled | None:
        """See `KernelList`."""
        binary = build.find(self._variants[name], self._target)
        return None if binary is None else _compiled(binary)

    def build(self, name: str) -> Compiled:
        """See `KernelList`."""
        return _compiled(build.build(self._variants[name], self._target))

    def build_all(self, directory: Path | None = None) -> Iterator[tuple[str, Compiled]]:
        """See `KernelList`."""
        for variant, binary in build.build_all(list(self._variants.values()), self._target, directory):
            yield variant.name, _compiled(binary)

    def source(self, name: str) -> str:
        """The module that has the kernel, below what it is compiled with."""
        variant = self._variants[name]
        return f"# {variant}\n{build.source_of(variant)}"

    def ptx(self, name: str) -> str:
        """See `KernelList`."""
        return str(build.run_compiler(self._variants[name], self._target).asm["ptx"])


def _compiled(binary: build.TritonBinary) -> Compiled:
    return Compiled(binary.cubin, binary.registers, binary.stack_bytes, None, binary.seconds, binary.cached)
