"""Real peers that are told of nobody, and find each other."""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

import httpx
import pytest
from tests.discovery.conftest import dht_node
from tests.e2e.conftest import PeerProcess, PeerStarter

from meshswarm.config import Address, Home
from meshswarm.dht.known_peers import KnownPeers, SeenPeer
from meshswarm.identity import Identity
from meshswarm.net.swarm import Swarm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses")


def discovery(peer: PeerProcess) -> dict[str, dict[str, Any]]:
    """What the running peer says of each way of finding others."""
    running = json.loads((peer.home / "running.json").read_text())
    status = httpx.get(running["api"].removesuffix("/v1") + "/meshswarm/status").json()
    return {each["source"]: each for each in status["discovery"]}


def test_two_peers_find_each_other_through_a_dht_and_again_without_it(start_peer: PeerStarter) -> None:
    nodes = [dht_node("127.0.0.1")]
    first = f"127.0.0.1:{nodes[0].listen_port()}"
    nodes += [dht_node(f"127.0.0.{10 + n}", first) for n in range(3)]
    rendezvous = ("--rendezvous-node", first)
    one = start_peer("--listen", "127.0.0.2:0", *rendezvous, wait=False)
    one.wait_for("started")
    two = start_peer("--listen", "127.0.0.3:0", *rendezvous, wait=False)
    through = {one.wait_for("joined")["through"], two.wait_for("joined")["through"]}
    assert "rendezvous" in through and through <= {"rendezvous", "others"}
    assert discovery(two)["rendezvous"]["used"]
    assert discovery(two)["lan"]["found"] == "off: this peer listens on loopback only"

    assert two.stop() == 0
    nodes.clear()
    again = start_peer("--listen", "127.0.0.3:0", home=two.home.name, wait=False)
    joined = again.wait_for("joined")
    assert joined["through"] == "known" and joined["peers"] == 1


def test_two_peers_find_each_other_on_the_local_network(start_peer: PeerStarter) -> None:
    one = start_peer("--lan", "--no-rendezvous", wait=False)
    one.wait_for("started")
    two = start_peer("--lan", "--no-rendezvous", wait=False)
    through = {one.wait_for("joined")["through"], two.wait_for("joined")["through"]}
    assert "lan" in through and through <= {"lan", "others"}
    assert discovery(two)["lan"]["used"] and not discovery(two)["rendezvous"]["used"]


def test_a_start_among_ghosts_is_a_start(start_peer: PeerStarter) -> None:
    """40 peers of last time that are all gone cost some two seconds, once."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", silent.getsockname()[1])
        home = Home(start_peer.root / "ghosts").create()
        now = time.time()
        known = KnownPeers(home.known_peers, Identity.load_or_create(home.key), Swarm(start_peer.swarm).swarm_id)
        known.save([SeenPeer(Identity.generate().peer_id, (address,), now) for _ in range(40)], now)
        peer = start_peer(home="ghosts", wait=False)
        peer.wait_for("started")
        begun = time.monotonic()
        alone = peer.wait_for("alone")
        assert time.monotonic() - begun < 12, "3.5 s and what a busy machine adds; one after the other would take 80"
        assert alone["tried"][0]["candidates"] == 40
        assert peer.stop() == 0
    assert len(known.load(now)) == 40, "a start without a network forgets nobody"
