"""How much memory for bodies and outputs the largest request takes, at most and alone."""

_BODIES = 4  # a body, a copy for the device if its tensors are not aligned, and twice its bytes in FP32
_ROUNDING_BYTES = 5 * 64 * 1024  # of the whole and of up to four blocks, to multiples of 64 KiB
_DEFAULT_BYTES = 1024 * 1024 * 1024


def needed_bytes(max_body_bytes: int, region_bytes: int, num_processes: int) -> int:
    """The memory with which every request can be answered in each of `num_processes`.

    region_bytes  of the largest tensors that are copied from regions, and of their output
    """
    return num_processes * (max(_BODIES * max_body_bytes, region_bytes) + _ROUNDING_BYTES)


def region_bytes(max_tokens: int, hidden_size: int, top_k: int) -> int:
    """The largest request whose tensors are in regions: FP32 in and out, INT64 and FP32 for its routing."""
    return max_tokens * (2 * 4 * hidden_size + (8 + 4) * top_k)


def default_bytes(needed: int) -> int:
    """The memory of a server that needs `needed`."""
    return max(_DEFAULT_BYTES, needed)
