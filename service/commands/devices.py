"""Whether this machine has the devices that the settings need: `check` and `serve` ask before they listen."""

import os
from collections.abc import Set
from typing import TYPE_CHECKING

from expertd.backends import BACKENDS, Capabilities, with_joint_exchange
from expertd.service.util.files import temporary_directory
from expertd.weight_format import WeightFormat

if TYPE_CHECKING:
    from expertd.service.settings.model import Settings

_FOLDER_BYTES = 90  # a socket's path has at most 107 (unix(7)), and its name here 17: /symm_mem-4194304


def check_backend(settings: "Settings") -> str:
    """The backend and its device. Raises ValueError or RuntimeError if it cannot run, or GPUs are missing."""
    from expertd.kernels import resolve_backend
    from expertd.kernels.backends import why_on_cpu, why_reference

    _check_devices(settings)
    backend = resolve_backend(settings.backend, weight_formats=settings.weight_formats)
    if settings.devices is None:
        reasons = list[str | None]()
        if settings.backend == "auto" and not backend.capabilities.on_gpu:
            reasons += why_on_cpu(), why_reference(settings.weight_formats)
        because = "; ".join(filter(None, reasons))
        return f"{backend.name} on {backend.device}" + (f" ({because})" if because else "")
    if not backend.capabilities.joint_exchange:
        raise ValueError(f"devices: expected backend {with_joint_exchange()}, got {backend.name!r}")
    return f"{backend.name} on GPUs {settings.devices}"


def capabilities_of(
    settings: "Settings", weight_formats: Set[WeightFormat] = frozenset()
) -> Capabilities | None:
    """Those of the backend that will run; None if none can. Logs nothing, and opens no GPU that ranks use.

    weight_formats  what it has to take beside the models' own, if it is chosen by itself
    """
    import torch

    from expertd.kernels.backends import capabilities_here

    formats = settings.weight_formats | weight_formats
    if settings.devices is not None:
        if settings.backend != "auto":
            return BACKENDS[settings.backend] if BACKENDS[settings.backend].on_gpu else None
        joint = (can for can in BACKENDS.values() if can.joint_exchange)
        return next((can for can in joint if formats <= can.weight_formats), None)
    device = torch.device("cpu") if settings.num_ranks > 1 else None
    return capabilities_here(settings.backend, device, formats)


def check_partitions(settings: "Settings") -> str:
    """Compare the sizes with the GPU's SMs; how the driver rounds them is only known on creation.

    Raises ValueError if they do not fit, or RuntimeError without the backend.
    """
    from expertd.kernels import resolve_backend
    from expertd.service.device import device_of

    backend = resolve_backend(settings.backend, weight_formats=settings.weight_formats)
    requested = sum(settings.partitions.values())
    if not requested:
        return "none"
    if not backend.capabilities.partitions:
        raise ValueError(
            f"partitions: expected a backend whose device has SMs to partition, got {backend.name!r}"
        )
    total = device_of(backend.device).num_sms or 0
    if requested > total:
        raise ValueError(f"partitions: expected at most the {total} SMs of the GPU, got {requested}")
    return f"{requested} of {total} SMs"


def check_before_listening(settings: "Settings") -> None:
    """What can be said before anything is loaded, with a context only on a GPU that this process will use.

    Raises ValueError, RuntimeError or UnwritableError.
    """
    from expertd.kernels import resolve_backend
    from expertd.service.engine.memory_needs import check_expert_slots

    _check_devices(settings)
    check_sockets(settings)
    if settings.has_budget:
        check_expert_slots(settings, capabilities_of(settings))
    if settings.num_ranks == 1 and settings.backend != "auto":  # which is chosen, and logged, later
        resolve_backend(settings.backend)
    if settings.devices is None and settings.partitions:  # else the ranks look at them
        check_partitions(settings)


def check_sockets(settings: "Settings") -> None:
    """See that ranks on GPUs of one host can have the sockets that torch makes for them.

    Raises UnwritableError; ValueError if their paths would be too long.
    """
    if settings.devices is None or settings.nnodes > 1:
        return
    folder = temporary_directory("devices")
    if (length := len(os.fsencode(folder))) > _FOLDER_BYTES:
        expected = f"a path of at most {_FOLDER_BYTES} bytes of the folder for temporary files (TMPDIR)"
        raise ValueError(f"devices: expected {expected}, for sockets, got {length}: {folder}")


def _check_devices(settings: "Settings") -> None:
    """Raise ValueError if this machine lacks a GPU of `devices`. Opens none of them."""
    if settings.devices is None:
        return
    from expertd.service.device.cuda import num_gpus
    from expertd.service.settings.spans import numbers

    count = num_gpus()
    if count == 0:
        raise ValueError(f"devices: expected GPUs {settings.devices} of this machine, got none")
    if (last := max(numbers(settings.devices))) >= count:
        raise ValueError(f"devices: expected numbers below {count}, the GPUs of this machine, got {last}")
