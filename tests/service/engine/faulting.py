"""A server on a GPU whose steps of 13 tokens fault: `python -m tests.service.engine.faulting`."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from expertd.service.engine.loading import LoadedLayers, load
from expertd.service.engine.steps import Runner, Step
from expertd.service.http.server import serve
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.model import Settings
from expertd.service.util.logs import configure_logging
from tests.service.apps import MODEL, tiny_settings

TOKENS = 13

# Stores to address 8, which nobody has.
_FAULT = b"""
.version 7.8
.target sm_90
.address_size 64
.visible .entry fault()
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    mov.u32 %r1, 1;
    mov.u64 %rd1, 8;
    st.global.u32 [%rd1], %r1;
    ret;
}
\0"""


def launch_fault() -> None:
    """Launch the kernel on the current stream. Raises RuntimeError if it cannot be launched."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"expected a kernel that faults, got {status}")
        return values[0] if values else None

    module = checked(driver.cuModuleLoadData(_FAULT))
    function = checked(driver.cuModuleGetFunction(module, b"fault"))
    stream = torch.cuda.current_stream().cuda_stream
    checked(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))


class FaultingRunner:
    """Runs steps as `runner` does, one with a request of TOKENS after a kernel that faults."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def validate(self, request: LayerRequest) -> None:
        self._runner.validate(request)

    def begin(self, requests: Sequence[LayerRequest]) -> Step:
        if any(request.num_tokens == TOKENS for request in requests):
            launch_fault()
        return self._runner.begin(requests)


def loader(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
    """As `load`, with runners that fault."""
    loaded = load(settings, cancelled)
    return replace(loaded, runners={name: FaultingRunner(runner) for name, runner in loaded.runners.items()})


if __name__ == "__main__":
    configure_logging("info")
    sys.exit(serve(tiny_settings(backend="hopper", port=0, models=[{**MODEL, "num_experts": 8}]), loader))
