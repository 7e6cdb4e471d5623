"""Which ways of finding peers are used by default, and what the switches change."""

from __future__ import annotations

import pytest

from meshswarm.config import Address
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.net.swarm import Swarm

PUBLIC, PRIVATE = Swarm("home"), Swarm("home", b"k" * 32)
OPEN, LOOPBACK = Address("0.0.0.0", 4810), Address("127.0.0.1", 4810)
NODE = Address("10.0.0.1", 6881)


@pytest.mark.parametrize(
    ("settings", "bound", "why"),
    [
        (DiscoverySettings(), OPEN, ""),
        (DiscoverySettings(), LOOPBACK, "this peer listens on loopback only"),
        (DiscoverySettings(lan=Use.YES), LOOPBACK, ""),
        (DiscoverySettings(lan=Use.NO), OPEN, "--no-lan"),
    ],
)
def test_the_local_network(settings: DiscoverySettings, bound: Address, why: str) -> None:
    assert settings.why_no_lan(bound) == why


@pytest.mark.parametrize(
    ("settings", "swarm", "bound", "why"),
    [
        (DiscoverySettings(), PUBLIC, OPEN, ""),
        (DiscoverySettings(), PUBLIC, LOOPBACK, "this peer listens on loopback only"),
        (DiscoverySettings(), PRIVATE, OPEN, "a private swarm is only announced there with --rendezvous"),
        (DiscoverySettings(rendezvous=Use.YES), PRIVATE, OPEN, ""),
        (DiscoverySettings(nodes=(NODE,)), PUBLIC, LOOPBACK, ""),
        (DiscoverySettings(nodes=(NODE,), rendezvous=Use.NO), PUBLIC, OPEN, "--no-rendezvous"),
        (DiscoverySettings(rendezvous=Use.NO), PUBLIC, OPEN, "--no-rendezvous"),
    ],
)
def test_the_rendezvous(settings: DiscoverySettings, swarm: Swarm, bound: Address, why: str) -> None:
    assert settings.why_no_rendezvous(swarm, bound) == why


def test_switches() -> None:
    assert [Use.of_switch(switch) for switch in (None, True, False)] == [Use.DEFAULT, Use.YES, Use.NO]
