"""Which addresses count as one network."""

import pytest

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.networks import MAX_TOLD_ADDRESSES, Networks, credible, is_local, network_of
from meshswarm.identity import PeerId


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("203.0.113.7", "203.0.113.250"),
        ("203.0.113.7", "::ffff:203.0.113.9"),
        ("203.0.113.7", "64:ff9b::cb00:7101"),
        ("2001:db8:1:2::3", "2001:db8:1:ffff::1"),
    ],
)
def test_one_network(one: str, other: str) -> None:
    assert network_of(Address(one, 1)) == network_of(Address(other, 2)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [("203.0.113.7", "203.0.114.7"), ("2001:db8:1::1", "2001:db8:2::1"), ("203.0.113.7", "2001:db8:1::1")],
)
def test_different_networks(one: str, other: str) -> None:
    assert network_of(Address(one, 1)) != network_of(Address(other, 1))


LOCAL = (
    "127.0.0.1 10.1.2.3 172.16.0.1 172.31.255.255 192.168.1.1 169.254.1.1 100.64.0.1 "
    "::1 fe80::1 fe80::1%eth0 fd00::1 ::ffff:10.0.0.1 a-name.example"
)


@pytest.mark.parametrize("host", LOCAL.split())
def test_local_ones_belong_to_no_network(host: str) -> None:
    assert network_of(Address(host, 1)) is None
    assert is_local(Address(host, 1))


@pytest.mark.parametrize("host", ["172.32.0.1", "100.128.0.1", "11.0.0.1", "2001:db8::1", "198.51.100.1"])
def test_public_ones_are_not_taken_for_local(host: str) -> None:
    assert not is_local(Address(host, 1))


def test_networks_that_this_machine_is_in_count_as_local() -> None:
    here = Networks([Address("203.0.113.7", 1), Address("10.0.0.1", 1)])
    assert here.of(Address("203.0.113.9", 2)) is None
    assert here.of(Address("203.0.114.9", 2)) == network_of(Address("203.0.114.1", 1)) is not None
    assert here.of(Address("10.9.9.9", 2)) is None


def test_nobody_outside_aims_a_peer_at_its_own_network_or_at_many_addresses() -> None:
    inside, outside = (Contact(PeerId(bytes(32)), (Address(host, 1),)) for host in ("192.168.0.9", "198.51.100.9"))
    local, public = Address("10.0.0.1", 2), [Address(f"203.0.113.{host}", 2) for host in range(8)]
    named = PeerId(bytes(range(32)))
    assert credible(Contact(named, (local,)), outside) is None
    assert credible(Contact(named, (local,)), inside) == Contact(named, (local,))
    assert credible(Contact(named, (local, *public)), outside) == Contact(named, tuple(public[:MAX_TOLD_ADDRESSES]))
    assert credible(Contact(named, ()), inside) is None
