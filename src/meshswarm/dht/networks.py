"""Which network an address is in: addresses of one network cost an attacker next to nothing beyond the first.

The rule this file keeps: whoever holds one address of an IPv4 /24 or an IPv6 /48 is counted as if it held them all.
Addresses that packets from the internet cannot come from (loopback, private and link-local ones) belong to no such
network, nor do those of this machine's own: a swarm on one machine or one LAN must work, and strangers are elsewhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from meshswarm.config import Address
from meshswarm.dht.contact import Contact

_LOCAL = tuple(
    ipaddress.ip_network(text)
    for text in (
        "127.0.0.0/8",
        "10.0.0.0/8",  # RFC 1918
        "172.16.0.0/12",
        "192.168.0.0/16",
        "169.254.0.0/16",  # RFC 3927
        "100.64.0.0/10",  # RFC 6598: behind one carrier's translator
        "::1/128",
        "fe80::/10",
        "fc00::/7",  # RFC 4193
    )
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: an IPv4 address in the last four bytes


def network_of(address: Address) -> bytes | None:
    """The bytes that all addresses of one /24 or /48 share; None for a local one, and for a host name.

    3 bytes are an IPv4 network, 6 an IPv6 one. IPv4 addresses that are written as IPv6 count as what they are.
    """
    return _network(address.host)


class Networks:
    """Networks as they look from here."""

    def __init__(self, own: Iterable[Address] = ()) -> None:
        self._own = frozenset(network_of(address) for address in own)

    def of(self, address: Address) -> bytes | None:
        """As `network_of`; None also for a network that this machine has an address of."""
        network = network_of(address)
        return None if network in self._own else network


MAX_TOLD_ADDRESSES = 2
"""Of a peer that another one names: each is dialled, whoever it belongs to."""


def credible(told: Contact, teller: Contact) -> Contact | None:
    """What is worth dialling of a contact that `teller` names: few addresses, and none of a local network on the
    word of somebody outside of it. None when nothing is left."""
    is_outside = bool(teller.addresses) and not is_local(teller.addresses[0])
    addresses = tuple(each for each in told.addresses if not (is_outside and is_local(each)))[:MAX_TOLD_ADDRESSES]
    return Contact(told.peer, addresses) if addresses else None


def is_local(address: Address) -> bool:
    """True for an address that is only reached from this machine or its own networks."""
    return _network(address.host) is None


@lru_cache(maxsize=16384)
def _network(host: str) -> bytes | None:
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(ip.packed[-4:])
    if any(ip in network for network in _LOCAL):
        return None
    return ip.packed[: 3 if ip.version == 4 else 6]
