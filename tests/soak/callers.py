"""Callers of every kind; each checks its answers. Each function is a process of its own."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import grpc
import ml_dtypes
import numpy as np
import numpy.typing as npt

from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.tables import SERVICE
from expertd_client import (
    AccessDeniedError,
    AsyncChannel,
    AsyncExpertClient,
    DeadlineError,
    ExpertClient,
    ExpertError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from tests.service.keys import key_of
from tests.soak.plan import Plan, priority, seeded
from tests.soak.reference import MAX_TOKENS, Sample
from tests.soak.server import COMING
from tests.soak.tally import Phase, Tally

_SHORT_SECONDS = 0.002  # of some requests, which then time out
_PAUSE_SECONDS = 0.05  # after an error
_REFUSED_SECONDS = 0.005  # after a refusal
Transport = Literal["http", "channel"]


def over_http(plan: Plan, tally: Tally) -> None:
    """Blocking calls from two threads, over one client."""
    _with_client(plan, tally, "http", 2)


def of_a_changing_model(plan: Plan, tally: Tally) -> None:
    """Calls of a model that is unloaded and loaded again, over HTTP and a channel."""
    lock = threading.Lock()
    ways: tuple[Transport, ...] = ("http", "channel")
    together(partial(_with_client, plan, tally, way, 1, COMING, lock) for way in ways)


def with_a_changing_key(plan: Plan, tally: Tally) -> None:
    """A key that comes and goes: refused or right, never anything else."""
    chance = seeded(tally)
    with ExpertClient(plan.url, key=key_of("changing"), transport="http", max_retries=0) as client:
        while not plan.stage.is_over:
            sample = plan.pick(chance)
            call = partial(_infer, client, "tiny", sample)
            _judge(plan, tally, sample, call, may_be_denied=True)
            time.sleep(_PAUSE_SECONDS)


def _with_client(
    plan: Plan,
    tally: Tally,
    transport: Transport,
    num_threads: int = 1,
    model: str = "tiny",
    lock: Any = None,
) -> None:
    lock = lock or threading.Lock()

    def loop(client: ExpertClient, chance: random.Random) -> None:
        while not plan.stage.is_over:
            sample = plan.pick(chance)
            timeout = _SHORT_SECONDS if chance.random() < 0.02 else None
            call = partial(_infer, client, model, sample, timeout=timeout, priority=priority(chance))
            late, gone = timeout is not None, model == COMING
            _judge(plan, tally, sample, call, may_be_late=late, may_be_gone=gone, lock=lock)
            time.sleep(plan.pause)

    with ExpertClient(plan.url, key=plan.key, transport=transport, max_retries=0) as client:
        together(partial(loop, client, seeded(tally)) for _ in range(num_threads))


def _infer(client: ExpertClient, model: str, sample: Sample, **options: Any) -> npt.NDArray[Any]:
    output: npt.NDArray[Any] = client.infer(
        model, sample.hidden_states, sample.topk_ids, sample.topk_weights, **options
    )
    return output


def together(works: Iterable[Callable[[], None]]) -> None:
    """Have each done by a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _judge(
    plan: Plan,
    tally: Tally,
    sample: Sample,
    call: Callable[[], npt.NDArray[Any]],
    may_be_late: bool = False,
    may_be_denied: bool = False,
    may_be_gone: bool = False,
    lock: Any = None,
) -> None:
    """Make one call, and count what becomes of it."""
    mark, began = plan.stage.mark, time.perf_counter()
    took = 0.0
    try:
        output = call()
        outcome = "right" if sample.is_right(output) else "wrong"
        took = time.perf_counter() - began
    except ExpertError as error:
        outcome = outcome_of(error, plan, mark, may_be_late, may_be_denied, may_be_gone)
    with lock or threading.Lock():
        tally.count("sent")
        if outcome == "right":
            tally.took(took)
        else:
            tally.count(outcome)
    if outcome in ("cut", "lost", "failed") or plan.stage.phase is not Phase.SERVING:
        time.sleep(_PAUSE_SECONDS)
    elif outcome == "refused":
        time.sleep(_REFUSED_SECONDS)


def outcome_of(
    error: ExpertError,
    plan: Plan,
    mark: int,
    may_be_late: bool = False,
    may_be_denied: bool = False,
    may_be_gone: bool = False,
    is_whole: bool = False,
) -> str:
    """What an error means for a request that was sent (`is_whole`: all of it) when the stage had `mark`."""
    if isinstance(error, ServerBusyError) or (isinstance(error, AccessDeniedError) and may_be_denied):
        return "refused"
    if isinstance(error, UnknownModelError) and may_be_gone:
        return "refused"
    if isinstance(error, DeadlineError) and may_be_late:
        return "refused"
    if isinstance(error, (ServerUnreachableError, TransportUnavailableError, DeadlineError)):
        if not plan.stage.owes_answer(mark, is_whole):
            return "cut"
        print(f"soak: lost: {type(error).__name__}: {error}", flush=True)
        return "lost"
    print(f"soak: {type(error).__name__}: {error}", flush=True)
    return "failed" if (error.status or 0) >= 500 else "wrong"


