"""Short steps on the event loop: handing one to the worker thread and back takes 0.1 to 0.3 ms."""

import math
import threading
from collections.abc import Callable

from expertd.service.engine.completions import Completions
from expertd.service.engine.long_steps import SHORT_SECONDS
from expertd.service.engine.queue import Queue
from expertd.service.engine.queues import Queues
from expertd.service.engine.stepping import StepRunner
from expertd.service.engine.steps import Chunk, Submission

# A step here may take longer than is likely, and meanwhile no timeout can be answered.
_MIN_TIMEOUT_SECONDS = 50 * SHORT_SECONDS
# After a step, the event loop stays awake for as long, if the caller has been this quick before.
_AWAKE_SECONDS = 0.2e-3


class ShortSteps:
    """Runs steps of one request each.

    device    held by the thread that uses the device
    take      takes a request's step, and `device`; None: it is for the worker thread
    is_quiet  whether nothing waits or runs
    """

    def __init__(
        self,
        queues: Queues,
        stepping: StepRunner,
        completions: Completions,
        device: threading.Lock,
        take: Callable[[Submission], Chunk | None],
        is_quiet: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._queues, self._stepping, self._completions, self._device = queues, stepping, completions, device
        self._take, self._is_quiet = take, is_quiet
        self._ended = -math.inf  # when the last step was answered
        self._stays_awake = False  # after the next one

    def fits(self, queue: Queue, timeout: float | None) -> bool:
        """Whether a step of all that is queued is likely short, and the timeout of its request is not."""
        if timeout is not None and timeout < _MIN_TIMEOUT_SECONDS:
            return False
        return 0.0 < queue.likely_seconds(queue.num_tokens) <= SHORT_SECONDS

    def run_soon(self, submission: Submission) -> None:
        """Run a request's step after all that has arrived on the event loop."""
        self._stays_awake = submission.arrived - self._ended < _AWAKE_SECONDS
        self._completions.loop.call_soon(self._run, submission)

    def _run(self, submission: Submission) -> None:
        chunk = self._take(submission)
        if chunk is None:
            return
        try:
            self._stepping.run_here(chunk)
        finally:
            self._device.release()
        self._queues.just_ended = False  # what has arrived meanwhile did not come from sources
        self._ended = self._clock()
        if self._stays_awake:
            self._stay_awake()
        if not (self._stays_awake and self._completions.leaves_reports):
            self._completions.flush_here()

    def _stay_awake(self) -> None:
        """Keep the event loop from sleeping for a moment: waking it would take about 0.05 ms.

        On a GPU, reports wait, too: they would be in the way of the caller's next request.
        """
        loop = self._completions.loop
        if self._is_quiet() and self._clock() - self._ended < _AWAKE_SECONDS:
            loop.call_soon(self._stay_awake)
        elif self._completions.leaves_reports:
            loop.call_soon(self._flush, self._ended)  # behind the next request's step

    def _flush(self, ended: float) -> None:
        """Have reports called, unless another step has run here, which has called them."""
        if ended == self._ended:
            self._completions.flush_here()
