"""When a large step begins while another one runs, so that its bytes travel meanwhile."""

import math
from collections.abc import Callable

from expertd.service.engine.queues import Queues
from expertd.service.engine.stepping import StepRunner
from expertd.service.engine.steps import Submission
from expertd.service.memory import is_on_gpu
from expertd.service.moe.request import LayerRequest

# Steps of this many tokens begin before the preceding one is done: they take longer to copy than to prepare.
_EARLY_TOKENS = 512
_THIRD_PART = 0.5  # of the likely time of the first of two steps, after which a third one may begin
_POLLED_PART = 0.9  # of a large step's likely time; for the rest, waiting for its end alone ends sooner
# How long before the likely end of the running step the next large one begins while small requests come: its
# launches take 0.2 to 0.5 ms, and copying its bytes, unless the GPU has them, a part of what it computes.
_LEAD_SECONDS = 0.6e-3
_LEAD_PART = 0.2  # of the running step's time, at least
_COPYING_PART = 0.5  # at most, or if there are bytes to copy
_SMALL_SECONDS = 1.0  # small requests are taken to come for as long after one has


class EarlySteps:
    """Decides by what is queued and what runs; for the thread that uses the device, but for `note`.

    max_running  steps at a time: 2, one whose bytes are copied and one that computes; 3, with the next one;
                 or 1, where a step's beginning waits for the one before
    """

    max_running = 2

    def __init__(self, queues: Queues, stepping: StepRunner, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues, self._stepping = queues, stepping
        self._small_until = -math.inf  # small requests are taken to come

    def note(self, submission: Submission) -> None:
        """A request has arrived."""
        if submission.request.num_tokens < _EARLY_TOKENS:
            self._small_until = submission.arrived + _SMALL_SECONDS

    def may_begin(self) -> bool:
        """Whether the next step may begin while others run. The caller holds the queues' lock."""
        return self._clock() >= self.begins()

    def begins(self) -> float:
        """When the next step may begin, as things are; inf: not yet. The caller holds the queues' lock."""
        if len(self._stepping.running) == self.max_running:
            return math.inf
        head = self._queues.large_head(_EARLY_TOKENS)
        return math.inf if head is None else self._begins(head.request)

    def polled_until(self) -> float:
        """Until when the running step is worth polling, because another may begin; 0: not at all."""
        running = self._stepping.running
        if len(running) == self.max_running or running[0].num_tokens < _EARLY_TOKENS:
            return 0.0  # a small step is over before another is worth beginning
        if len(running) > 1 and self._small_come():
            return 0.0
        began, seconds = self._stepping.first_times()
        return began + _POLLED_PART * seconds

    def _begins(self, request: LayerRequest) -> float:
        """When a step with this request may begin while others run."""
        began, seconds = self._stepping.first_times()
        if len(self._stepping.running) > 1:
            return math.inf if self._small_come() else began + _THIRD_PART * seconds
        if not self._small_come():
            return began
        lead = _COPYING_PART * seconds
        if is_on_gpu(request.hidden_states):
            lead = min(lead, max(_LEAD_SECONDS, _LEAD_PART * seconds))
        return began + seconds - lead

    def _small_come(self) -> bool:
        """Whether small requests are taken to come: a large step then begins late, to have room for them."""
        return self._clock() <= self._small_until
