"""The registry of backends: names, lazy construction and the choice made by "auto"."""

import logging
import threading
from collections.abc import Callable

import torch

from expertd.kernels.backends.base import Backend, Progress

__all__ = ["Backend", "Progress", "backend_names", "resolve_backend"]

logger = logging.getLogger(__name__)


def _hopper() -> Backend:
    reason = _why_not_hopper(None)
    if reason is not None:
        raise RuntimeError(f"backend 'hopper': expected a usable Hopper GPU, got {reason}")
    from expertd.kernels.backends.hopper.backend import HopperBackend

    return HopperBackend()


def _reference() -> Backend:
    from expertd.kernels.backends.reference.backend import ReferenceBackend

    return ReferenceBackend()


_FACTORIES: dict[str, Callable[[], Backend]] = {"hopper": _hopper, "reference": _reference}
_instances: dict[str, Backend] = {}
_auto_choices: dict[torch.device | None, str] = {}
_lock = threading.Lock()


def backend_names() -> tuple[str, ...]:
    """The names `resolve_backend` takes besides "auto"."""
    return tuple(_FACTORIES)


def resolve_backend(name: str = "auto", device: torch.device | str | None = None) -> Backend:
    """The backend called `name`, built on first use and shared afterwards.

    "auto" is "hopper" if `device` (None: the current CUDA device, if there is one) is a GPU of compute
    capability 9.0 and cuda.core can be imported, else "reference"; the choice is logged once per device.
    Raises ValueError for an unknown name, RuntimeError when "hopper" is asked for and cannot run.
    """
    if name == "auto":
        name = _auto(torch.device(device) if isinstance(device, str) else device)
    if name in _instances:  # without the lock: a grouped GEMM comes here on every call
        return _instances[name]
    if name not in _FACTORIES:
        raise ValueError(f"backend: expected one of {('auto', *_FACTORIES)}, got {name!r}")
    with _lock:
        if name not in _instances:
            _instances[name] = _FACTORIES[name]()
        return _instances[name]


def _auto(device: torch.device | None) -> str:
    if device not in _auto_choices:
        reason = _why_not_hopper(device)
        choice = "hopper" if reason is None else "reference"
        logger.info("backend auto: %s for device %s%s", choice, device, f" ({reason})" if reason else "")
        _auto_choices[device] = choice
    return _auto_choices[device]


def _why_not_hopper(device: torch.device | None) -> str | None:
    """None if the Hopper backend can run on `device`, else the reason it cannot."""
    if device is not None and device.type != "cuda":
        return f"a {device.type} device"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"a GPU of compute capability {capability[0]}.{capability[1]} instead of 9.0"
    try:
        import cuda.core  # noqa: F401
    except ImportError as error:
        return f"cuda.core not importable ({error})"
    return None
