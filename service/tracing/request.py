"""What is known of an infer request that has ended; its spans are made of it later, on another thread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expertd.service.engine.steps import StepTimes
from expertd.service.moe.step.stages import TimedStep
from expertd.service.tracing.context import Headers, TraceContext


class Rpc(NamedTuple):
    """A gRPC call: its full method, and its metadata with the caller's trace context.

    code  the name of gRPC's code for a status of HTTP, and the reason of a refusal
    """

    method: str
    headers: Headers
    code: Callable[[int, str | None], str]


@dataclass(slots=True)  # not frozen: that takes longer
class TracedRequest:
    """A request; started and ended by time.perf_counter.

    context  None: the caller sent none
    times    None: it was refused before its queue
    rpc      None: it came over HTTP
    headers  of HTTP
    tokens   None: it was refused before they were known
    timed    its steps whose stages were timed
    """

    started: float
    ended: float
    context: TraceContext | None
    times: StepTimes | None
    rpc: Rpc | None
    headers: Headers
    is_tls: bool
    model: str
    request_id: str | None
    tokens: int | None
    status: int
    reason: str | None
    timed: Sequence[TimedStep] = ()
