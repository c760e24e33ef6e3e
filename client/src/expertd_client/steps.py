"""What it takes to share memory with a server, written once for threads and for event loops."""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from expertd_client.deadline import Deadline

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP call without tensors; gives the answer's JSON."""

    method: str
    path: str
    body: object = None


@dataclass(frozen=True, slots=True)
class Work:
    """Something that may take a moment; gives what it returns."""

    run: Callable[[], object]


Steps: TypeAlias = Generator[Ask | Work, Any, T]
"""Yields what is to be done, is resumed with its result or its exception, and returns T."""


class Asker(Protocol):
    """HTTP for threads."""

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Any: ...


class AsyncAsker(Protocol):
    """HTTP for event loops."""

    async def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Any: ...


def run(steps: Steps[T], http: Asker, deadline: Deadline) -> T:
    """Do the steps in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Ask):
                    given = http.request(step.method, step.path, deadline, step.body)
                else:
                    given = step.run()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def run_async(steps: Steps[T], http: AsyncAsker, deadline: Deadline) -> T:
    """Do the steps, the HTTP calls in the event loop and the others in a thread."""
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Ask):
                    given = await http.request(step.method, step.path, deadline, step.body)
                else:
                    given = await asyncio.to_thread(step.run)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(given)
    except StopIteration as stop:
        result: T = stop.value
        return result
