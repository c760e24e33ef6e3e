"""Finds backends by name, builds them on first use, and resolves "auto".

A backend is a folder here, named in `expertd.backends.BACKENDS`, whose package has two functions:
`why_not(device)` returns None if it can run on `device` (None: the current one), else the reason; `create()`
returns the backend. One that compiles for GPUs has two more: `architectures()`, for which it does, the
default first; `kernel_list(architecture)`, its kernels. One that is not the faster one everywhere has
`why_slower()`: why "auto" passes it over here; None: it does not.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from importlib import import_module
from typing import Any

import torch

from expertd.backends import BACKENDS, Capabilities
from expertd.kernels.backends.base import Backend, Progress
from expertd.kernels.backends.listing import KernelList
from expertd.kernels.backends.no_gpu import driver_version
from expertd.weight_format import WeightFormat

__all__ = [
    "Backend",
    "Progress",
    "architectures",
    "backend_for",
    "backend_names",
    "capabilities_here",
    "kernel_list",
    "resolve_backend",
    "why_not",
    "why_on_cpu",
    "why_reference",
]

logger = logging.getLogger(__name__)

_instances: dict[str, Backend] = {}
_auto_choices: dict[tuple[torch.device | None, frozenset[WeightFormat]], str] = {}
_lock = threading.Lock()


def backend_names() -> tuple[str, ...]:
    """The names that `resolve_backend` accepts besides "auto"."""
    return tuple(BACKENDS)


def resolve_backend(
    name: str = "auto",
    device: torch.device | str | None = None,
    weight_formats: AbstractSet[WeightFormat] = frozenset(),
) -> Backend:
    """The backend called `name`, built on first use and shared afterwards.

    "auto" is the first of `backend_names` that can run on `device` (None: the current GPU, if there is one),
    takes weights of these formats, and is not passed over for a faster one. The choice is logged once. Raises
    ValueError for an unknown name, RuntimeError for a backend that is requested by name and cannot run.
    """
    if name == "auto":
        special = frozenset(weight_formats - Capabilities().weight_formats)  # which not every backend takes
        name = _auto(torch.device(device) if isinstance(device, str) else device, special)
    if name in _instances:  # without the lock: every grouped GEMM call comes here
        return _instances[name]
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {('auto', *BACKENDS)}, got {name!r}")
    with _lock:
        if name not in _instances:
            reason = _package(name).why_not(None)
            if reason is not None:
                raise RuntimeError(f"backend {name!r}: expected a device that it can run on, got {reason}")
            _instances[name] = _package(name).create()
        return _instances[name]


def why_not(name: str, device: torch.device | None = None) -> str | None:
    """Why the backend `name` cannot run on `device` (None: the current GPU); None if it can."""
    reason: str | None = _package(name).why_not(device)
    return reason


def why_on_cpu() -> str | None:
    """Why no backend of GPUs can run, if one was probably intended: with a PyTorch for CUDA, or a driver."""
    if torch.version.cuda is None and driver_version() is None:
        return None
    reasons = {name: why_not(name) for name, can in BACKENDS.items() if can.on_gpu}
    return None if None in reasons.values() else _listed(reasons)


def why_reference(weight_formats: AbstractSet[WeightFormat] = frozenset()) -> str | None:
    """Why "auto" takes no backend that is made for this CPU; None if it takes one."""
    names = [name for name, can in BACKENDS.items() if can.device_type == "cpu"]
    reasons = {name: _why_not_auto(name, None, weight_formats) for name in names}
    return None if None in reasons.values() else _listed(reasons)


def capabilities_here(
    name: str, device: torch.device | None = None, weight_formats: AbstractSet[WeightFormat] = frozenset()
) -> Capabilities | None:
    """Those of what `resolve_backend` would return; None if it would raise. Logs nothing."""
    if name == "auto":
        passing = (each for each in BACKENDS if _why_not_auto(each, device, weight_formats) is None)
        return next((BACKENDS[each] for each in passing), None)
    return BACKENDS[name] if why_not(name, device) is None else None


def architectures(name: str) -> Sequence[str]:
    """What the backend `name`, one that compiles, does so for, the default first; needs no GPU."""
    named: Sequence[str] = _package(name).architectures()
    return named


def kernel_list(name: str, architecture: str) -> KernelList:
    """The kernels that the backend `name` compiles just in time, for one of its architectures."""
    kernels: KernelList = _package(name).kernel_list(architecture)
    return kernels


def backend_for(backend: Backend | str | None, tensor: torch.Tensor, name: str) -> Backend:
    """The backend for `tensor`, an argument called `name`; ValueError if it does not accept that device."""
    if not isinstance(backend, Backend):
        backend = resolve_backend("auto" if backend is None else backend, tensor.device)
    device_type = backend.capabilities.device_type
    if device_type not in (None, tensor.device.type):
        raise ValueError(
            f"{name} device: expected {device_type} for backend {backend.name!r}, got {tensor.device}"
        )
    return backend


def _auto(device: torch.device | None, weight_formats: frozenset[WeightFormat]) -> str:
    choice = device, weight_formats
    if choice not in _auto_choices:
        reasons: dict[str, str] = {}
        for name in BACKENDS:
            reason = _why_not_auto(name, device, weight_formats)
            if reason is None:
                break
            reasons[name] = reason
        else:
            raise RuntimeError(f"backend auto: expected one that can run, got {_listed(reasons)}")
        because = f" ({_listed(reasons)})" if reasons else ""
        on = "" if device is None else f" for device {device}"
        logger.info("backend auto: %s%s%s", name, on, because)
        _auto_choices[choice] = name
    return _auto_choices[choice]


def _why_not_auto(
    name: str, device: torch.device | None, weight_formats: AbstractSet[WeightFormat]
) -> str | None:
    """Why "auto" passes the backend `name` over; None if it does not."""
    if (reason := why_not(name, device)) is not None:
        return reason
    if missing := weight_formats - BACKENDS[name].weight_formats:
        return f"no weights of {' or '.join(sorted(missing))}"
    why_slower: Callable[[], str | None] = getattr(_package(name), "why_slower", lambda: None)
    return why_slower()


def _listed(reasons: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _package(name: str) -> Any:
    return import_module(f"{__name__}.{name}")