def through_channels(plan: Plan, tally: Tally) -> None:
    """A task for each slot of a channel; some cancel their requests."""
    asyncio.run(_channels(plan, tally))


async def _channels(plan: Plan, tally: Tally) -> None:
    while not plan.stage.is_over:
        try:
            async with (
                AsyncExpertClient(plan.url, key=plan.key, max_retries=0) as client,
                await client.open_channel("tiny", max_tokens=MAX_TOKENS, num_slots=plan.slots) as channel,
            ):
                await asyncio.gather(*(_slot(plan, tally, channel, slot) for slot in channel.slots))
        except ExpertError:
            await asyncio.sleep(_PAUSE_SECONDS)


async def _slot(plan: Plan, tally: Tally, channel: AsyncChannel, slot: Any) -> None:
    """Requests in one slot until the channel has ended, which the others may not have noticed yet."""
    chance = random.Random(slot.index)
    while not plan.stage.is_over:
        sample = plan.pick(chance, "FP32")
        tokens, routed = len(sample.hidden_states), sample.topk_ids is not None
        slot.hidden_states[:tokens] = sample.hidden_states
        if routed:
            slot.topk_ids[:tokens], slot.topk_weights[:tokens] = sample.topk_ids, sample.topk_weights
        mark, began, is_whole = plan.stage.mark, time.perf_counter(), False
        tally.count("sent")
        try:
            ticket = await channel.submit(slot, tokens, routed=routed, priority=priority(chance))
            mark, is_whole = plan.stage.mark, True
            if chance.random() < 0.005:
                tally.count("cancelled")
                await _left(channel, ticket)
                continue
            output = await channel.wait(ticket)
        except ExpertError as error:
            tally.count(outcome_of(error, plan, mark, is_whole=is_whole))
            if isinstance(error, ServerUnreachableError):
                return
            await asyncio.sleep(max(_REFUSED_SECONDS, plan.pause))
            continue
        if sample.is_right(output):
            tally.took(time.perf_counter() - began)
        else:
            tally.count("wrong")
        await asyncio.sleep(plan.pause)


async def _left(channel: AsyncChannel, ticket: Any) -> None:
    """Cancel the task that waits for a request; the slot is in use until the server is done with it."""
    task = asyncio.ensure_future(channel.wait(ticket))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    while not channel.is_answered(ticket):
        await asyncio.sleep(1e-3)


def over_grpc(plan: Plan, tally: Tally) -> None:
    """Unary calls, some of which are cancelled or have a short deadline."""
    chance = seeded(tally)
    metadata = (("authorization", f"Bearer {plan.key}"),)
    with grpc.insecure_channel(
        f"127.0.0.1:{plan.grpc_port}", [("grpc.max_reconnect_backoff_ms", 200)]
    ) as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=CLASSES["ModelInferRequest"].SerializeToString,
            response_deserializer=CLASSES["ModelInferResponse"].FromString,
        )
        while not plan.stage.is_over:
            sample = plan.pick(chance)
            message = CLASSES["ModelInferRequest"](model_name="tiny")
            for name, (datatype, values) in sample.tensors.items():
                message.inputs.add(name=name, datatype=datatype, shape=values.shape)
                message.raw_input_contents.append(values.tobytes())
            message.parameters["priority"].int64_param = priority(chance)
            mark, began, what = plan.stage.mark, time.perf_counter(), chance.random()
            seconds = _SHORT_SECONDS if what < 0.02 else 30
            # Else calls fail for a moment after a restart, because the library does not try to connect.
            call = infer.future(message, metadata=metadata, timeout=seconds, wait_for_ready=True)
            tally.count("sent")
            if what > 0.98:
                call.cancel()
                tally.count("cancelled")
                continue
            try:
                answer = call.result()
            except grpc.RpcError as error:
                tally.count(outcome_of_rpc(error, plan, mark, what < 0.02))
                time.sleep(_REFUSED_SECONDS if plan.stage.phase is Phase.SERVING else _PAUSE_SECONDS)
                continue
            dtype = np.float32 if answer.outputs[0].datatype == "FP32" else ml_dtypes.bfloat16
            output = np.frombuffer(answer.raw_output_contents[0], dtype)
            if sample.is_right(output.reshape(tuple(answer.outputs[0].shape))):
                tally.took(time.perf_counter() - began)
            else:
                tally.count("wrong")
            time.sleep(plan.pause)


def outcome_of_rpc(error: Any, plan: Plan, mark: int, may_be_late: bool) -> str:
    if not plan.stage.owes_answer(mark):
        return "cut"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "refused" if may_be_late else "lost"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        has_answered = any(name == "grpc-retry-pushback-ms" for name, _ in error.trailing_metadata() or ())
        is_late = may_be_late and error.details().startswith("timeout: ")  # and another try would be, too
        if has_answered or is_late or "shutting down" in error.details():
            return "refused"
        print(f"soak: {error.details()}", flush=True)
        return "lost"
    print(f"soak: {error.code()}: {error.details()}", flush=True)
    return "failed"
