"""The free memory of GPUs, without a CUDA context on any of them. Does not import torch."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID


def free_gpu_bytes(devices: Sequence[int]) -> list[int | None]:
    """The free bytes of each of these GPUs, by CUDA's numbers in this process, as NVML knows them.

    None: there is no such GPU, or it cannot be asked, as without a driver or nvidia-ml-py. A context of this
    process, which others serve, would take some hundred MB of each GPU for as long as it runs.
    """
    try:
        import pynvml

        uuids = _uuids()
        pynvml.nvmlInit()
    except Exception:  # no package, or no driver
        return [None] * len(devices)
    try:
        return [_free(pynvml, uuids[device]) if device < len(uuids) else None for device in devices]
    finally:
        pynvml.nvmlShutdown()


def _uuids() -> list[UUID]:
    """Of the GPUs that CUDA has in this process, as CUDA_VISIBLE_DEVICES says, also of parts (MIG)."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        error, *values = result
        if int(error):
            raise RuntimeError(f"CUDA driver: expected success, got {error}")
        return values[0] if values else None

    checked(driver.cuInit(0))
    devices = [checked(driver.cuDeviceGet(number)) for number in range(checked(driver.cuDeviceGetCount()))]
    return [UUID(bytes=bytes(checked(driver.cuDeviceGetUuid(device)).bytes)) for device in devices]


def _free(nvml: Any, uuid: UUID) -> int | None:
    for kind in ("GPU", "MIG"):  # CUDA's numbers do not tell which
        with suppress(nvml.NVMLError):
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")).free)
    return None
