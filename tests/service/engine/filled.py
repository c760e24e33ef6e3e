"""Queues that tests fill, without a device or threads."""

from collections.abc import Mapping

from expertd.service.engine.queues import Queues
from expertd.service.engine.steps import Chunk, Submission
from expertd.service.settings.parts import Limits
from tests.service.runners import EchoRunner, layer_request

LIMITS = {"max_request_tokens": 32, "max_batch_tokens": 32, "prefill_chunk_tokens": 8}


class Filled:
    """Queues to which a test adds requests, and from which it takes steps."""

    def __init__(self, models: Mapping[str, float] | None = None, **limits: int) -> None:
        self.now = 0.0  # seconds, by which only tests move on
        self.queues = Queues(Limits.model_validate({**LIMITS, **limits}), lambda: self.now)
        self.models = models or {"0": 1.0}
        self.queues.set_runners({model: EchoRunner() for model in self.models}, self.models)

    def add(
        self,
        *sizes: int,
        model: str = "0",
        caller: int = 0,
        priority: int = 128,
        timeout: float | None = None,
        busy: float = 0.0,
    ) -> list[Submission]:
        added = []
        for size in sizes:
            request = layer_request([float(i) for i in range(size)])
            submission = Submission(
                model, request, lambda _: None, priority=priority, caller=caller, timeout=timeout
            )
            submission.accept(self.now)
            added.append(submission)
            self.queues.add(added[-1], lambda: busy)
        return added

    def step(self) -> list[int]:
        """The tokens of the next step's parts."""
        return [chunk.request.num_tokens for chunk in self.chunks()]

    def chunks(self) -> list[Chunk]:
        """The next step, which ends at once."""
        step = self.queues.next_step()
        for chunk in step:
            self.queues.end(chunk, bytes(4 * chunk.request.num_tokens))
        return step

    def rest(self) -> list[list[int]]:
        """All further steps."""
        steps = []
        while self.queues.waiting_models:
            steps.append(self.step())
        return steps
