"""One process of the load: a thread for each connection."""

import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_client.bench.case import BenchError, BenchTarget, Case, Sample
from expertd_client.client import ExpertClient
from expertd_client.errors import ExpertError, ServerUnreachableError

_LOST_SECONDS = 1.0  # without a connection: the server has gone
_RETRY_SECONDS = 0.01  # from a failed connection to the next attempt

Request = Callable[[], object]


def work(pipe: Connection, target: BenchTarget, seed: int) -> None:
    """Measure each (case, connections, rate) that comes, together with other processes, until the pipe ends.

    After the warm-up it says so, and waits for a common start: a value of time.monotonic(). If the server
    has gone, it sends a BenchError instead, and ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    generator, watch = np.random.default_rng(seed), Reachability()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            case, connections, rate = pipe.recv()
            with _client(target, connections) as client:
                requests = [_request(client, target, case.tokens, generator) for _ in range(connections)]
                load = Load(case, requests, watch)
                try:
                    load.warm_up()
                    pipe.send(None)
                    pipe.send(load.run(pipe.recv(), _due(case, rate, generator), target.timeout))
                except BenchError as error:
                    pipe.send(error)
                    return


def _client(target: BenchTarget, connections: int) -> ExpertClient:
    return ExpertClient(
        target.url,
        transport=target.transport,
        timeout=target.timeout,
        max_connections=connections,
        max_retries=0,
    )


def hidden_states(
    tokens: int, hidden_size: int, datatype: str, generator: np.random.Generator
) -> npt.NDArray[Any]:
    """Normal hidden states of the model's own datatype; bfloat16 as bits."""
    values = generator.standard_normal((tokens, hidden_size), dtype=np.float32)
    if datatype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if datatype == "FP16" else values


class Reachability:
    """Whether the server can still be reached, over all cases of a process. Used by all of its threads."""

    def __init__(self) -> None:
        self._since: float | None = None  # when connections began to fail
        self._lost: ServerUnreachableError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether no request has reached the server for a second."""
        return self._lost is not None

    def answered(self) -> None:
        """A request has reached the server."""
        self._since = None

    def failed(self, error: ExpertError) -> None:
        """A request has failed; a moment's rest if it has not reached the server."""
        if not isinstance(error, ServerUnreachableError):
            self.answered()
            return
        since, now = self._since, time.monotonic()
        if since is None:
            self._since = now
        elif now - since >= _LOST_SECONDS:
            self._lost = error
        time.sleep(_RETRY_SECONDS)

    def check(self) -> None:
        """Raises BenchError if the server is lost."""
        if self._lost is not None:
            raise BenchError(f"{self._lost} (for {_LOST_SECONDS:g} s)")


class Load:
    """The threads of one case; each has a request of its own."""

    def __init__(self, case: Case, requests: list[Request], watch: "Reachability | None" = None) -> None:
        self._case = case
        self._requests = requests
        self._latencies: list[float] = []  # appending is atomic
        self._late: list[float] = []
        self._errors: list[str] = []
        self._unsent = 0
        self._watch = watch or Reachability()

    def warm_up(self) -> None:
        """Send as in a closed loop for a while, at least once, and forget it. Raises BenchError."""
        self._closed_loop(time.monotonic() + self._case.warmup)
        for results in (self._latencies, self._errors):
            results.clear()

    def run(self, start: float, due: npt.NDArray[np.float64] | None, patience: float) -> Sample:
        """Measure from `start` on; `due` are the seconds after it when requests of an open loop are due.

        Raises BenchError if no request has reached the server for a second.
        """
        time.sleep(max(0.0, start - time.monotonic()))
        cpu = time.process_time()
        if due is None:
            self._closed_loop(start + self._case.seconds)
        else:
            self._open_loop(start + due, start + self._case.seconds + patience)
        return Sample(
            latencies=np.array(self._latencies),
            late=np.array(self._late),
            errors=Counter(self._errors),
            unsent=self._unsent,
            seconds=time.monotonic() - start,
            cpu_seconds=time.process_time() - cpu,
        )

    def _closed_loop(self, end: float) -> None:
        def loop(request: Request) -> None:
            while True:
                began = time.monotonic()
                self._send(request, began)
                if time.monotonic() >= end or self._watch.is_lost:
                    return

        self._in_threads(loop)

    def _open_loop(self, due: npt.NDArray[np.float64], give_up: float) -> None:
        times = due.tolist()
        numbers = itertools.count()

        def loop(request: Request) -> None:
            while not self._watch.is_lost and (number := next(numbers)) < len(times):
                at = times[number]
                if (wait := at - time.monotonic()) > 0:
                    time.sleep(wait)
                sent = time.monotonic()
                if sent >= give_up:
                    return
                self._late.append(sent - at)
                self._send(request, at)

        self._in_threads(loop)
        self._unsent = len(times) - len(self._late)

    def _send(self, request: Request, since: float) -> None:
        try:
            request()
        except ExpertError as error:
            self._errors.append(type(error).__name__)
            self._watch.failed(error)
        else:
            self._latencies.append(time.monotonic() - since)
            self._watch.answered()

    def _in_threads(self, loop: Callable[[Request], None]) -> None:
        threads = [threading.Thread(target=loop, args=(request,)) for request in self._requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._watch.check()


def _request(
    client: ExpertClient, target: BenchTarget, tokens: int, generator: np.random.Generator
) -> Request:
    values = hidden_states(tokens, target.hidden_size, target.datatype, generator)
    out = np.empty_like(values)  # as a caller that cares for latency does
    return lambda: client.infer(target.model, values, out=out)


def _due(case: Case, rate: float | None, generator: np.random.Generator) -> npt.NDArray[np.float64] | None:
    """Times of a Poisson process over the case's seconds."""
    if rate is None:
        return None
    return np.sort(generator.uniform(0, case.seconds, generator.poisson(rate * case.seconds)))
