"""The GPUs that kernels are compiled for, and what differs between them."""

from dataclasses import dataclass

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    capability    ten times the compute capability
    shared_bytes  of a CTA, at most
    """

    capability: int
    shared_bytes: int

    @property
    def fp8(self) -> bool:
        """Whether its tensor cores take e4m3; others get float16, which holds every e4m3 number."""
        return self.capability >= 89

    @property
    def wide(self) -> bool:
        """Whether its tensor cores want 64 rows on their larger side, like Hopper's (wgmma).

        Instructions for fewer rows exist, but need not round as those do.
        """
        return self.capability == 90

    @property
    def large(self) -> bool:
        """Whether its SMs have shared memory for a deep pipeline."""
        return self.shared_bytes > 128 * _KIB


TARGETS = {
    target.capability: target
    for target in (
        Target(80, 163 * _KIB),
        Target(86, 99 * _KIB),
        Target(89, 99 * _KIB),
        Target(90, 227 * _KIB),
        Target(120, 99 * _KIB),
        Target(121, 99 * _KIB),
    )
}


def target_of(capability: tuple[int, int]) -> Target | None:
    """What to compile for, by a GPU's compute capability; None: nothing would run there.

    Binaries for 8.x run on GPUs of higher 8.x; later ones use what only their own GPUs have.
    """
    major, minor = capability
    if major == 8:
        return TARGETS[max(each for each in (80, 86, 89) if each <= 80 + minor)]
    return TARGETS.get(10 * major + minor)
