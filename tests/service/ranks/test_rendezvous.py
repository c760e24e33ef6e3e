"""Where nodes meet: addresses and interfaces of this machine."""

import socket
from typing import Any

import pytest

from expertd.service.ranks.rendezvous import Rendezvous, between_nodes, check_exposure, exposure, listen
from tests.service.ranks.nodes import node_settings


def test_the_way_to_this_machine_is_the_loopback_interface() -> None:
    for host in ("127.0.0.1", "localhost"):
        rendezvous = between_nodes(node_settings(rendezvous=f"{host}:29500"))
        assert rendezvous == Rendezvous("127.0.0.1", 29500, "127.0.0.1", "lo")
        assert exposure(rendezvous) is None


def test_an_address_of_another_interface_is_found() -> None:
    """The one that leads elsewhere, if this machine has such a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # an address for documents; nothing is sent
        except OSError:
            address = "127.0.0.1"
        else:
            address = route.getsockname()[0]
    rendezvous = between_nodes(node_settings(rendezvous=f"{address}:29500"))
    assert (rendezvous.host, rendezvous.address) == (address, address)
    assert rendezvous.interface in [name for _, name in socket.if_nameindex()]
    assert (exposure(rendezvous) is None) == (address == "127.0.0.1")


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"rendezvous: expected a host that .*, got nowhere\.invalid:29500 \("
    ):
        between_nodes(node_settings(rendezvous="nowhere.invalid:29500"))


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(ValueError, match=r"rendezvous: expected a free port .*, got 192\.0\.2\.1:29500"):
        listen("192.0.2.1", 29500)


@pytest.mark.parametrize("place", ["0.0.0.0:29500", "192.0.2.1:29500", "nowhere.invalid:29500"])
@pytest.mark.parametrize("node_rank", [0, 1])
def test_beyond_loopback_nodes_meet_only_with_keys_or_insecure(place: str, node_rank: int) -> None:
    given: dict[str, Any] = {"rendezvous": place, "node_rank": node_rank}
    with pytest.raises(ValueError, match=f"^rendezvous: expected a loopback address .*, got {place}; "):
        check_exposure(node_settings(**given))
    check_exposure(node_settings(**given, insecure=True))
    check_exposure(node_settings(**given, keys="keys.yaml"))
    check_exposure(node_settings(rendezvous="localhost:29500", node_rank=node_rank))


def test_every_address_of_this_machine_is_beyond_loopback() -> None:
    assert exposure(between_nodes(node_settings(rendezvous="0.0.0.0:29500"))) is not None
