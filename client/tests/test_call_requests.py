"""Device calls that a server's host launches, with the caller's kernels played by the test."""

import ctypes
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expertd_client import ExpertClient
from expertd_client.arenas import Sizes
from expertd_client.channel import call_requests
from expertd_client.channel.call_requests import CallAddresses, CallRequests
from expertd_client.channel.layout import REFUSED
from expertd_client.channel.opening import Opened, open_channel
from expertd_client.deadline import Deadline
from expertd_client.places import layout
from expertd_client.steps import Steps, run
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer
from tests.rounding import assert_rounded
from tests.waiting import wait_for

RNG = np.random.default_rng()
MAX_TOKENS = 5
Given = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]


def inputs(num_tokens: int) -> Given:
    """BF16 as its bits."""
    x = (RNG.standard_normal((num_tokens, HIDDEN), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ids = np.argsort(RNG.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    return x, ids, RNG.random((num_tokens, TOP_K), np.float32)


class HandMadeGpu:
    """Does what the kernels of device_call.cu do with a slot."""

    def __init__(self, addresses: CallAddresses) -> None:
        self._at = addresses
        self.sequence = 0

    def send(self, x: npt.NDArray[Any], ids: npt.NDArray[Any], weights: npt.NDArray[Any]) -> None:
        at = self._at
        for address, array in zip(
            (at.hidden_states, at.topk_ids, at.topk_weights), (x, ids, weights), strict=True
        ):
            ctypes.memmove(address, array.ctypes.data, array.nbytes)
        ctypes.memset(at.out, 0xFF, 2 * MAX_TOKENS * HIDDEN)
        self.sequence += 1
        ctypes.c_uint32.from_address(at.header + 8).value = len(x)
        ctypes.c_uint32.from_address(at.header + 60).value = 0
        ctypes.c_uint64.from_address(at.header).value = self.sequence

    @property
    def answer(self) -> int:
        return ctypes.c_uint64.from_address(self._at.answer).value

    def output(self, num_tokens: int) -> npt.NDArray[np.float32]:
        """That of the last call, once it is there."""
        wait_for(lambda: self.answer in (self.sequence, self.sequence | REFUSED), "an answer comes")
        assert self.answer == self.sequence
        data = ctypes.string_at(self._at.out, 2 * num_tokens * HIDDEN)
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(num_tokens, HIDDEN)


@contextmanager
def calling(client: ExpertClient, retry_seconds: float = 0.0) -> Iterator[tuple[HandMadeGpu, CallRequests]]:
    where = layout((MAX_TOKENS, HIDDEN), TOP_K, "BF16", "BF16")
    sizes = Sizes(MAX_TOKENS, 4096 * -(-where.num_bytes // 4096), 1)
    open_it = partial(open_channel, client._to, (MODEL,), sizes, None)

    def reopen(lost: Opened, deadline: Deadline) -> Steps[Opened]:
        return open_it(deadline, lost=lost)

    opened = run(open_it(Deadline(30), num_slots=1))
    calls = CallRequests(opened, where, reopen, Deadline(30, retry_seconds))
    assert opened.host is not None
    control = ctypes.addressof(ctypes.c_char.from_buffer(opened.link.control))
    calls.start(lambda: False)
    try:
        yield HandMadeGpu(calls.addresses(control, opened.host.ctypes.data)), calls
    finally:
        calls.close()


def check(gpu: HandMadeGpu, client: ExpertClient, given: Given) -> None:
    x, ids, weights = given
    expected = client.infer(MODEL, (x.astype(np.uint32) << 16).view(np.float32), ids, weights)
    output = gpu.output(len(x))
    if len(x):
        assert_rounded(output, expected)


def test_a_server_finds_calls_that_nobody_announces(sharing_server: RunningServer) -> None:
    """Of different sizes, one after another and after a while, without a ring."""
    with ExpertClient(sharing_server.url, transport="http") as client, calling(client) as (gpu, calls):
        for num_tokens in (1, 5, 3, 0, 2):
            given = inputs(num_tokens)
            gpu.send(*given)
            check(gpu, client, given)
        time.sleep(1.2)  # by then, the server looks less often
        given = inputs(4)
        gpu.send(*given)
        check(gpu, client, given)
        assert calls.is_answered


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_calls_are_passed_on_to_the_next_server(own_server: RunningServer, ends: signal.Signals) -> None:
    """One that waits while no server is there, and later ones."""
    with (
        ExpertClient(own_server.url, transport="http", retry_seconds=60) as client,
        calling(client, retry_seconds=60) as (gpu, _),
    ):
        given = inputs(2)
        gpu.send(*given)
        check(gpu, client, given)
        own_server.end(ends)
        given = inputs(3)
        gpu.send(*given)
        time.sleep(0.2)
        assert gpu.answer == gpu.sequence - 1
        own_server.start_again()
        check(gpu, client, given)
        for num_tokens in (5, 1):
            given = inputs(num_tokens)
            gpu.send(*given)
            check(gpu, client, given)


def test_calls_without_a_server_are_refused(own_server: RunningServer) -> None:
    with ExpertClient(own_server.url, transport="http") as client, calling(client) as (gpu, _):
        own_server.end()
        gpu.send(*inputs(2))
        wait_for(lambda: gpu.answer == gpu.sequence | REFUSED, "the call is refused")


def test_a_call_that_the_server_refuses(
    sharing_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_requests, "_LOOK_SECONDS", 0.05)
    with ExpertClient(sharing_server.url, transport="http") as client, calling(client) as (gpu, _):
        x, ids, weights = inputs(2)
        gpu.send(x, ids + NUM_EXPERTS, weights)
        wait_for(lambda: gpu.answer == gpu.sequence | REFUSED, "the call is refused")
