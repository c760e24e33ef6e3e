"""What a client asks a server for, and what it does when that is refused."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from expertd_client import arenas
from expertd_client.arenas import ArenaOpening, Holder, Lease, Sizes
from expertd_client.calls import layer_call
from expertd_client.deadline import Deadline
from expertd_client.device_memory import DeviceMemoryError
from expertd_client.directory import ArenaRefusedError, Directory, Wanted, largest
from expertd_client.errors import (
    DeadlineError,
    InvalidRequestError,
    TransportUnavailableError,
)
from expertd_client.steps import Steps, Work, run
from tests.arenas import SMALL, Memory, never


class OnGpu:
    """As much of a tensor as tells where it is."""

    def __init__(self) -> None:
        self.device = type("device", (), {"type": "cuda", "index": 3})


def test_a_gpu_that_is_refused_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        yield Work(lambda: None)
        if wanted.gpu is not None:
            raise DeviceMemoryError("cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2")
        return Memory(wanted.opening.sizes[0])

    directory = Directory(4, make)
    call = layer_call("m", np.zeros((1, 3), np.float32))
    object.__setattr__(call.inputs[0], "value", OnGpu())
    assert directory.gpu_for(call) == 3
    for _ in range(2):
        wanted = Wanted("m", SMALL, ArenaOpening((Sizes(1, 4096, 1),)), 3, Deadline(1))
        assert run(directory.open(wanted)) is None
    assert directory.gpu_for(call) is None
    text = "memory of GPU 3: cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2; taking host memory"
    assert caplog.messages == [f"transport channel: {text}"]


class Limited:
    """Stands in for a server that limits tokens and places."""

    def __init__(self, max_tokens: int, max_places: int) -> None:
        self.max_tokens, self.max_places = max_tokens, max_places
        self.asked: list[Sizes] = []
        self.made: list[Memory] = []
        self.directory = Directory(8, self._make)

    def _make(self, wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        return (yield from largest(wanted, self._one))

    def _one(self, sizes: Sizes) -> Steps[Memory]:
        self.asked.append(sizes)
        if sizes.max_tokens > self.max_tokens or sizes.num_places > self.max_places:
            raise ArenaRefusedError(InvalidRequestError("byte_size: expected less", 400))
        self.made.append(Memory(sizes))
        return self.made[-1]
        yield

    def call(self, num_tokens: int, num_threads: int, times: int) -> None:
        """Have calls answered, each in a few milliseconds."""
        call = layer_call("m", np.zeros((num_tokens, 8), np.float32))

        def exchange(*_: object) -> Steps[bool]:
            yield Work(lambda: time.sleep(0.005))
            return True

        def answer() -> None:
            run(self.directory.answer(call, Deadline(30), exchange))

        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(answer) for _ in range(times)]:
                done.result()


@pytest.mark.parametrize(("max_tokens", "max_places"), [(1000, 8), (1 << 20, 1), (1000, 1)])
def test_what_a_server_accepts_is_not_asked_for_again(max_tokens: int, max_places: int) -> None:
    server = Limited(max_tokens, max_places)
    server.call(600, num_threads=4, times=60)
    assert len(server.made) <= 2 if max_places > 1 else len(server.made) == 1
    assert len(server.asked) <= 6
    assert max(memory.sizes.num_places for memory in server.made) == min(4, max_places)


def test_more_places_are_asked_for_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_MORE_PLACES_SECONDS", 0.2)
    server = Limited(max_tokens=1000, max_places=2)
    server.call(16, num_threads=8, times=60)
    assert server.made[-1].sizes.num_places == 2
    server.max_places = 8
    time.sleep(0.25)
    server.call(16, num_threads=8, times=60)
    assert server.made[-1].sizes.num_places == 8


@pytest.mark.parametrize(
    "error",
    [
        ArenaRefusedError(InvalidRequestError("byte_size: expected less in all regions, got more", 400)),
        DeviceMemoryError("cuMemAlloc_v2: expected CUDA_SUCCESS, got status 2"),
        DeadlineError("late"),
        TransportUnavailableError("an answer without a channel"),
    ],
)
def test_calls_do_without_more_places(error: Exception) -> None:
    deadlines: list[float] = []

    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        yield Work(lambda: None)
        if not wanted.opening.is_needed:
            deadlines.append(wanted.deadline.seconds)
            raise error
        return Memory(wanted.opening.sizes[0])

    def exchange(*_: object) -> Steps[bool]:
        yield Work(lambda: time.sleep(0.01))
        return True

    directory = Directory(8, make)
    call = layer_call("m", np.zeros((1, 3), np.float32))
    object.__setattr__(call.inputs[0], "value", OnGpu())

    def answer() -> None:
        run(directory.answer(call, Deadline(30), exchange))

    answer()  # alone: more places are wanted later
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(answer) for _ in range(50)]:
            done.result()
    assert directory.gpu_for(call) == 3, "its memory is used"
    assert len(deadlines) == 1
    assert deadlines[0] <= 1, "calls wait for places, not for the server"


def test_a_call_that_asks_for_more_places_has_its_own_deadline() -> None:
    def make(wanted: Wanted, holder: Holder[Memory]) -> Steps[Memory]:
        while not wanted.opening.is_needed:
            wanted.deadline.check()
            yield Work(lambda: time.sleep(0.01))
        return Memory(wanted.opening.sizes[0])

    directory = Directory(8, make)
    holder = directory.holder("m", None)
    for number in range(2):
        wanted = holder.take(SMALL, never)
        if isinstance(wanted, ArenaOpening):
            run(directory.open(Wanted("m", SMALL, wanted, None, Deadline(30))))
            wanted = holder.take(SMALL, never)
        assert isinstance(wanted, Lease), number
    for _ in range(3):
        holder.enter()
    call = layer_call("m", np.zeros((1, 3), np.float32))
    with pytest.raises(DeadlineError, match=r"within 0\.1 s"):
        run(directory.answer(call, Deadline(0.1), lambda *_: None))  # type: ignore[arg-type]
