"""Grids of the kernels between the ranks of an expert-parallel layer; csrc/ranks.cuh has their protocol."""

import math
from collections.abc import Sequence

from expertd.kernels.backends.hopper.launch import multiprocessors
from expertd.kernels.backends.streams import OnStream

COLUMNS = 2048
"""The part of a token that a CTA handles at once, in most kernels."""


def place_bytes(num_experts: int) -> int:
    """Shared memory for the places of all experts."""
    return 4 * num_experts


def ctas(
    on: OnStream,
    num_sms: int | None,
    per_sm: int,
    tokens: Sequence[int],
    columns: int,
    columns_at_once: int = COLUMNS,
) -> int:
    """The CTAs of a launch: one for each part of a token and each rank, or as many as run at once.

    per_sm           of the latter
    tokens           of each rank
    columns_at_once  of a CTA

    A multiple of the parts, so that a CTA keeps to its columns.
    """
    each = math.ceil(columns / columns_at_once)
    max_ctas = per_sm * multiprocessors(on.device, num_sms) // each
    return min(max(1, len(tokens) * max(tokens)), max(1, max_ctas)) * each


def ctas_per_token(num_ctas: int, tokens: Sequence[int], columns: int, columns_at_once: int = COLUMNS) -> int:
    """The CTAs of a launch that share a token's columns, so that few have nothing to do."""
    each = num_ctas // math.ceil(columns / columns_at_once)
    return max(1, min(len(tokens), each // max(1, *tokens)))
