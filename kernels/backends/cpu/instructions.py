"""What a CPU has to multiply with."""

import ctypes
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = 32
"""Columns of an item, see `kernel`."""
_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE = 158, 0x1023, 18  # of Linux on x86-64


@dataclass(frozen=True)
class Instructions:
    """What a CPU has.

    lanes      fp32 numbers of a vector
    registers  vectors
    has_bf16   AVX512-BF16
    has_tiles  AMX for bf16, and AVX512-BF16
    """

    lanes: int
    registers: int
    has_bf16: bool = False
    has_tiles: bool = False

    @property
    def pair(self) -> int:
        """Numbers of K that lie beside each other in a vector of weights."""
        return 2 if self.has_bf16 else 1

    @property
    def vectors(self) -> int:
        """Vectors of decoded weights in a step."""
        return COLUMNS // self.lanes

    @property
    def heights(self) -> Sequence[int]:
        """Rows multiplied at once: as many as there are registers for, then fewer, for the rest."""
        tallest = (self.registers - 4) // self.vectors
        return [tallest, *(height for height in (8, 4, 2, 1) if height < tallest)]


def instructions_of(features: Any) -> Instructions:
    """What this CPU has, by LLVM's names for its features."""
    if features.get("avx512f") and features.get("avx512bw"):
        has_bf16 = features.get("avx512bf16", False)
        return Instructions(
            16, 32, has_bf16, has_bf16 and features.get("amx-bf16", False) and may_use_tiles()
        )
    if features.get("avx2") and features.get("fma"):
        return Instructions(8, 16)
    return Instructions(4, 32 if platform.machine() == "aarch64" else 16)


def may_use_tiles() -> bool:
    """Ask the system for AMX, as every process that uses it must."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return not ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_STATE)
