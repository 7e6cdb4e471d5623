"""What doctor says of the network: each way of finding peers, tried for real on this machine's loopback."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.discovery.conftest import dht_node

from meshswarm.commands.control import announce_running
from meshswarm.commands.doctor import Finding, Verdict
from meshswarm.commands.network import Search, examine_network
from meshswarm.commands.throwaway import Where, throwaway_peer
from meshswarm.config import Address, Home
from meshswarm.dht.known_peers import KnownPeers, SeenPeer
from meshswarm.discovery import settings as settings_module
from meshswarm.discovery.lan import LanSource
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

LOOPBACK = Address("127.0.0.1", 0)
ALL_OFF = DiscoverySettings(lan=Use.NO, rendezvous=Use.NO)


async def examine(search: Search) -> dict[str, Finding]:
    """As the command does: in an event loop of its own."""
    findings = await asyncio.to_thread(examine_network, search)
    return {finding.what.removeprefix("peers: "): finding for finding in findings}


@contextlib.asynccontextmanager
async def somebody(swarm: Swarm) -> AsyncIterator[Endpoint]:
    """A peer of `swarm` that announces itself on the local network."""
    endpoint = await Endpoint.bind(Identity.generate(), LOOPBACK, swarm=swarm)
    source = LanSource(swarm, endpoint.peer_id, endpoint.address, endpoint.families)

    async def announce() -> None:
        async for _ in source.candidates():
            pass

    task = asyncio.create_task(announce())
    yield endpoint
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await endpoint.close()


async def test_every_way_is_tried_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "SURVEY_PATIENCE_S", 2.0)
    name, home = f"test-{secrets.token_hex(4)}", Home(tmp_path / "home").create()
    swarm, me = Swarm(name), Identity.load_or_create(home.key)
    nodes = [dht_node("127.0.0.1")]
    settings = DiscoverySettings(lan=Use.YES, nodes=(Address("127.0.0.1", nodes[0].listen_port()),))
    dead = (Identity.generate().peer_id, Address("127.0.0.1", 9))
    async with somebody(swarm) as there:
        known = KnownPeers(home.known_peers, me, swarm.swarm_id)
        known.save([SeenPeer(there.peer_id, (there.address,), time.time())], time.time())
        found = await examine(Search(home, name, join=(dead,), discovery=settings, listen=LOOPBACK))
    assert list(found) == ["peers of last time", "addresses given", "local network", "rendezvous on BitTorrent's DHT"]
    assert found["peers of last time"].found == "1 possible peer, 1 dialled, 1 reached"
    assert "1 possible peer" in found["local network"].found
    assert found["rendezvous on BitTorrent's DHT"].found == "nobody; the DHT answers"
    assert found["addresses given"].verdict is Verdict.WARNING and "firewall" in found["addresses given"].advice
    others = [finding.verdict for what, finding in found.items() if what != "addresses given"]
    assert others == [Verdict.OK] * 3


async def test_what_is_off_says_why_and_nothing_is_made(tmp_path: Path) -> None:
    found = await examine(Search(Home(tmp_path / "none"), "test", discovery=ALL_OFF))
    assert found["local network"].found == "off: --no-lan"
    assert found["addresses given"].found == "off: none were given (--join)"
    assert not (tmp_path / "none").exists()


async def test_a_blocked_rendezvous_is_a_warning_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshswarm.discovery.mainline.SILENCE_S", 0.5)
    settings = DiscoverySettings(lan=Use.NO, nodes=(Address("127.0.0.1", 9),))
    found = await examine(Search(Home(tmp_path), "test", discovery=settings, listen=LOOPBACK))
    finding = found["rendezvous on BitTorrent's DHT"]
    assert finding.verdict is Verdict.WARNING and "no node of the DHT" in finding.found and "UDP" in finding.advice


async def test_a_port_or_a_swarm_that_cannot_be_had_is_a_finding(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        taken = Address("127.0.0.1", holder.getsockname()[1])
        found = await examine(Search(Home(tmp_path), "test", discovery=ALL_OFF, listen=taken))
    assert str(taken) in found["finding peers"].found
    found = await examine(Search(Home(tmp_path), "test", private=True, discovery=ALL_OFF))
    assert found["finding peers"].verdict is Verdict.WARNING


async def test_a_peer_that_runs_is_asked_and_what_it_cannot_heed_is_said(tmp_path: Path) -> None:
    where = Where(Home(tmp_path), f"test-{secrets.token_hex(4)}")
    async with throwaway_peer(where) as peer:
        announce_running(where.home, peer.api.base_url, None)
        found = await examine(Search(where.home))
        assert "finding peers" not in found and found["local network"].found == "off: --no-lan"
        assert "finding peers" not in await examine(Search(where.home, where.swarm))
        dead = (Identity.generate().peer_id, Address("127.0.0.1", 9))
        finding = (await examine(Search(where.home, "another", join=(dead,))))["finding peers"]
    assert finding.verdict is Verdict.WARNING
    assert f"'{where.swarm}'; not heeded: --swarm, --join" in finding.found and "--home DIR doctor" in finding.advice
