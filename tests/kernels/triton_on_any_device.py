"""The Triton backend on a GPU, or interpreted where there is none."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from expertd.kernels.backends.triton.backend import TritonBackend
from expertd.kernels.backends.triton.targets import target_of

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

_HERE = target_of(torch.cuda.get_device_capability()) if ON_GPU else None
# Of the interpreted ones 80 decodes to float16, and 90 has short tiles on the narrow side.
KINDS = [80, 89, 90] if _HERE is None else [_HERE.capability]


class OnAnyDevice(TritonBackend):
    """Takes tensors of a CPU, for the interpreter."""

    capabilities = replace(TritonBackend.capabilities, device_type=None)


def _reduce_halves(operation: Any, given: tuple[Any]) -> list[Any]:
    """What a function makes of a tensor along an axis, of two halves at once.

    In place of the interpreter's own, which calls the function for two numbers at a time: for minutes.
    """
    (tensor,) = given
    axis, dtype = operation.axis, tensor.dtype
    data = tensor.handle.data
    while data.shape[axis] > 1:
        halves = np.split(data, 2, axis)
        data = operation.combine_fn.fn(*(operation.to_tensor(half, dtype) for half in halves)).handle.data
    return [operation.to_tensor(data if operation.keep_dims else data.squeeze(axis), dtype)]


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a function by another one.

    A launch replaces what kernels see of Triton's language. The interpreter does so again at each call,
    which only Triton's own functions need, once: they see another module.
    """
    if function.fn.__module__.startswith("triton."):
        _replace_language(function.fn)
    return function.rewrite()(*args, **kwargs)


if not ON_GPU and find_spec("triton"):
    from triton.runtime.interpreter import InterpretedFunction, ReduceOps, _patch_lang

    _replace_language = cache(_patch_lang)
    ReduceOps.generic_reduce = _reduce_halves
    InterpretedFunction.__call__ = _call
