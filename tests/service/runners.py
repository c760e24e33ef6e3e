"""A runner whose steps a test can hold, count and fail; it computes the identity."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from expertd.layout import Layout
from expertd.service.engine.executor import Executor
from expertd.service.engine.steps import DEFAULT_PRIORITY, Submission
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult


class EchoRunner:
    """Answers each request with its own bytes, and holds every step while `gate` is closed.

    `steps` lists the tokens of each request of every step that has begun. A request whose first float is
    `poison` makes its step raise. A step says that it took `seconds`.
    """

    seconds = 0.001

    def __init__(self, poison: float | None = None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.steps: list[list[int]] = []
        self.poison = poison

    async def begun(self) -> None:
        """Wait until a further step has begun."""
        assert await asyncio.to_thread(self.entered.acquire, True, 60)

    def validate(self, request: LayerRequest) -> None:
        if request.topk_ids is not None and np.frombuffer(host_view(request.topk_ids), np.int32).max() > 3:
            raise ValueError("topk_ids: expected 0 to 3, got a larger one")

    def begin(self, requests: Sequence[LayerRequest]) -> "Computed":
        return Computed(self._run(requests))

    def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
        self._enter(requests)
        self.gate.wait()
        return self._result(requests)

    def _enter(self, requests: Sequence[LayerRequest]) -> None:
        self.steps.append([request.num_tokens for request in requests])
        self.entered.release()

    def _result(self, requests: Sequence[LayerRequest]) -> StepResult:
        for request in requests:
            if np.frombuffer(host_view(request.hidden_states), np.float32)[0] == self.poison:
                raise RuntimeError("a poisoned request")
        tokens = sum(request.num_tokens for request in requests)
        return StepResult(
            outputs=[_echo(request) for request in requests],
            layout=Layout.MASKED,
            num_tokens=tokens,
            count_tokens=lambda: np.array([tokens, 0, 0, tokens]),
            compute_seconds=self.seconds,
        )


class DeviceRunner(EchoRunner):
    """An echo whose steps begin at once, as on a GPU, and are done when `gate` is open."""

    def begin(self, requests: Sequence[LayerRequest]) -> "Computing":  # type: ignore[override]
        self._enter(requests)
        return Computing(self.gate, partial(self._result, requests))


class Turnstile(threading.Event):
    """A gate that lets steps through one by one, until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._tickets = threading.Semaphore(0)

    def let_one_through(self) -> None:
        self._tickets.release()

    def set(self) -> None:
        self._tickets.release(1000)

    def wait(self, timeout: float | None = None) -> bool:
        return self._tickets.acquire(timeout=60)


def _echo(request: LayerRequest) -> OutputMemory:
    if request.output is None:
        return host_view(request.hidden_states)
    host_view(request.output)[:] = host_view(request.hidden_states)
    return request.output


class Computed:
    """A step that is done when it begins, as on a CPU."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def wait(self) -> float:
        return self._result.compute_seconds

    def finish(self) -> StepResult:
        return self._result


class Computing:
    """A step that a device computes."""

    def __init__(self, done: threading.Event, result: Callable[[], StepResult]) -> None:
        self._done, self._result = done, result

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> float:
        self._done.wait()
        return EchoRunner.seconds

    def finish(self) -> StepResult:
        self._done.wait()
        return self._result()


class Submitted:
    """A request in an executor's queue; `answer` is a future of its output."""

    def __init__(
        self,
        executor: Executor,
        model: str,
        request: LayerRequest,
        alone: bool = False,
        priority: int = DEFAULT_PRIORITY,
        timeout: float | None = None,
    ) -> None:
        self.answer: asyncio.Future[OutputMemory] = asyncio.get_running_loop().create_future()
        self.pending: Submission = executor.submit(
            Submission(model, request, self._done, alone=alone, priority=priority, timeout=timeout)
        )
        self.model = model

    def _done(self, output: OutputMemory | Exception) -> None:
        if self.answer.cancelled():
            return
        if isinstance(output, Exception):
            self.answer.set_exception(output)
        else:
            self.answer.set_result(output)


def layer_request(values: Sequence[float]) -> LayerRequest:
    """A request with one token per value and one FP32 column."""
    return LayerRequest(
        num_tokens=len(values),
        hidden_states=np.asarray(values, dtype=np.float32).tobytes(),
        datatype="FP32",
        topk_ids=None,
        topk_ids_datatype="INT32",
        topk_weights=None,
        output_datatype="FP32",
    )
