"""A table of where the rows of a step's requests lie, which kernels read from host memory.

The addresses in a CUDA graph are fixed when it is captured. The rows of requests lie elsewhere in every step,
so a graph reads their addresses from a table, whose own address is fixed.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

MAX_REQUESTS = 256
MAX_GIVEN_TOP_K = 256  # of routing that requests supply: a thread gathers each of a token's slots
_HEADER = struct.Struct("<IIII")
_REQUEST = struct.Struct("<QQQQIIII")
DATATYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class RequestRows(NamedTuple):
    """One request: its number of tokens, and the addresses of its rows.

    Each address can be of pinned host memory, or of memory on a GPU that the device can access.

    hidden_states  bf16 [num_tokens, H], 16-byte aligned
    out            [num_tokens, H] of `out_dtype` (bfloat16, float16 or float32) to write, 16-byte aligned
    topk_ids       [num_tokens, top_k] of int32, or of int64 if `has_int64_ids`; 0: the layer routes
    topk_weights   fp32 [num_tokens, top_k]
    """

    num_tokens: int
    hidden_states: int
    out: int
    out_dtype: torch.dtype
    topk_ids: int = 0
    topk_weights: int = 0
    has_int64_ids: bool = False


class RequestTable:
    """The requests of the next step, at most 256, with the layout of csrc/request_table.cuh.

    device  of the memory, which kernels write; None: pinned memory of the host, which `write` does
    """

    def __init__(self, device: torch.device | None = None) -> None:
        num_bytes = _HEADER.size + MAX_REQUESTS * _REQUEST.size
        if device is not None:
            self._tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        else:
            self._tensor = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._bytes = memoryview(self._tensor.numpy())  # type: ignore[arg-type]
        self.end_token = self._tensor[:4].view(torch.int32)
        """int32 [1], the number of tokens; see `Backend.route`."""

    def clear(self) -> None:
        """Have no requests, by torch's current stream, if the memory is the device's."""
        self._tensor.zero_()

    @property
    def address(self) -> int:
        """For launches."""
        return self._tensor.data_ptr()

    def write(self, requests: Sequence[RequestRows]) -> None:
        """Replace the table's contents. No launch that reads them may be running.

        Raises ValueError (name, expected, got) for more than 256 requests, and changes nothing.
        """
        if len(requests) > MAX_REQUESTS:
            raise ValueError(f"requests: expected at most {MAX_REQUESTS}, got {len(requests)}")
        token, place = 0, _HEADER.size
        for request in requests:
            end = token + request.num_tokens
            _REQUEST.pack_into(
                self._bytes, place,
                request.hidden_states, request.topk_ids, request.topk_weights, request.out,
                token, end, DATATYPES[request.out_dtype], request.has_int64_ids,
            )  # fmt: skip
            token = end
            place += _REQUEST.size
        _HEADER.pack_into(self._bytes, 0, token, len(requests), 0, 0)

    def only_request(self) -> bytes:
        """The contents of a table with one request, for `restore`."""
        return bytes(self._bytes[: _HEADER.size + _REQUEST.size])

    def restore(self, contents: bytes) -> None:
        """Write what `only_request` returned. No launch that reads it may be running."""
        self._bytes[: len(contents)] = contents
