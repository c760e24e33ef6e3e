"""Lets sources be polled while the worker thread is in a long step, or a job."""

from collections.abc import Callable
from threading import Lock

from expertd.service.engine.completions import Completions
from expertd.service.engine.queues import Queues
from expertd.service.engine.stepping import StepRunner
from expertd.service.engine.steps import Chunk, num_tokens_of

SHORT_SECONDS = 5e-3
"""A step that likely takes no longer is short."""
_LOOK_SECONDS = 2e-3  # how often the event loop polls during a long step
_LAST_LOOKS = 50  # without a long step, before it stops polling


class LongStepPoller:
    """Has the event loop call `poll` during long steps, so that timeouts begin, and cancels end work.

    has_job  whether the worker thread runs a job
    """

    def __init__(
        self, queues: Queues, stepping: StepRunner, completions: Completions, poll: Callable[[], None]
    ) -> None:
        self.has_job: Callable[[], bool] = lambda: False
        self._queues, self._stepping, self._completions, self._poll = queues, stepping, completions, poll
        self._lock = Lock()
        self.looks = 0  # left to the event loop

    def step_begins(self, chunks: list[Chunk]) -> None:
        """On the worker thread, before a step."""
        if self._may_be_long(chunks):
            self.job_begins()

    def job_begins(self) -> None:
        """On the worker thread, before a job."""
        with self._lock:
            looks, self.looks = self.looks, _LAST_LOOKS
        if not looks:
            self._completions.loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """On the event loop."""
        if is_long := self.has_job() or self._may_be_long(self._stepping.in_flight()):
            self._poll()
        with self._lock:
            looks = self.looks = _LAST_LOOKS if is_long else self.looks - 1
        if looks:
            self._completions.loop.call_later(_LOOK_SECONDS, self._look)

    def _may_be_long(self, chunks: list[Chunk]) -> bool:
        """Whether a step of `chunks` is not known to be short; one without any is none."""
        queue = self._queues.get(chunks[0].submission.model) if chunks else None
        if queue is None:  # or the step has ended, and its model is unloaded
            return False
        return not 0.0 < queue.likely_seconds(num_tokens_of(chunks)) <= SHORT_SECONDS
