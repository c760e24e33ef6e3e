"""Launches csrc/scatter_rows.cu: takes a step's output rows to its requests, or device calls' callers."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source, no_shared_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.device_calls import CallTable
from expertd.kernels.jit import Variant
from expertd.kernels.request_table import RequestTable

_THREADS = 256

VARIANT = Variant(named_source("scatter_rows", CALLS=0), _THREADS, no_shared_bytes)
CALLS = Variant(named_source("scatter_rows", "calls", CALLS=1), _THREADS, no_shared_bytes)


def scatter_rows(kernels: Kernels, on: OnStream, rows: Tensor, table: RequestTable) -> None:
    """Write rows fp32 [T, H] to the requests of `table`."""
    num_tokens, h = rows.shape
    kernels.launch(on, VARIANT, Grid(num_tokens), table.address, np.int32(h), rows)


def answer_calls(kernels: Kernels, on: OnStream, rows: Tensor, calls: CallTable) -> None:
    """Write rows fp32 [T, H] to the callers of a step, and answer them."""
    num_tokens, h = rows.shape
    kernels.launch(
        on, CALLS, Grid(num_tokens), calls.requests.address, np.int32(h), calls.step.data_ptr(), rows
    )
