"""Devices: what the service asks of them (`base`), and the kinds there are."""

import functools

import torch

from expertd.service.device.base import Copies, Device, Event, Graph, GraphPool, Stream
from expertd.service.device.cpu import CpuDevice
from expertd.service.device.cuda import CudaDevice

__all__ = ["Copies", "Device", "Event", "Graph", "GraphPool", "Stream", "device_of"]

DEVICES: dict[str, type[Device]] = {"cpu": CpuDevice, "cuda": CudaDevice}
"""By torch's type of a device."""


def device_of(tensors: torch.device | str) -> Device:
    """The device on which torch has these tensors; without a number, the current one of its type."""
    tensors = torch.device(tensors)
    if tensors.type != "cpu" and tensors.index is None:
        tensors = torch.device(tensors.type, torch.get_device_module(tensors.type).current_device())
    return _device_of(tensors)


@functools.cache
def _device_of(tensors: torch.device) -> Device:
    return DEVICES[tensors.type](tensors)
