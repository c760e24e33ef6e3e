"""Calls that a GPU makes by itself: two kernels on torch's current stream, which CUDA graphs may have."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from expertd_client.channel.call_requests import CallAddresses, CallRequests
from expertd_client.channel.device_link import DeviceLink
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Shapes
from expertd_client.channel.stream import register
from expertd_client.deadline import Deadline
from expertd_client.device_memory import SharedDeviceMemory, call, get_driver, in_context
from expertd_client.errors import InvalidRequestError, ServerUnreachableError
from expertd_client.steps import Steps

if TYPE_CHECKING:
    from torch import Tensor

_PLACE = struct.Struct("<10Q3I4x")  # CallPlace of device_call.cu
_FAILURE_BYTES = 128  # of all slots, before their places
_THREADS, _MAX_CTAS = 256, 64
_ROW_STEP = 8  # columns that a thread loads at once
_LOADS = 4  # of a thread, in flight together: kAtOnce of device_call.cu
_PORTABLE_AND_MAPPED = 1 | 2
_MAX_SECONDS = 1e6  # that a kernel waits
_kept: list[object] = []
_FAILURES = {1: "a call's output has not come in time", 2: "the server has refused a call"}


class CallShape(Protocol):
    """Of the calls of a channel."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def top_k(self) -> int: ...


class CallWay(Protocol):
    """How calls get to a server, and their outputs back.

    is_line    as request lines, and not as headers
    addresses  of each slot
    """

    @property
    def is_line(self) -> bool: ...
    @property
    def addresses(self) -> Sequence[CallAddresses]: ...
    @property
    def sizes(self) -> CallShape: ...

    def start(self, has_failed: Callable[[], bool]) -> None:
        """Look after the server, until a call `has_failed` for good or `close`."""

    def close(self) -> None:
        """Free what it has; no call is under way, or will be."""


class GpuCalls:
    """Calls in memory of the server's GPU, which answers them by itself.

    ask  has a server open a channel; what it answers
    """

    is_line = False

    def __init__(self, ask: Callable[[Deadline], Any], index: int, deadline: Deadline) -> None:
        self._link = link = DeviceLink(ask, partial(SharedDeviceMemory, index), deadline)
        self.sizes = sizes = link.geometry
        try:
            calls = SharedDeviceMemory(index, sizes.data_bytes, link.calls)
        except BaseException:
            link.close()
            raise
        answers = link.answers
        self._memories = answers, calls
        self.addresses = []
        for slot in range(sizes.num_slots):
            header = slot * sizes.header_bytes
            rows = calls.address + sizes.rows_offset + slot * sizes.slot_bytes
            routing = rows + sizes.topk_ids_offset, rows + sizes.topk_weights_offset
            out = answers.address + sizes.rows_offset + slot * sizes.output_bytes
            places = calls.address + header, rows, *routing, answers.address + header, out
            self.addresses.append(CallAddresses(*places))
        self.start = link.start

    def close(self) -> None:
        """As CallWay.close."""
        self._link.close()
        for memory in self._memories:
            memory.close()


class HostCalls:
    """Calls as requests, which the server's host launches: a channel for each slot, in memory of this GPU."""

    is_line = True

    def __init__(
        self,
        channels: Sequence[Opened],
        sizes: Shapes,
        index: int,
        reopen: Callable[[Opened, Deadline], Steps[Opened]],
        deadline: Deadline,
    ) -> None:
        self.sizes = sizes
        self._slots = [CallRequests(each, sizes.layout, reopen, deadline) for each in channels]
        self.addresses = []
        for slot, opened in zip(self._slots, channels, strict=True):
            assert opened.device is not None
            data = opened.device.data_ptr()
            self.addresses.append(slot.addresses(register(index, opened.link.control), data))

    def start(self, has_failed: Callable[[], bool]) -> None:
        """As CallWay.start."""
        for slot in self._slots:
            slot.start(has_failed)

    def close(self) -> None:
        """As CallWay.close."""
        for slot in self._slots:
            slot.close()
            if not slot.is_answered:
                _kept.append(slot)  # a step may still use its memory


