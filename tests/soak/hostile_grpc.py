"""A caller of gRPC whose messages are no requests, or lie; a process of its own."""

import random
import time
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import grpc

from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.tables import SERVICE
from tests.service.apps import rows
from tests.soak.plan import Plan, seeded
from tests.soak.reference import MAX_TOKENS
from tests.soak.tally import Tally

_SECONDS = 20.0  # until a refusal
_INFER = f"/{SERVICE}/ModelInfer"
_STREAM = f"/{SERVICE}/ModelStreamInfer"
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNIMPLEMENTED,
}


def wrong_calls(key: str) -> dict[str, tuple[str, str, bytes]]:
    """Method, key and message of calls that are refused, whoever makes them."""
    good, many = _request(2), _request(MAX_TOKENS + 1)
    good_bytes = good.SerializeToString()
    lies, unknown, typed, empty = _request(2), _request(2), _request(2), _request(2)
    lies.raw_input_contents[0] = lies.raw_input_contents[0][:-1]
    unknown.model_name = "none"
    typed.inputs[0].datatype = "BYTES"
    del empty.inputs[:]
    return {
        "no message": (_INFER, key, b"\xff" * 100),
        "a part of a message": (_INFER, key, good_bytes[:-100]),
        "an unknown method": (f"/{SERVICE}/Nothing", key, good_bytes),
        "another message": (_INFER, key, bytes(1000)),
        "no key": (_INFER, "", good_bytes),
        "an unknown key": (_INFER, "nobody", good_bytes),
        "no rights": (_INFER, "secret-of-metrics", good_bytes),
        "an unknown model": (_INFER, key, unknown.SerializeToString()),
        "too many tokens": (_INFER, key, many.SerializeToString()),
        "a lying size": (_INFER, key, lies.SerializeToString()),
        "a wrong datatype": (_INFER, key, typed.SerializeToString()),
        "no inputs": (_INFER, key, empty.SerializeToString()),
        "many fields": (_INFER, key, b"\x2a\x00" * 5000),
        "a huge message": (_INFER, key, b"\x3a\x80\x80\x80\x02" + bytes(1 << 22)),
        "no admin": (f"/{SERVICE}/RepositoryModelUnload", key, b"\x12\x04tiny"),
        "a stream that is cancelled": (_STREAM, key, good_bytes),
        "a stream of garbage": (_STREAM, key, b"\xff" * 10),
    }


def wrong_messages(plan: Plan, tally: Tally) -> None:
    """One wrong call after the other."""
    chance = seeded(tally)
    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{plan.grpc_port}", options) as channel:
        for name, (method, key, data) in cycle(wrong_calls(plan.key).items()):
            if plan.stage.is_over:
                return
            mark = plan.stage.mark
            tally.count("sent")
            try:
                outcome = _called(channel, method, key, data, chance)
            except grpc.RpcError as error:
                outcome = _outcome_of(error, not plan.stage.owes_answer(mark))
                if outcome in ("failed", "lost"):
                    print(f"soak: {name}: {error.code()}: {error.details()}", flush=True)
            if outcome == "wrong":
                print(f"soak: {name}: expected a refusal, got an answer", flush=True)
            tally.count(outcome)
            time.sleep(0.01)


def _called(channel: grpc.Channel, method: str, key: str, data: bytes, chance: random.Random) -> str:
    """What becomes of a call. Raises RpcError."""
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    options = {"metadata": metadata, "timeout": _SECONDS, "wait_for_ready": True}
    if method != _STREAM:
        channel.unary_unary(method)(data, **options)
        return "wrong"
    answers = channel.stream_stream(_STREAM)(_slowly(data, chance), **options)
    message = CLASSES["ModelStreamInferResponse"].FromString(next(answers))
    answers.cancel()
    return "refused" if message.error_message else "cancelled"


def _slowly(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """A message, and another one if the call is still there."""
    yield data
    time.sleep(0.05 * chance.random())
    yield data


def _outcome_of(error: Any, was_ended: bool) -> str:
    if error.code() in _REFUSALS:
        return "cut" if was_ended else "refused"
    if was_ended:
        return "cut"
    return "lost" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else "failed"


def _request(num_tokens: int) -> Any:
    message = CLASSES["ModelInferRequest"](model_name="tiny")
    values = rows(num_tokens)
    message.inputs.add(name="hidden_states", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    return message
