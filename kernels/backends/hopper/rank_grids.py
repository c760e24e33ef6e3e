"""Grids of the kernels between the ranks of an expert-parallel layer; csrc/ranks.cuh has their protocol."""

import math
from collections.abc import Sequence

from expertd.kernels.backends.hopper.launch import OnStream, multiprocessors

_COLUMNS = 2048  # per CTA and step, of each kernel


def place_bytes(num_experts: int) -> int:
    """Shared memory for the places of all experts."""
    return 4 * num_experts


def parts(columns: int) -> int:
    """The steps of a row."""
    return math.ceil(columns / _COLUMNS)


def ctas(on: OnStream, num_sms: int | None, per_sm: int, tokens: Sequence[int], columns: int) -> int:
    """The CTAs of a launch: one for each step of each rank, or as many as run at once.

    per_sm  of the latter
    tokens  of each rank

    A multiple of the steps of a row, so that a CTA keeps to its columns.
    """
    each = parts(columns)
    most = per_sm * multiprocessors(on.device, num_sms) // each
    return min(max(1, len(tokens) * max(tokens)), max(1, most)) * each
