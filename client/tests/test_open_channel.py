"""Channels without copies: slots, tickets, and what can go wrong with them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertd_client import (
    Channel,
    DeadlineError,
    ExpertClient,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.channel import layout, link
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer, running_server, sharing
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process
RNG = np.random.default_rng(14)
X = RNG.standard_normal((40, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((40, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
WEIGHTS = RNG.random((40, TOP_K), dtype=np.float32)


@pytest.fixture
def client(sharing_server: RunningServer) -> Iterator[ExpertClient]:
    with ExpertClient(sharing_server.url, transport="http") as made:
        yield made


@pytest.fixture
def channel(client: ExpertClient) -> Iterator[Channel]:
    with client.open_channel(MODEL, max_tokens=16, num_slots=2) as opened:
        yield opened


def test_slots_are_arrays_of_the_models_datatype(channel: Channel) -> None:
    assert (channel.max_tokens, channel.hidden_size, channel.top_k) == (16, HIDDEN, TOP_K)
    assert len(channel.slots) == 2
    for slot in channel.slots:
        for array, shape, dtype in (
            (slot.hidden_states, (16, HIDDEN), np.float32),
            (slot.topk_ids, (16, TOP_K), np.int32),
            (slot.topk_weights, (16, TOP_K), np.float32),
            (slot.output, (16, HIDDEN), np.float32),
        ):
            assert (array.shape, array.dtype) == (shape, dtype)
            assert array.ctypes.data % 64 == 0


def test_slots_do_not_overlap(channel: Channel) -> None:
    arrays = [
        array
        for slot in channel.slots
        for array in (slot.hidden_states, slot.topk_ids, slot.topk_weights, slot.output)
    ]
    for number, array in enumerate(arrays):
        array[:] = number
    for number, array in enumerate(arrays):
        assert (array == number).all()


def test_requests_in_any_order(client: ExpertClient, channel: Channel) -> None:
    expected = [client.infer(MODEL, X[start : start + 8]) for start in range(0, 40, 8)]
    first, second = channel.slots
    for round_number in range(30):  # more than there are slots on the server's side
        one, other = round_number % 5, (round_number + 2) % 5
        second.hidden_states[:8] = X[one * 8 : one * 8 + 8]
        ticket = channel.submit(second, 8)
        first.hidden_states[:5] = X[other * 8 : other * 8 + 5]
        last = channel.submit(first, 5)
        output = channel.wait(last)
        assert np.shares_memory(output, first.output)
        np.testing.assert_allclose(output, expected[other][:5], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(channel.wait(ticket), expected[one], rtol=1e-4, atol=1e-5)
        assert ticket.compute_seconds > 0
        assert ticket.queue_seconds > 0


def test_a_request_that_nobody_waits_for_holds_nothing_up(client: ExpertClient, channel: Channel) -> None:
    """Requests take the server's slots in turn, and those are more than the caller's, but not endless."""
    expected = client.infer(MODEL, X[:3])
    first, second = channel.slots
    first.hidden_states[:3] = X[:3]
    ticket = channel.submit(first, 3)
    for _ in range(40):
        channel.wait(channel.submit(second, 1))
    assert channel.is_answered(ticket)
    np.testing.assert_allclose(channel.wait(ticket), expected, rtol=1e-4, atol=1e-5)


def test_routing_by_the_caller(client: ExpertClient, channel: Channel) -> None:
    slot = channel.slots[0]
    slot.hidden_states[:] = X[:16]
    slot.topk_ids[:], slot.topk_weights[:] = IDS[:16], WEIGHTS[:16]
    routed = channel.wait(channel.submit(slot, 16, routed=True)).copy()
    np.testing.assert_allclose(
        routed, client.infer(MODEL, X[:16], IDS[:16], WEIGHTS[:16]), rtol=1e-4, atol=1e-5
    )
    slot.topk_ids[3, 1] = 99
    with pytest.raises(InvalidRequestError, match="topk_ids: expected") as caught:
        channel.wait(channel.submit(slot, 16, routed=True))
    assert caught.value.status == 400
    unrouted = channel.wait(channel.submit(slot, 16))
    np.testing.assert_allclose(unrouted, client.infer(MODEL, X[:16]), rtol=1e-4, atol=1e-5)


def test_tensors_in_the_same_memory(client: ExpertClient) -> None:
    options: dict[str, Any] = {"datatype": "BF16", "output_datatype": "FP32", "device": torch.device("cpu")}
    rows = torch.from_numpy(X).to(torch.bfloat16)
    with client.open_channel(MODEL, max_tokens=40, **options) as channel:
        slot = channel.slots[3]
        assert (slot.hidden_states.dtype, slot.output.dtype) == (torch.bfloat16, torch.float32)
        slot.hidden_states[:40] = rows
        output = channel.wait(channel.submit(slot, 40))
        assert output.data_ptr() == slot.output.data_ptr()
        expected = client.infer(MODEL, rows, output_dtype=torch.float32)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_bits_of_bfloat16(client: ExpertClient) -> None:
    bits = (X.view(np.uint32) >> 16).astype(np.uint16)
    with client.open_channel(MODEL, max_tokens=40, datatype="BF16") as channel:
        slot = channel.slots[0]
        slot.hidden_states[:] = bits
        np.testing.assert_array_equal(channel.wait(channel.submit(slot, 40)), client.infer(MODEL, bits))


def test_no_tokens(channel: Channel) -> None:
    assert channel.wait(channel.submit(channel.slots[0], 0)).shape == (0, HIDDEN)


def test_misuse(channel: Channel) -> None:
    first, second = channel.slots
    for number in (-1, 17):
        with pytest.raises(InvalidRequestError, match=rf"^num_tokens: expected 0 to 16, got {number}$"):
            channel.submit(first, number)
    with pytest.raises(InvalidRequestError, match=r"^timeout: expected a positive number"):
        channel.submit(first, 1, timeout=0)
    ticket = channel.submit(first, 1)
    with pytest.raises(InvalidRequestError, match=r"^slot 0: expected a free one, got one in use, not"):
        channel.submit(first, 1)
    channel.wait(channel.submit(second, 1))
    channel.wait(ticket)
    with pytest.raises(InvalidRequestError, match=r"^ticket: expected one that was not waited for"):
        channel.wait(ticket)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"num_slots": 0}, "num_slots: expected at least 1, got 0"),
        ({"num_slots": 5000}, "num_slots: expected at most 4096, got 5000"),
        ({"datatype": "FP8"}, "datatype: expected BF16, FP16, FP32 or None, got 'FP8'"),
        ({"output_datatype": "x"}, "output_datatype: expected BF16"),
        ({"device": "tpu"}, "device: expected None, cpu or cuda:0, got 'tpu'"),
        ({"spin_seconds": -1}, "spin_seconds: expected at least 0, got -1"),
        ({"max_tokens": 1 << 30}, "max_tokens: expected 1 to "),
    ],
)
def test_options_that_cannot_work(client: ExpertClient, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{text}"):
        client.open_channel(MODEL, **{"max_tokens": 1, **options})


def test_channels_that_are_refused(client: ExpertClient, server: RunningServer) -> None:
    with pytest.raises(UnknownModelError):
        client.open_channel("other", max_tokens=1)
    with pytest.raises(ServerBusyError, match=r"^channels\.max_bytes: expected"):
        client.open_channel(MODEL, max_tokens=4096, num_slots=1000)
    with (
        ExpertClient(server.url) as without,
        pytest.raises(TransportUnavailableError, match=r"setting channels.socket"),
    ):
        without.open_channel(MODEL, max_tokens=1)


def test_spinning_or_not(client: ExpertClient) -> None:
    for seconds in (0.0, 10.0):
        with client.open_channel(MODEL, max_tokens=4, spin_seconds=seconds) as channel:
            for _ in range(20):
                assert channel.wait(channel.submit(channel.slots[0], 4)).shape == (4, HIDDEN)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path, *sharing(tmp_path)) as running:
        yield running


def test_a_deadline_and_the_slot_afterwards(own_server: RunningServer) -> None:
    with ExpertClient(own_server.url) as client, client.open_channel(MODEL, max_tokens=4) as channel:
        slot = channel.slots[0]
        with own_server.stopped():
            ticket = channel.submit(slot, 4, timeout=0.05)
            for _ in range(2):
                with pytest.raises(DeadlineError):
                    channel.wait(ticket)
            with pytest.raises(InvalidRequestError, match=r"^slot 0: expected a free one, got one in use"):
                channel.submit(slot, 4)
        wait_for(lambda: channel.is_answered(ticket), "the server is done with it")
        slot.hidden_states[:] = X[:4]
        output = channel.wait(channel.submit(slot, 4))
        np.testing.assert_allclose(output, client.infer(MODEL, X[:4]), rtol=1e-4, atol=1e-5)


def test_a_killed_server(own_server: RunningServer) -> None:
    with ExpertClient(own_server.url) as client, client.open_channel(MODEL, max_tokens=4) as channel:
        channel.slots[0].hidden_states[:] = 1
        with own_server.stopped():
            tickets = [channel.submit(slot, 4) for slot in channel.slots]
            own_server.process.kill()
        for ticket in tickets:
            with pytest.raises(ServerUnreachableError, match=r"^channel: expected an answer, got its end$"):
                channel.wait(ticket)
        assert channel.slots[0].hidden_states.sum() == 4 * HIDDEN  # still ours


def test_a_closed_channel(client: ExpertClient, sharing_server: RunningServer) -> None:
    channel = client.open_channel(MODEL, max_tokens=4)
    slot = channel.slots[0]
    channel.wait(channel.submit(slot, 1))
    channel.close()
    channel.close()
    with pytest.raises(ServerUnreachableError):
        channel.submit(slot, 1)
    slot.hidden_states[:] = 0  # memory that is still mapped
    wait_for(lambda: not sharing_server.channels(), "the server has closed it")


def test_a_channel_that_is_dropped_is_closed(client: ExpertClient, sharing_server: RunningServer) -> None:
    client.open_channel(MODEL, max_tokens=4)
    wait_for(lambda: not sharing_server.channels(), "the server has closed it")


def test_channels_of_several_threads(client: ExpertClient) -> None:
    expected = client.infer(MODEL, X[:8])
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with client.open_channel(MODEL, max_tokens=8, num_slots=1) as channel:
                for _ in range(50):
                    channel.slots[0].hidden_states[:] = X[:8]
                    output = channel.wait(channel.submit(channel.slots[0], 8))
                    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_sequence_numbers_are_fenced_on_weakly_ordered_machines(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all that a request has written, and before all that is read of its answer."""
    fences: list[bool] = []
    slot = channel.slots[0]
    words, first = channel._link._words, layout.HEADER_BYTES // layout.WORD_BYTES
    monkeypatch.setattr(link, "WEAKLY_ORDERED", True)
    monkeypatch.setattr(link, "fence", lambda: fences.append(words[first] == 1))
    channel.wait(channel.submit(slot, 1))
    assert fences == [False, True]  # before the request's number was written, and after
