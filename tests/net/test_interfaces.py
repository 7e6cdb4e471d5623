"""Which addresses a socket can be reached at."""

from __future__ import annotations

import ipaddress
import socket

from meshswarm.config import Address
from meshswarm.net.interfaces import reachable_addresses

BOTH = frozenset({int(socket.AF_INET), int(socket.AF_INET6)})


def test_a_bound_address_is_what_it_is() -> None:
    assert reachable_addresses(Address("192.0.2.7", 4000), BOTH) == [Address("192.0.2.7", 4000)]


def test_a_wildcard_becomes_addresses_of_this_machine() -> None:
    for host, families in (("0.0.0.0", frozenset({int(socket.AF_INET)})), ("::", BOTH)):
        found = reachable_addresses(Address(host, 4000), families)
        assert found and all(address.port == 4000 and not address.is_unspecified for address in found)
        versions = {ipaddress.ip_address(address.host).version for address in found}
        assert versions <= ({4} if host == "0.0.0.0" else {4, 6})
