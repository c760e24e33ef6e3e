"""Which transport a client takes."""

import logging
from collections.abc import Callable

import numpy as np
import pytest

from expertd_client import ExpertClient, InvalidRequestError, TransportUnavailableError
from expertd_client.address import parse_address
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.transport import Choice, Transport, TransportName
from tests.callers import Connect
from tests.fakes import echoing, fake_server

HERE = parse_address("http://localhost:1")
THERE = parse_address("http://experts:1")


class Fake:
    """A transport that cannot be used, from the start or from its first use on."""

    def __init__(self, name: TransportName, from_the_start: bool = False) -> None:
        self.name = name
        self.closed = False
        if from_the_start:
            raise TransportUnavailableError(f"{name}: expected a server that offers it, got another")

    def infer(self, call: LayerCall, deadline: Deadline) -> None:
        raise TransportUnavailableError(f"{self.name}: expected shared memory, got none")

    def close(self) -> None:
        self.closed = True


def test_auto_takes_the_fastest_for_a_server_on_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    factories = {name: lambda name=name: Fake(name) for name in ("http", "shared_memory", "channel")}
    with caplog.at_level(logging.INFO, "expertd_client"):
        assert Choice("auto", HERE, factories).current.name == "channel"
        assert Choice("auto", THERE, factories).current.name == "http"
    assert caplog.messages == [
        "transport channel: server http://localhost:1",
        "transport http: server http://experts:1",
    ]
    assert Choice("shared_memory", THERE, factories).current.name == "shared_memory"


def test_it_falls_back_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    factories = {
        "channel": lambda: Fake("channel", from_the_start=True),
        "shared_memory": lambda: Fake("shared_memory"),
        "http": lambda: Fake("http"),
    }
    choice = Choice("auto", HERE, factories)
    first = choice.current
    assert first.name == "shared_memory"
    error = TransportUnavailableError("region: expected permission, got none")
    choice.fall_back(first, error)
    choice.fall_back(first, error)  # of another thread's call, which failed at the same time
    assert (choice.current.name, first.closed) == ("http", True)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "transport channel: channel: expected a server that offers it, got another; taking the next",
        "transport shared_memory: region: expected permission, got none; taking the next",
    ]
    with pytest.raises(TransportUnavailableError, match="expected permission"):
        choice.fall_back(choice.current, error)


def test_the_same_call_is_made_with_the_next_transport() -> None:
    with fake_server(echoing) as server, ExpertClient(server.url) as client:
        http = client._choice.current
        factories: dict[str, Callable[[], Transport]] = {
            "channel": lambda: Fake("channel"),
            "http": lambda: http,
        }
        client._choice = Choice("auto", HERE, factories)
        before = client.transport
        x = np.ones((2, 3), np.float32)
        np.testing.assert_array_equal(client.infer("m", x), x)
        assert (before, client.transport) == ("channel", "http")
    assert len(server.requests) == 1


def test_a_transport_that_was_asked_for_is_not_replaced() -> None:
    choice = Choice("channel", HERE, {"channel": lambda: Fake("channel"), "http": lambda: Fake("http")})
    with pytest.raises(TransportUnavailableError, match="expected memory"):
        choice.fall_back(choice.current, TransportUnavailableError("x: expected memory, got none"))


@pytest.mark.parametrize("name", ["auto", "http"])
def test_this_version_has_http(connect: Connect, name: str) -> None:
    assert connect("http://localhost:1", transport=name).client.transport == "http"


@pytest.mark.parametrize("name", ["channel", "shared_memory"])
def test_it_does_not_claim_to_have_others(connect: Connect, name: str) -> None:
    text = rf"^transport: expected auto or http \(this version\), got {name}$"
    with pytest.raises(TransportUnavailableError, match=text):
        connect("http://localhost:1", transport=name)


def test_unknown_transports(connect: Connect) -> None:
    with pytest.raises(InvalidRequestError, match=r"^transport: expected auto, channel, shared_memory, http"):
        connect("http://localhost:1", transport="carrier pigeon")
