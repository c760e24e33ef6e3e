"""What ranks and their front end keep of steps that recur, and when they must not use it."""

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from expertd.service.engine.errors import SomeRefusedError
from expertd.service.memory import Mapped, Span, Unregister, nothing_to_register
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.front.runner import RankRunner, Steps
from expertd.service.ranks.front.staging import StagedStep, StagingRegion
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.messages import NOWHERE, Place, PlacedRequest, StepCommand, number_and_body
from expertd.service.ranks.regions import MappedRegions, SharedRegions
from expertd.service.ranks.worker.own_steps import OwnSteps
from tests.service.apps import HIDDEN, tiny_settings

SIZE = 1 << 16
ROW = 2 * HIDDEN


def file_of(name: str) -> int:
    """A descriptor of SIZE bytes of memory."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, SIZE)
    return descriptor


def body_of(num_tokens: int, region: int = 1, number: int = 1, requests: int = 1) -> bytes:
    """A command without its number: tokens at the beginning of a region, and outputs in its second half."""
    places = Place(region, 0), NOWHERE, NOWHERE, Place(region, SIZE // 2)
    request = PlacedRequest(num_tokens, "BF16", "INT32", "BF16", *places)
    return number_and_body(StepCommand(number, 0, [request] * requests).packed())[1]


class Rank:
    """One of three ranks, with two regions."""

    def __init__(self) -> None:
        self.regions = MappedRegions()
        for number in (1, 2):
            self.regions.map(number, file_of(f"own-steps-{number}"), SIZE, 0, nothing_to_register)
        self.steps = OwnSteps(tiny_settings().models, 3, (0, 3), self.regions)


def test_a_rank_keeps_its_part_of_a_step() -> None:
    rank = Rank()
    first = rank.steps.of(body_of(7, number=5))
    assert first.counts == [3, 2, 2]
    assert first.graph == (4, True)
    assert [request.num_tokens for request in first.requests] == [3]
    assert rank.steps.of(body_of(7, number=6)) is first, "the step's number is its own"
    assert rank.steps.of(body_of(4)).counts == [2, 1, 1]
    (other,) = rank.steps.of(body_of(7, region=2)).requests
    assert other.hidden_states != first.requests[0].hidden_states


def test_a_step_is_forgotten_with_its_memory() -> None:
    rank = Rank()
    maps = Path("/proc/self/maps")
    rank.steps.of(body_of(1, region=1))
    rank.steps.of(body_of(1, region=2))
    assert "own-steps-1" in maps.read_text()
    rank.regions.unmap(1)
    gc.collect()
    assert "own-steps-1" not in maps.read_text(), "nothing keeps the memory"
    with pytest.raises(KeyError):
        rank.steps.of(body_of(1, region=1))
    assert rank.steps.of(body_of(1, region=2)).requests


class FrontEnd:
    """Regions 1, memory for steps, and 2, a caller's."""

    def __init__(self) -> None:
        self.regions = SharedRegions()

        def register(memory: Mapped) -> Unregister:
            region = self.regions.add(memory)
            return lambda: self.regions.remove(region)

        self.staging = StagingRegion(SIZE, register)
        descriptor = file_of("callers")
        self.memory = mmap.mmap(descriptor, SIZE)
        address = int(np.frombuffer(self.memory, np.uint8).ctypes.data)
        self.region = self.regions.add(Mapped(address, SIZE, descriptor), of_caller=True)
        os.close(descriptor)
        self.span = Span(address, SIZE, None, memoryview(self.memory), self.memory)

    def request(self, in_place: bool = True) -> LayerRequest:
        """Three tokens in the caller's memory, or as bytes; outputs in the caller's memory."""
        rows = self.span.part(0, 3 * ROW) if in_place else bytes(3 * ROW)
        return LayerRequest(3, rows, "BF16", None, "INT32", None, "BF16", self.span.part(SIZE // 2, 3 * ROW))

    def command(self, request: LayerRequest, number: int, model: int = 0) -> StepCommand:
        """What the ranks get for a step of the request alone."""
        return StepCommand.unpacked(self.step(request).command(number, model))

    def step(self, request: LayerRequest) -> StagedStep:
        """Of the request alone."""
        return StagedStep([request], HIDDEN, self.staging, self.regions)


@pytest.fixture
def front_end() -> Iterator[FrontEnd]:
    made = FrontEnd()
    yield made
    for region in made.regions.all():
        made.regions.remove(region)


def test_a_request_in_place_keeps_its_command(front_end: FrontEnd) -> None:
    request = front_end.request()
    first = front_end.command(request, 1)
    assert request.plan is not None
    assert first.requests[0].hidden_states == Place(front_end.region.number, 0)
    assert front_end.command(request, 2) == StepCommand(2, 0, first.requests)
    assert front_end.command(request, 3, model=1) == StepCommand(3, 1, first.requests)
    step = front_end.step(request)
    step.command(4, 1)
    assert step.outputs() == [request.output]
    both = StagedStep([request, request], HIDDEN, front_end.staging, front_end.regions).command(5, 1)
    assert StepCommand.unpacked(both).requests == [*first.requests] * 2


def test_a_request_that_is_copied_keeps_nothing(front_end: FrontEnd) -> None:
    request = front_end.request(in_place=False)
    for number in (1, 2):
        request.hidden_states = bytes([number]) * (3 * ROW)
        place = front_end.command(request, number).requests[0].hidden_states
        assert place.region == 1
        front_end.staging.clear()
        _, staged = front_end.staging.take(3 * ROW)
        assert bytes(staged) == request.hidden_states
        assert request.plan is None


def test_a_request_in_memory_that_a_rank_has_lost_is_refused(front_end: FrontEnd) -> None:
    request = front_end.request()
    first = front_end.command(request, 1)
    front_end.regions.note(front_end.region, "no file")
    with pytest.raises(SomeRefusedError):
        front_end.step(request).command(2, 0)
    front_end.regions.note(front_end.region, None)
    assert front_end.command(request, 3).requests == first.requests
    front_end.regions.remove(front_end.region)
    with pytest.raises(ValueError, match="expected memory that the ranks share"):
        front_end.step(request).command(4, 0)


def test_the_numbers_of_steps_have_no_gaps(front_end: FrontEnd) -> None:
    """Memory on other nodes is taken by them in turn: after a gap, two steps would have the same."""
    sent = list[int]()
    group = SimpleNamespace(begin=lambda number, command: sent.append(number))
    supervisor = SimpleNamespace(group=lambda: group, regions=front_end.regions)
    steps = Steps(cast(Supervisor, supervisor), [front_end.staging], 2)
    runner = RankRunner(steps, 0, tiny_settings().models[0])

    def begin(request: LayerRequest) -> None:
        runner.begin([request])
        steps.give_back(front_end.staging)

    begin(front_end.request())
    front_end.regions.note(front_end.region, "no file")
    with pytest.raises(SomeRefusedError):
        runner.begin([front_end.request()])
    front_end.regions.note(front_end.region, None)
    begin(front_end.request())
    assert sent == [1, 2]
