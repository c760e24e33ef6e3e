"""The Triton backend on a GPU, or interpreted where there is none."""

from dataclasses import replace

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
