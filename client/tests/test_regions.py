"""Regions that are given up: unregistered by a later call, and memory of a GPU kept until then."""

import math
import weakref
from typing import Any, ClassVar

import pytest
import torch

from expertd_client.arenas import Need, Opening, Sizes
from expertd_client.deadline import Deadline
from expertd_client.directory import RefusedError, Wanted
from expertd_client.errors import DeadlineError, ExpertError, InvalidRequestError, ServerBusyError
from expertd_client.shared_memory import arena
from expertd_client.shared_memory.arena import Closed, RegionArena, keep_memory, make_region, unregister
from expertd_client.shared_memory.transport import SharedMemoryTransport
from expertd_client.steps import Steps, run

SIZES = Sizes(1, 4096, 1)


class Server:
    """Is asked to unregister, and raises `error`."""

    def __init__(self, error: ExpertError | None = None) -> None:
        self.error = error
        self.asked: list[str] = []
        self.memory: weakref.ref[Any] | None = None

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
        self.asked.append(path)
        assert self.memory is None or self.memory() is not None, "a step may still use it"
        if self.error is not None:
            raise self.error
        return None
        yield


def closed_region(is_lost: bool, closed: list[Closed]) -> "weakref.ref[Any]":
    """The memory of one that stands for a GPU's."""
    data = torch.zeros(4096, dtype=torch.uint8)
    region = RegionArena(SIZES, "r", None, data, closed)
    if is_lost:
        region.lose()
    else:
        region.abandon(0, 1)
    region.close()
    return weakref.ref(data)


@pytest.mark.parametrize("is_lost", [False, True])
def test_memory_of_a_gpu_is_freed_after_its_region(is_lost: bool) -> None:
    closed: list[Closed] = []
    server = Server()
    memory = server.memory = closed_region(is_lost, closed)
    run(unregister(server, closed, Deadline(10)))
    assert server.asked == ["/v2/cudasharedmemory/region/r/unregister"]
    assert not closed
    assert memory() is None


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (DeadlineError("late"), 3),
        (ServerBusyError("later", 503), 3),
        (InvalidRequestError("name: unknown", 400), 0),
    ],
)
def test_regions_that_are_not_unregistered_are_tried_again(error: ExpertError, left: int) -> None:
    closed = [Closed(name, "system", None) for name in "abc"]
    server = Server(error)
    run(unregister(server, closed, Deadline(10)))
    assert len(closed) == left
    assert len(server.asked) == (1 if left else 3)
    server.error = None
    run(unregister(server, closed, Deadline(10)))
    assert not closed


class Exported:
    """Stands for memory of a GPU."""

    made: "ClassVar[list[weakref.ref[Any]]]"

    def __init__(self, index: int, num_bytes: int) -> None:
        self._data = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor(self) -> torch.Tensor:
        self.made.append(weakref.ref(self._data))
        return self._data

    def described(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (InvalidRequestError("byte_size: expected at most 4096, got 8192", 400), False),
        (ServerBusyError("later", 503), False),
        (InvalidRequestError("name: expected one that is not registered yet, got r", 400), True),
        (DeadlineError("late"), True),
    ],
)
def test_memory_whose_registration_is_refused_is_freed(
    monkeypatch: pytest.MonkeyPatch, error: ExpertError, is_kept: bool
) -> None:
    class Refusing(Server):
        def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
            if method == "POST":
                raise error
            return {"extensions": ["system_shared_memory", "cuda_shared_memory"]}
            yield

    monkeypatch.setattr(arena, "DeviceMemory", Exported)
    monkeypatch.setattr(Exported, "made", [], raising=False)
    closed: list[Closed] = []
    wanted = Wanted("m", Need(1, 4096), Opening((SIZES,)), 0, Deadline(10))
    with pytest.raises((RefusedError, ExpertError)) as caught:
        run(make_region(Refusing(), wanted, closed))
    assert len(closed) == is_kept
    assert (Exported.made[0]() is not None) is is_kept, caught  # which keeps frames alive, as a holder does


def test_memory_of_regions_that_a_server_may_use_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(arena, "_kept", kept)
    closed: list[Closed] = []
    memory = closed_region(False, closed)
    keep_memory([*closed, Closed("host", "system", None)])
    assert kept == [memory()]


def test_a_call_with_an_answer_waits_for_regions_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []

    class Slow(Server):
        def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
            deadlines.append(deadline.seconds)
            raise deadline.error()
            yield

    def answered(*_: object) -> Steps[None]:
        return
        yield

    slow: Any = Slow()
    transport = SharedMemoryTransport(slow, 4)
    monkeypatch.setattr(transport._directory, "answer", answered)
    transport._closed.append(Closed("r", "system", None))
    call: Any = None
    for _ in range(3):
        run(transport.infer(call, Deadline(math.inf)))
    assert len(deadlines) == 1, "and not again at once"
    assert deadlines[0] <= 0.1
    assert len(transport._closed) == 1
