"""How long some requests of a kind have been there, and how many of their tokens were computed."""

import threading
import time

from expertd.service.engine.steps import Done
from expertd.service.moe.request import Output


class BusyTime:
    """From any thread, in a microsecond per request: for long ones.

    seconds  with at least one request without an answer, up to the last moment when there was none
    tokens   of requests that were answered with an output
    """

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0
        self._count = 0  # of requests without an answer
        self._since = 0.0  # when there were none before
        self._lock = threading.Lock()

    def begun(self, num_tokens: int, done: Done) -> Done:
        """Count a request from now on; what is to be called with its answer, instead of `done`."""
        with self._lock:
            if not self._count:
                self._since = time.perf_counter()
            self._count += 1

        def ended(answer: Output | Exception) -> None:
            done(answer)
            self.end(0 if isinstance(answer, Exception) else num_tokens)

        return ended

    def end(self, num_tokens: int = 0) -> None:
        """Count a request no more, of which this many tokens were computed."""
        with self._lock:
            self._count -= 1
            self.tokens += num_tokens
            if not self._count:
                self.seconds += time.perf_counter() - self._since

    def so_far(self) -> tuple[float, int]:
        """`seconds` up to now, and `tokens`."""
        with self._lock:
            running = time.perf_counter() - self._since if self._count else 0.0
            return self.seconds + running, self.tokens
