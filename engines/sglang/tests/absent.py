"""Stand-ins for packages that SGLang imports and that are not there, most of them kernels for GPUs.

Where SGLang calls one, its answer is a mock, so that numbers that come out right were made without any.
"""

import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# SGLang works without these, and asks whether they are there.
_LEFT_ABSENT = {
    "aiter", "apex", "deep_ep", "flash_attn", "habana_frameworks", "intel_extension_for_pytorch", "kt_kernel",
    "mooncake", "numba", "sgl_kernel_npu", "torch_musa", "torch_npu", "torchaudio", "torchcodec", "vllm",
}  # fmt: skip


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=f"{self.__name__}.{name}"))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, and answers SGLang's own imports alone."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top = fullname.partition(".")[0]
        if top in _LEFT_ABSENT or top in sys.stdlib_module_names or top.startswith(("sglang", "expertd")):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if _asks() else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "orjson":  # reads SGLang's flags
            module.loads = json.loads  # type: ignore[attr-defined]


def _asks() -> bool:
    """Whether SGLang imports now."""
    frame: Any = sys._getframe(2)
    while frame and frame.f_globals["__name__"].startswith("importlib"):
        frame = frame.f_back
    return bool(frame) and frame.f_globals["__name__"].startswith("sglang")
