"""How many connections may be open, in all and from one address."""

import pytest

from expertd.service.http.connection_limits import ConnectionLimits, shown_peer
from expertd.service.settings.parts import Limits

LOCAL = ("127.0.0.1", 4000)


def limited(max_connections: int, of_one: int) -> ConnectionLimits:
    return ConnectionLimits(Limits(max_connections=max_connections, max_connections_per_address=of_one))


def test_connections_in_all_are_bounded() -> None:
    limits = limited(2, 2)
    first, _ = [limits.admit((f"10.0.0.{number}", 1)) for number in range(2)]
    refused = limits.admit(("10.0.0.9", 1))
    assert str(refused.refusal) == "connections: expected at most 2, got 3"
    assert limits.num_refused == 1
    refused.release()
    assert limits.num_refused == 0
    assert limits.admit(("10.0.0.9", 1)).refusal is not None, "a refused one was not counted as open"
    first.release()
    assert limits.admit(("10.0.0.9", 1)).refusal is None


def test_connections_from_one_address_are_bounded() -> None:
    limits = limited(100, 2)
    first = limits.admit(LOCAL)
    assert limits.admit(LOCAL).refusal is None
    refusal = limits.admit(LOCAL).refusal
    assert refusal is not None
    assert (refusal.status, str(refusal)) == (503, "connections from one address: expected at most 2, got 3")
    assert refusal.warning == (
        "limits.max_connections_per_address: 2 connections from 127.0.0.1 are open, further ones are refused"
    )
    assert limits.admit(("127.0.0.2", 1)).refusal is None, "another one"
    first.release()
    assert limits.admit(LOCAL).refusal is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::9", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::1%eth1", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    limits = limited(100, 1)
    limits.admit((one, 1, 0, 0))
    assert (limits.admit((other, 1, 0, 0)).refusal is not None) is same


def test_a_unix_socket_has_no_addresses() -> None:
    limits = limited(3, 1)
    admitted = [limits.admit("") for _ in range(3)]
    assert [admission.refusal for admission in admitted] == [None] * 3
    assert limits.admit("").refusal is not None
    admitted[0].release()
    assert limits.admit("").refusal is None


@pytest.mark.parametrize(
    ("peer", "text"),
    [(("127.0.0.1", 80), "127.0.0.1:80"), (("::1", 80, 0, 0), "[::1]:80"), ("", "unix"), (b"", "unix")],
)
def test_addresses_in_log_lines(peer: object, text: str) -> None:
    assert shown_peer(peer) == text