class DeviceChannel:
    """Slots for calls of a GPU. Made by ExpertClient.open_device_channel.

    A slot has one call at a time, and all its calls are on one stream. While its server is away, a call
    waits, up to the client's `retry_seconds`; a server that is there by then computes it. After a failure,
    outputs are NaN until `reopen`, and `check` says why.

    open_way        finds a way to a server
    nan_on_failure  False: after a failure, the stream goes no further, and so does `close`
    """

    def __init__(
        self,
        open_way: Callable[[Deadline], CallWay],
        models: tuple[str, ...],
        index: int,
        deadline: Deadline,
        nan_on_failure: bool = True,
    ) -> None:
        import torch

        device = torch.device("cuda", index)
        self._models = {name: number for number, name in enumerate(models)}
        self._device, self._cuda = device, torch.cuda
        self._send, self._wait = _kernels(index)
        self._open_way, self._deadline, self._holds = open_way, deadline, not nan_on_failure
        self._is_closed = False
        self._on_host = ctypes.c_void_p()
        with in_context(device.index):
            word = ctypes.c_size_t(8)
            call("cuMemHostAlloc", ctypes.byref(self._on_host), word, ctypes.c_uint(_PORTABLE_AND_MAPPED))
        self._failure = ctypes.c_uint64.from_address(self._on_host.value or 0)
        self._way = way = open_way(deadline)
        self._sizes = way.sizes
        num_bytes = _FAILURE_BYTES + len(way.addresses) * _PLACE.size
        try:
            self._places = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._begin()
        except BaseException:
            way.close()
            raise

    def _begin(self) -> None:
        """Have all calls go the present way; none is under way."""
        import torch

        way, deadline, first = self._way, self._deadline, self._places.data_ptr()
        self._failure.value = 0
        places = bytearray(_FAILURE_BYTES)
        limit = int(min(deadline.seconds + deadline.retry_seconds, _MAX_SECONDS) * 1e9)
        words = first, self._on_host.value or 0, limit, 0, 0, self._holds, way.is_line
        for addresses in way.addresses:
            places += _PLACE.pack(*addresses, *words)
        self._places.copy_(torch.frombuffer(places, dtype=torch.uint8))
        self._cuda.synchronize(self._device)
        way.start(lambda: bool(self._failure.value))

    @property
    def models(self) -> tuple[str, ...]:
        """The models that calls may be for."""
        return tuple(self._models)

    @property
    def num_slots(self) -> int:
        """Calls that may be under way at once, each with a slot of its own."""
        return len(self._way.addresses)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a call."""
        return self._sizes.max_tokens

    def call(
        self,
        hidden_states: "Tensor",
        topk_ids: "Tensor",
        topk_weights: "Tensor",
        out: "Tensor | None" = None,
        *,
        model: str | None = None,
        slot: int = 0,
    ) -> "Tensor":
        """`send`, then `wait`."""
        self.send(hidden_states, topk_ids, topk_weights, model=model, slot=slot)
        if out is None:
            out = hidden_states.new_empty(hidden_states.shape)
        return self.wait(out, slot=slot)

    def send(
        self,
        hidden_states: "Tensor",
        topk_ids: "Tensor",
        topk_weights: "Tensor",
        *,
        model: str | None = None,
        slot: int = 0,
    ) -> None:
        """Enqueue on torch's current stream: have a layer computed, once the stream gets there.

        hidden_states  bfloat16 [tokens, hidden_size]
        topk_ids       int32 [tokens, top_k]; -1: no expert
        topk_weights   float32 [tokens, top_k]

        Raises InvalidRequestError.
        """
        sizes, place, count = self._sizes, self._place(slot), self._count(hidden_states)
        self._check("hidden_states", hidden_states, "torch.bfloat16", (count, sizes.hidden_size))
        self._check("topk_ids", topk_ids, "torch.int32", (count, sizes.top_k))
        self._check("topk_weights", topk_weights, "torch.float32", (count, sizes.top_k))
        pointers = [tensor.data_ptr() for tensor in (hidden_states, topk_ids, topk_weights)]
        row = sizes.hidden_size // _ROW_STEP
        numbers = count, row, sizes.top_k, self._number(model)
        self._launch(self._send, count * row, [place, *pointers], numbers)

    def wait(self, out: "Tensor", *, slot: int = 0) -> "Tensor":
        """Enqueue on the same stream: wait for the slot's last call, and copy its output to `out`.

        out  bfloat16 [tokens, hidden_size], of as many tokens as that call

        Raises InvalidRequestError.
        """
        place, count = self._place(slot), self._count(out)
        self._check("out", out, "torch.bfloat16", (count, self._sizes.hidden_size))
        vectors = count * self._sizes.hidden_size // _ROW_STEP
        self._launch(self._wait, vectors, [place, out.data_ptr()], (vectors,))
        return out

    def check(self) -> None:
        """Raise ServerUnreachableError if outputs are NaN because a call has failed; waits for nothing."""
        if self._failure.value:
            raise ServerUnreachableError(f"channel: {_FAILURES.get(self._failure.value, 'closed')}")

    def reopen(self) -> None:
        """After a failure: make calls again, also those of graphs that were captured before.

        Waits for the GPU. Raises ExpertError, and all stays as it is, if there is no server with the same
        layers; InvalidRequestError if there was no failure, or the stream goes no further.
        """
        if not self._failure.value or self._holds or self._is_closed:
            got = "a closed one" if self._is_closed else "another one"
            raise InvalidRequestError(f"channel: expected one whose outputs are NaN, got {got}")
        former, deadline = self._way, self._deadline
        way = self._open_way(Deadline(deadline.seconds, deadline.retry_seconds))
        self._cuda.synchronize(self._device)
        self._way = way
        former.close()
        self._begin()

    def close(self) -> None:
        """Give the channel up; no call may be under way, and no graph may make one later."""
        if self._is_closed:
            return
        self._is_closed = True
        self._cuda.synchronize(self._device)
        self._way.close()

    def __enter__(self) -> "DeviceChannel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, slot: int) -> int:
        """The address of a slot's CallPlace."""
        if not 0 <= slot < self.num_slots:
            raise InvalidRequestError(f"slot: expected 0 to {self.num_slots - 1}, got {slot}")
        return int(self._places.data_ptr()) + _FAILURE_BYTES + slot * _PLACE.size

    def _count(self, rows: "Tensor") -> int:
        if len(rows) > self.max_tokens:
            raise InvalidRequestError(f"tokens: expected at most {self.max_tokens}, got {len(rows)}")
        return len(rows)

    def _number(self, model: str | None) -> int:
        if model is None and len(self._models) == 1:
            return 0
        if model not in self._models:
            raise InvalidRequestError(f"model: expected one of {', '.join(self._models)}, got {model!r:.200}")
        return self._models[model]

    def _check(self, name: str, tensor: "Tensor", dtype: str, shape: tuple[int, int]) -> None:
        got = str(tensor.dtype), tuple(tensor.shape), tensor.device
        if got != (dtype, shape, self._device):
            raise InvalidRequestError(f"{name}: expected {dtype} {shape} on {self._device}, got {got}")
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise InvalidRequestError(
                f"{name}: expected contiguous rows at a multiple of 16 bytes, got others"
            )

    def _launch(self, kernel: Any, threads: int, pointers: list[int], numbers: tuple[int, ...]) -> None:
        values = [*map(ctypes.c_uint64, pointers), *map(ctypes.c_uint32, numbers)]
        given = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        # One CTA, where it can have all loads in flight, has no others to wait for.
        ctas = 1 if threads <= _LOADS * _THREADS else min(_MAX_CTAS, -(-threads // _THREADS))
        stream = ctypes.c_void_p(self._cuda.current_stream(self._device).cuda_stream)
        with in_context(self._device.index):
            call("cuLaunchKernel", kernel, ctas, 1, 1, _THREADS, 1, 1, 0, stream, given, None)


@lru_cache(maxsize=64)
def _kernels(index: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """send_call and wait_call on a GPU. Raises DeviceMemoryError."""
    ptx = resources.files("expertd_client.channel").joinpath("device_call.ptx").read_bytes()
    module, found = ctypes.c_void_p(), []
    with in_context(index):
        call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx))
        for name in (b"send_call", b"wait_call"):
            function = ctypes.c_void_p()
            call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
            if hasattr(get_driver(), "cuFuncLoad"):  # now: it may not be loaded while a graph is captured
                call("cuFuncLoad", function)
            found.append(function)
    return found[0], found[1]
