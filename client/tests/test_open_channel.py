"""Channels without copies, of threads and of event loops: slots, tickets, and what callers can do wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertd_client import (
    DeadlineError,
    ExpertClient,
    InvalidRequestError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.channel import layout, link
from tests.callers import AnyCaller, AnyChannel, Connect, one_client
from tests.expertd import (
    HIDDEN,
    LAYER,
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    RunningServer,
    channels_in,
    running_server,
)
from tests.late import check_late_requests
from tests.rounding import assert_rounded

pytestmark = pytest.mark.slow  # a server process
RNG = np.random.default_rng(14)
X = RNG.standard_normal((40, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((40, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
WEIGHTS = RNG.random((40, TOP_K), dtype=np.float32)


@pytest.fixture
def client(connect: Connect, sharing_server: RunningServer) -> AnyCaller:
    return connect(sharing_server.url)


@pytest.fixture
def channel(client: AnyCaller) -> Iterator[AnyChannel]:
    with client.open_channel(MODEL, max_tokens=16, num_slots=2) as opened:
        yield opened


def test_slots_are_arrays_of_the_models_datatype(channel: AnyChannel) -> None:
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
    arrays = [
        array
        for slot in channel.slots
        for array in (slot.hidden_states, slot.topk_ids, slot.topk_weights, slot.output)
    ]
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays)), "they do not overlap"


def test_requests_in_any_order(client: AnyCaller, channel: AnyChannel) -> None:
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
        assert_rounded(output, expected[other][:5])
        assert_rounded(channel.wait(ticket), expected[one])
        assert ticket.compute_seconds > 0
        assert ticket.queue_seconds > 0


def test_a_request_that_nobody_waits_for_holds_nothing_up(client: AnyCaller, channel: AnyChannel) -> None:
    """Requests take the server's slots in turn, and those are more than the caller's, but not endless."""
    expected = client.infer(MODEL, X[:3])
    first, second = channel.slots
    first.hidden_states[:3] = X[:3]
    ticket = channel.submit(first, 3)
    for _ in range(40):
        channel.wait(channel.submit(second, 1))
    assert channel.is_answered(ticket)
    assert_rounded(channel.wait(ticket), expected)


def test_routing_by_the_caller(client: AnyCaller, channel: AnyChannel) -> None:
    slot = channel.slots[0]
    slot.hidden_states[:] = X[:16]
    slot.topk_ids[:], slot.topk_weights[:] = IDS[:16], WEIGHTS[:16]
    routed = channel.infer(slot, 16, routed=True).copy()
    np.testing.assert_allclose(
        routed, client.infer(MODEL, X[:16], IDS[:16], WEIGHTS[:16]), rtol=1e-4, atol=1e-5
    )
    slot.topk_ids[3, 1] = 99
    with pytest.raises(InvalidRequestError, match="topk_ids: expected") as caught:
        channel.wait(channel.submit(slot, 16, routed=True))
    assert caught.value.status == 400
    unrouted = channel.wait(channel.submit(slot, 16))
    np.testing.assert_allclose(unrouted, client.infer(MODEL, X[:16]), rtol=1e-4, atol=1e-5)


def test_tensors_in_the_same_memory(client: AnyCaller) -> None:
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


def test_misuse(client: AnyCaller, channel: AnyChannel) -> None:
    first, second = channel.slots
    assert channel.infer(first, 0).shape == (0, HIDDEN)
    assert channel.infer(first, 2, priority=255).shape == (2, HIDDEN)
    for number in (-1, 17):
        with pytest.raises(InvalidRequestError, match=rf"^num_tokens: expected 0 to 16, got {number}$"):
            channel.submit(first, number)
    with pytest.raises(InvalidRequestError, match=r"^timeout: expected a positive number"):
        channel.submit(first, 1, timeout=0)
    with pytest.raises(InvalidRequestError, match=r"^priority: expected an integer from 0 to 255, got 256$"):
        channel.submit(first, 1, priority=256)
    ticket = channel.submit(first, 1)
    with pytest.raises(InvalidRequestError, match=r"^slot 0: expected a free one, got one in use, not"):
        channel.submit(first, 1)
    channel.wait(channel.submit(second, 1))
    channel.wait(ticket)
    with pytest.raises(InvalidRequestError, match=r"^ticket: expected one that was not waited for"):
        channel.wait(ticket)
    with client.open_channel(MODEL, max_tokens=1) as other:
        foreign = other.submit(other.slots[0], 1)
        with pytest.raises(InvalidRequestError, match=r"^slot: expected one of this channel, got one of ano"):
            channel.submit(other.slots[1], 1)
        with pytest.raises(InvalidRequestError, match=r"^ticket: expected one of this channel, got one of a"):
            channel.wait(foreign)
        assert other.wait(foreign).shape == (1, HIDDEN)


@one_client
def test_a_channel_of_several_models(connect: Connect, tmp_path: Path) -> None:
    names = ["one", "two", "three"]
    layers = [{**LAYER, "name": name, "weights": {"seed": seed}} for seed, name in enumerate(names)]
    odd = {**LAYER, "name": "odd", "hidden_size": 2 * HIDDEN}
    with running_server(tmp_path, channels_in(tmp_path), layers=[*layers, odd]) as server:
        client = connect(server.url)
        with client.open_channel(names, max_tokens=16, num_slots=3) as channel:
            assert channel.models == tuple(names)
            assert len(server.channels()) == 1
            for _ in range(2):
                tickets = []
                for slot, name in zip(channel.slots, names, strict=True):
                    slot.hidden_states[:5] = X[:5]
                    tickets.append(channel.submit(slot, 5, model=name))
                for ticket, name in zip(tickets, names, strict=True):
                    output = channel.wait(ticket)
                    np.testing.assert_allclose(output, client.infer(name, X[:5]), rtol=1e-4, atol=1e-5)
            for model in (None, "odd"):
                with pytest.raises(InvalidRequestError, match=r"^model: expected one or two or three, got "):
                    channel.submit(channel.slots[0], 1, model=model)
            channel.infer(channel.slots[0], 1, model="two")  # the slot is free
        for wrong in ([], ["one", "one"], ["one", "odd"], ["one", ""]):
            with pytest.raises(InvalidRequestError, match="expected"):
                client.open_channel(wrong, max_tokens=16)
        with pytest.raises(UnknownModelError):
            client.open_channel(["one", "four"], max_tokens=16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"num_slots": 0}, "num_slots: expected at least 1, got 0"),
        ({"num_slots": 5000}, "num_slots: expected at most 4096, got 5000"),
        ({"datatype": "FP8"}, "datatype: expected BF16, FP16, FP32 or None, got 'FP8'"),
        ({"output_datatype": "x"}, "output_datatype: expected BF16"),
        ({"device": "tpu"}, "device: expected None, cpu or cuda:0, got 'tpu'"),
        ({"max_tokens": 1 << 30}, "max_tokens: expected 1 to "),
    ],
)
def test_options_that_cannot_work(client: AnyCaller, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{text}"):
        client.open_channel(MODEL, **{"max_tokens": 1, **options})


def test_threads_that_ask_at_once_whether_the_server_is_there(client: AnyCaller) -> None:
    """A poll object may not be used by two threads at a time."""
    with client.open_channel(MODEL, max_tokens=1) as channel:
        opened, asked = channel._link, list[object]()

        class Lost:
            def poll(self, _: int) -> list[object]:
                assert not asked, "concurrent poll() invocation"
                asked.append(self)
                assert opened.is_alive()
                return []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(opened, "_lost", Lost())
            assert opened.is_alive()
        assert asked


def test_channels_that_are_refused(client: AnyCaller, connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError):
        client.open_channel("other", max_tokens=1)
    with pytest.raises(InvalidRequestError, match=r"^model: expected a name, got ''$"):
        client.open_channel("", max_tokens=1)
    with pytest.raises(InvalidRequestError, match=r"^channels\.max_bytes: expected"):
        client.open_channel(MODEL, max_tokens=4096, num_slots=1000)
    refused = pytest.raises(TransportUnavailableError, match=r"setting channels.socket")
    with running_server(tmp_path, "channels.socket=") as server, refused as caught:
        connect(server.url).open_channel(MODEL, max_tokens=1)
    assert caught.type is TransportUnavailableError


def test_spinning_or_not(sharing_server: RunningServer) -> None:
    with ExpertClient(sharing_server.url) as client:
        for seconds in (0.0, 10.0):
            with client.open_channel(MODEL, max_tokens=4, spin_seconds=seconds) as channel:
                for _ in range(20):
                    assert channel.wait(channel.submit(channel.slots[0], 4)).shape == (4, HIDDEN)
        with pytest.raises(InvalidRequestError, match=r"^spin_seconds: expected at least 0, got -1$"):
            client.open_channel(MODEL, max_tokens=1, spin_seconds=-1)


def test_an_earlier_request_whose_answer_is_overdue(
    channel: AnyChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for the server's slot that comes next, for as long as its own timeout allows."""
    first, second = channel.slots
    ticket = channel.submit(first, 3, timeout=60)
    for _ in range(7):
        channel.wait(channel.submit(second, 1))  # the others of the server's eight slots
    with monkeypatch.context() as patch:
        is_answered = channel._link.is_answered
        patch.setattr(channel._link, "is_answered", lambda number: number > 1 and is_answered(number))
        patch.setattr(channel._link, "spin", lambda _: False)
        with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
            channel.submit(second, 1, timeout=0.05)
    assert channel.infer(second, 1).shape == (1, HIDDEN)
    assert channel.wait(ticket).shape == (3, HIDDEN)


@pytest.mark.parametrize("timeout", [1e15, 1e300, float("inf")])
def test_a_timeout_may_be_longer_than_a_line_can_say(client: AnyCaller, timeout: float) -> None:
    with client.open_channel(MODEL, max_tokens=1) as channel:
        assert channel.infer(channel.slots[0], 1, timeout=timeout).shape == (1, HIDDEN)


def test_timeouts_that_pass_at_about_the_time_of_the_answer(client: AnyCaller) -> None:
    with client.open_channel(MODEL, max_tokens=256, num_slots=2, device="cpu") as channel:
        outcomes = check_late_requests(client, channel, 25)
        assert outcomes["right"], outcomes
        assert outcomes["DeadlineError"], outcomes


def test_sequence_numbers_are_fenced_on_weakly_ordered_machines(
    channel: AnyChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all that a request has written, and before all that is read of its answer."""
    fences: list[bool] = []
    slot = channel.slots[0]
    words, first = channel._link.words, layout.HEADER_BYTES // layout.WORD_BYTES
    monkeypatch.setattr(link, "fence", lambda: fences.append(words[first] == 1))
    channel.wait(channel.submit(slot, 1))
    assert fences == [False, True]  # before the request's number was written, and after
