"""Callers over plain sockets, who know when a request was sent whole. Each function is a process."""

import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.service.apps import binary_request
from tests.service.regions import SYSTEM, region_input, region_output
from tests.service.shm import ShmFile, shm_file
from tests.service.sockets import Answer, connect, head, infer, read_answer
from tests.soak.callers import together
from tests.soak.plan import Plan, priority, seeded
from tests.soak.reference import Sample
from tests.soak.tally import Tally

_SLOW_TOKENS = 2
_REGION_BYTES = 1 << 20
_ALIGNMENT = 64
_PAUSE_SECONDS = 0.02  # after an answer in JSON, which takes the server longer than others
_ERROR_SECONDS = 0.05


def in_json(plan: Plan, tally: Tally) -> None:
    """Requests and answers in JSON, from two threads."""
    lock = threading.Lock()
    request_of = partial(json_request, key=plan.key)
    together(partial(_one_by_one, plan, tally, lock, request_of) for _ in range(2))


def in_regions(plan: Plan, tally: Tally) -> None:
    """Requests whose tensors are in a region of shared memory, which is registered again after a restart."""
    with shm_file(_REGION_BYTES) as file:
        _one_by_one(plan, tally, threading.Lock(), partial(placed_request, file=file, key=plan.key), file)


def _one_by_one(
    plan: Plan,
    tally: Tally,
    lock: threading.Lock,
    request_of: Callable[..., bytes],
    region: ShmFile | None = None,
) -> None:
    chance, sock = seeded(tally), None
    while not plan.stage.is_over:
        sample = plan.pick(chance, "FP32")
        request = request_of(sample, priority=priority(chance))
        mark, is_whole, answer = plan.stage.mark, False, None
        began = time.perf_counter()
        try:
            sock = sock or connect(plan.port)
            sock.sendall(request)
            mark, is_whole = plan.stage.mark, True
            answer = read_answer(sock)
            if region is not None and b"expected a registered region" in answer.body:
                sock.sendall(registration(region, plan.key))
                read_answer(sock)
                continue
        except (OSError, AssertionError):  # AssertionError: an end before the answer's
            pass
        took = time.perf_counter() - began
        with lock:
            tally.count("sent")
            _count(tally, sample, answer, took, plan.stage.owes_answer(mark, is_whole), region)
        if sock is not None and (answer is None or answer.headers.get("connection") == "close"):
            sock.close()
            sock = None
        time.sleep(_PAUSE_SECONDS if answer is not None else _ERROR_SECONDS)
    if sock is not None:
        sock.close()


def slow(plan: Plan, tally: Tally) -> None:
    """Requests that arrive byte by byte, and then are answered, or whose senders leave in the middle."""
    chance = seeded(tally)
    while not plan.stage.is_over:
        sample = plan.pick(chance, "FP32", _SLOW_TOKENS)
        request = binary(sample, plan.key)
        mark, is_whole, answer = plan.stage.mark, False, None
        tally.count("sent")
        began = time.perf_counter()
        try:
            with connect(plan.port) as sock:
                if not _trickled(sock, request, chance):
                    tally.count("cancelled")
                    continue
                mark, is_whole = plan.stage.mark, True
                answer = read_answer(sock)
        except (OSError, AssertionError):
            time.sleep(_ERROR_SECONDS)
        took = time.perf_counter() - began
        _count(tally, sample, answer, took, plan.stage.owes_answer(mark, is_whole))


def binary(sample: Sample, key: str) -> bytes:
    """A whole request with binary tensors, whose output will be binary."""
    tensors = {
        name: (datatype, list(values.shape), values.tobytes())
        for name, (datatype, values) in sample.tensors.items()
    }
    body, length = binary_request(tensors, parameters={"binary_data_output": True})
    return infer(body, length, f"Authorization: Bearer {key}")


def json_request(sample: Sample, key: str, priority: int = 0) -> bytes:
    """A whole request, of which nothing is binary."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": values.shape, "data": values.ravel().tolist()}
        for name, (datatype, values) in sample.tensors.items()
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"priority": priority}}).encode()
    line = "POST /v2/models/tiny/infer HTTP/1.1"
    return head(line, f"Authorization: Bearer {key}", f"Content-Length: {len(body)}") + body


def placed_request(sample: Sample, file: ShmFile, key: str, priority: int = 0) -> bytes:
    """A whole request whose tensors, the output first, are in the region of a file; writes them there."""
    inputs, offset = [], sample.output.nbytes
    for name, (datatype, values) in sample.tensors.items():
        file.write(values, offset)
        inputs.append(region_input(file.key, list(values.shape), offset, name, datatype, values.nbytes))
        offset += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    outputs = region_output(file.key, sample.output.nbytes, 0)
    body = json.dumps({"inputs": inputs, "outputs": outputs, "parameters": {"priority": priority}}).encode()
    return infer(body, len(body), f"Authorization: Bearer {key}")


def registration(file: ShmFile, key: str) -> bytes:
    """The request that registers a file as the region of its name."""
    body = json.dumps({"key": file.key, "byte_size": os.fstat(file.fd).st_size}).encode()
    line = f"POST {SYSTEM}/region/{file.key}/register HTTP/1.1"
    return head(line, f"Authorization: Bearer {key}", f"Content-Length: {len(body)}") + body


def outcome_of_answer(answer: Answer, sample: Sample, region: ShmFile | None = None) -> str:
    """What an answer means, whose output is compared."""
    if answer.status == 503:
        return "refused"
    if answer.status == 200:
        output = region.floats(*sample.output.shape) if region else _output(answer)
        return "right" if sample.is_right(output) else "wrong"
    print(f"soak: {answer.status}: {answer.body[:200]!r}", flush=True)
    return "failed" if answer.status >= 500 else "wrong"


def _count(
    tally: Tally,
    sample: Sample,
    answer: Answer | None,
    seconds: float,
    is_owed: bool,
    region: ShmFile | None = None,
) -> None:
    outcome = outcome_of_answer(answer, sample, region) if answer else "lost" if is_owed else "cut"
    if outcome == "right":
        tally.took(seconds)
    else:
        tally.count(outcome)


def _output(answer: Answer) -> np.ndarray[Any, np.dtype[np.float32]]:
    """In JSON, or binary."""
    length = answer.headers.get("inference-header-content-length")
    (output,) = json.loads(answer.body[: int(length)] if length else answer.body)["outputs"]
    values = np.frombuffer(answer.body[int(length) :], np.float32) if length else output["data"]
    return np.array(values, np.float32).reshape(output["shape"])


def _trickled(sock: socket.socket, request: bytes, chance: random.Random) -> bool:
    """Send a request, or a part of it; whether it is whole."""
    end = len(request) if chance.random() < 0.5 else chance.randrange(len(request))
    position = 0
    while position < end:
        step = chance.choice((1, 7, 100))
        sock.sendall(request[position : min(end, position + step)])
        position += step
        time.sleep(1e-3)
    if end < len(request):
        if chance.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return False
    return True
