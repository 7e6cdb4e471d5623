"""Real peers that are told of nobody, and find each other."""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
import pytest
from tests.discovery.conftest import dht_node
from tests.e2e.conftest import PeerProcess, PeerStarter

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
