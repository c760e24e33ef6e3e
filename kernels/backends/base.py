"""The interface every backend of the grouped GEMMs implements."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what was just done)."""


class Backend(ABC):
    """Computes the two grouped GEMMs; arguments arrive checked (see kernels/checks.py) and non-empty."""

    name: ClassVar[str]
    device_type: ClassVar[str | None] = None
    """The only kind of device ("cpu", "cuda") whose tensors are accepted; None: any."""

    def warm_up(self, progress: Progress | None = None) -> None:  # noqa: B027  (a backend may have nothing to do)
        """Do everything that would otherwise happen lazily on a first call, compilation above all."""

    @abstractmethod
    def contiguous(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        offsets: Tensor,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write out [M, N]: rows offsets[g]:offsets[g+1] of a [M, K] times b[g] [N, K] transposed."""

    @abstractmethod
    def masked(
        self,
        a: Tensor,
        a_scales: Tensor,
        b: Tensor,
        b_scales: Tensor,
        counts: Tensor,
        expected_m: int | None,
        out: Tensor,
        num_sms: int | None,
    ) -> None:
        """Write the first counts[g] rows of each out[g] [max_m, N]; never touch a row past them."""
