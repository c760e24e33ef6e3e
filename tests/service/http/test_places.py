"""How many connections may be open, in all and from one address."""

import pytest

from expertd.service.http.places import Places, shown_peer
from expertd.service.settings.parts import Limits

LOCAL = ("127.0.0.1", 4000)


def places(most: int, of_one: int) -> Places:
    return Places(Limits(max_connections=most, max_connections_per_address=of_one))


def test_connections_in_all_are_bounded() -> None:
    found = places(2, 2)
    addresses = [found.take((f"10.0.0.{number}", 1))[0] for number in range(2)]
    address, refusal = found.take(("10.0.0.9", 1))
    assert str(refusal) == "connections: expected at most 2, got 3"
    found.leave(address)
    assert found.take(("10.0.0.9", 1))[1] is not None, "a refused one had no place to give back"
    found.leave(addresses[0])
    assert found.take(("10.0.0.9", 1))[1] is None


def test_connections_from_one_address_are_bounded() -> None:
    found = places(100, 2)
    first, _ = found.take(LOCAL)
    assert found.take(LOCAL)[1] is None
    _, refusal = found.take(LOCAL)
    assert refusal is not None
    assert (refusal.status, str(refusal)) == (503, "connections from one address: expected at most 2, got 3")
    assert refusal.warning == (
        "limits.max_connections_per_address: 2 connections from 127.0.0.1 are open, further ones are refused"
    )
    assert found.take(("127.0.0.2", 1))[1] is None, "another one"
    found.leave(first)
    assert found.take(LOCAL)[1] is None


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
    found = places(100, 1)
    found.take((one, 1, 0, 0))
    assert (found.take((other, 1, 0, 0))[1] is not None) is same


def test_a_unix_socket_has_no_addresses() -> None:
    found = places(3, 1)
    taken = [found.take("") for _ in range(3)]
    assert [refusal for _, refusal in taken] == [None] * 3
    assert found.take("")[1] is not None
    found.leave(taken[0][0])
    assert found.take("")[1] is None


def test_every_end_is_told() -> None:
    found, ends = places(1, 1), []
    found.left = lambda: ends.append(1)
    for address, _ in (found.take(LOCAL), found.take(LOCAL)):
        found.leave(address)
    assert len(ends) == 2


@pytest.mark.parametrize(
    ("peer", "text"),
    [(("127.0.0.1", 80), "127.0.0.1:80"), (("::1", 80, 0, 0), "[::1]:80"), ("", "unix"), (b"", "unix")],
)
def test_addresses_in_log_lines(peer: object, text: str) -> None:
    assert shown_peer(peer) == text
