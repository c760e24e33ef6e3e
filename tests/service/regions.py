"""Regions of shared memory over HTTP, and a "GPU" whose memory is the host's."""

import base64
import ctypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from expertd.service.engine.loading import LoadedLayers, Loader
from expertd.service.memory import Buffer, DeviceMemory, Mapped, Span, Unregister
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult
from expertd.service.settings.model import Settings
from tests.service.apps import HIDDEN, Serving, tiny_settings
from tests.service.runners import EchoRunner
from tests.service.shm import ShmFile, shm_file

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
HANDLE = bytes(range(64))
ROW = 4 * HIDDEN


def enabled(limits: dict[str, float] | None = None, **changes: Any) -> Settings:
    """Settings of `tiny_settings` that allow shared memory."""
    settings = tiny_settings(limits)
    allowed = settings.shared_memory.model_copy(update={"enabled": True, **changes})
    return settings.model_copy(update={"shared_memory": allowed})


class AddressRunner(EchoRunner):
    """Reads and writes spans by address, as a device does, and doubles the hidden states."""

    def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
        result = super()._run(
            [
                replace(request, hidden_states=bytes_of(request.hidden_states), output=None)
                for request in requests
            ]
        )
        outputs: list[OutputMemory] = []
        for request in requests:
            doubled = (2 * np.frombuffer(bytes_of(request.hidden_states), np.float32)).tobytes()
            if request.output is None:
                outputs.append(doubled)
            else:
                assert request.output.num_bytes == len(doubled)
                ctypes.memmove(request.output.address, doubled, len(doubled))
                outputs.append(request.output)
        return replace(result, outputs=outputs)


def bytes_of(memory: Buffer | Span) -> bytes:
    """What lies in memory, read as a device reads it."""
    return ctypes.string_at(memory.address, memory.num_bytes) if isinstance(memory, Span) else bytes(memory)


@dataclass
class Device:
    """A "GPU" whose memory is the host's: what is registered and open, and runners that use addresses.

    writable  whether the host can copy to its memory; what it copied is in `written`
    """

    runner: AddressRunner = field(default_factory=AddressRunner)
    loading: bool = True  # then the arena is registered
    registered: dict[int, int] = field(default_factory=dict)
    opened: list[tuple[bytes, int]] = field(default_factory=list)
    closed: int = 0
    memory: "ctypes.Array[ctypes.c_char]" = field(
        default_factory=lambda: ctypes.create_string_buffer(1 << 16)
    )
    writable: bool = True
    written: list[tuple[int, int]] = field(default_factory=list)  # offset and bytes

    @property
    def address(self) -> int:
        """Where the "GPU's" memory begins, aligned as an allocation."""
        return -(-ctypes.addressof(self.memory) // 256) * 256

    def register(self, memory: Mapped) -> Unregister:
        """See `LoadedLayers.register`; the first call is for the arena."""
        if self.loading:
            self.loading = False
            return lambda: None
        self.registered[memory.address] = memory.num_bytes
        return lambda: self.registered.__delitem__(memory.address)

    def open_cuda(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """See `LoadedLayers.open_cuda`."""
        if handle != HANDLE:
            raise ValueError("raw_handle: expected a handle of another process's memory, got another text")
        self.opened.append((handle, num_bytes))
        write = self._write if self.writable else None
        return DeviceMemory(Span(self.address, num_bytes, 0), self._close, write=write)

    def read(self, offset: int, num_bytes: int) -> npt.NDArray[np.float32]:
        """A part of the "GPU's" memory."""
        return np.frombuffer(ctypes.string_at(self.address + offset, num_bytes), np.float32)

    def _write(self, offset: int, data: memoryview) -> None:
        self.written.append((offset, len(data)))
        ctypes.memmove(self.address + offset, bytes(data), len(data))

    def _close(self) -> None:
        self.closed += 1

    def loader(self) -> Loader:
        """A loader that serves every model with the runner."""

        def load(settings: Settings, _: Any) -> LoadedLayers:
            runners = {model.name: self.runner for model in settings.models}
            return LoadedLayers(
                "fake",
                "test",
                runners,
                None,
                lambda: None,
                lambda _: None,
                self.register,
                self.register,
                self.open_cuda,
            )

        return load


def region_input(
    region: str,
    shape: list[int],
    offset: int | None = None,
    name: str = "hidden_states",
    datatype: str = "FP32",
    size: int | None = None,
) -> dict[str, Any]:
    """An input in a region, of 4-byte elements unless `size` is given."""
    return {
        "name": name,
        "shape": shape,
        "datatype": datatype,
        "parameters": place(region, 4 * shape[0] * shape[1] if size is None else size, offset),
    }


def place(region: str, size: int, offset: int | None = None) -> dict[str, Any]:
    """The parameters that name a place in a region."""
    more = {} if offset is None else {"shared_memory_offset": offset}
    return {"shared_memory_region": region, "shared_memory_byte_size": size, **more}


def region_output(region: str, size: int, offset: int | None = None) -> list[dict[str, Any]]:
    """Outputs that go to a region."""
    return [{"name": "hidden_states", "parameters": place(region, size, offset)}]


async def register(
    server: Serving, name: str, key: str, num_bytes: int, offset: int | None = None
) -> httpx.Response:
    """The answer to the registration of a system region."""
    body = {"key": key, "byte_size": num_bytes, **({} if offset is None else {"offset": offset})}
    return await server.http.post(f"{SYSTEM}/region/{name}/register", json=body)


async def register_cuda(server: Serving, name: str, num_bytes: int, **changes: Any) -> httpx.Response:
    """The answer to the registration of a GPU's memory."""
    b64 = base64.b64encode(HANDLE).decode()
    body = {"raw_handle": {"b64": b64}, "device_id": 0, "byte_size": num_bytes, **changes}
    return await server.http.post(f"{CUDA}/region/{name}/register", json=body)


async def registered(server: Serving, name: str, key: str, num_bytes: int, offset: int = 0) -> None:
    """Register a system region that must be accepted."""
    response = await register(server, name, key, num_bytes, offset)
    assert (response.status_code, response.content) == (200, b""), response.text


@asynccontextmanager
async def region(server: Serving, num_bytes: int, name: str = "r") -> AsyncIterator[ShmFile]:
    """A file that is registered whole."""
    with shm_file(num_bytes) as file:
        await registered(server, name, file.key, num_bytes)
        yield file


def totals(server: Serving, kind: str = "system") -> tuple[float, float]:
    """(regions, bytes) of a kind, from the metrics."""
    names = ("shared_memory_regions", "shared_memory_bytes")
    return tuple(server.metric(name, kind=kind) for name in names)  # type: ignore[return-value]
