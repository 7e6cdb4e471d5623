"""Which addresses of this machine others may reach a wildcard socket at, asked of the kernel without sending anything.

Connecting a UDP socket only chooses a route; its own end is then the address that other machines on that route see.
"""

from __future__ import annotations

import contextlib
import socket

from meshswarm.config import Address

# Documentation addresses (RFC 5737, RFC 3849): they take the default route, and nothing is sent.
_ROUTES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def reachable_addresses(bound: Address, families: frozenset[int]) -> list[Address]:
    """`bound`, or when that is a wildcard one address for each of `families`; loopback when there is no network."""
    if not bound.is_unspecified:
        return [bound]
    found = []
    for family, remote in _ROUTES:
        if family in families:
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((remote, 9))
                found.append(Address(probe.getsockname()[0], bound.port))
    return found or [Address("127.0.0.1" if socket.AF_INET in families else "::1", bound.port)]
