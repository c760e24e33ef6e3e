"""Words that the GPU writes after a step, so that a caller sees its output before the host has noticed."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from expertd.service.moe.request import LayerRequest


class Signals:
    """Writes the signals of steps on one GPU; does nothing if the GPU cannot write them."""

    def __init__(self, device: torch.device) -> None:
        self._write: Any = None
        driver = _driver()
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        if driver.cuDeviceGetAttribute(attribute, device.index or 0)[1]:
            self._write = driver.cuStreamWriteValue64

    def enqueue(self, requests: Sequence[LayerRequest], stream: torch.cuda.Stream) -> None:
        """Write every request's signal once all that is enqueued on `stream` is done, and is visible."""
        if self._write is None:
            return
        for request in requests:
            signal = request.signal
            if signal is not None:
                # An error is one of the device, which the step reports.
                self._write(stream.cuda_stream, signal.address, signal.value, 0)


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver  # a CPU has neither

    return driver
