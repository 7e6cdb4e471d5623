"""The rendezvous, on a mainline DHT of this machine's own."""

from __future__ import annotations

import asyncio
import builtins
import secrets
import time
from pathlib import Path
from typing import Any

import libtorrent
import psutil
import pytest
from tests.discovery.conftest import dht_node

from meshswarm.config import Address
from meshswarm.discovery import mainline as module
from meshswarm.discovery.candidate import SourceError
from meshswarm.discovery.dht_nodes import load_nodes, save_nodes
from meshswarm.discovery.mainline import MainlineSource
from meshswarm.net.swarm import DAY_S, Swarm

ONE, TWO = Address("127.0.0.2", 4801), Address("127.0.0.3", 4802)


@pytest.fixture(autouse=True)
def nodes_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there within this time on loopback is not there at all."""
    monkeypatch.setattr(module, "BOOTSTRAP_S", 0.3)


async def first_other(source: MainlineSource, own: Address) -> Address:
    """Whom `source` finds apart from itself."""
    while True:
        async for candidate in source.candidates():
            assert candidate.peer is None
            if candidate.addresses != (own,):
                return candidate.addresses[0]


async def round_of(source: MainlineSource) -> list[Address]:
    return [candidate.addresses[0] async for candidate in source.candidates()]


async def test_two_members_find_each_other_around_midnight_and_nobody_else_finds_them(
    mainline: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hashes change at midnight, and clocks are minutes apart."""
    monkeypatch.setattr(module, "ROUND_S", 2.5)
    swarm, midnight = Swarm("office", secrets.token_bytes(32)), 20_000 * DAY_S
    early, late = (
        MainlineSource(swarm, own.host, own.port, nodes=[mainline], clock=lambda now=midnight + shift_s: float(now))
        for own, shift_s in ((ONE, -300), (TWO, 300))
    )
    outsiders = [
        MainlineSource(
            other, f"127.0.0.{5 + n}", 4803, nodes=[mainline], announces=False, clock=lambda: float(midnight)
        )
        for n, other in enumerate((Swarm("office"), Swarm("office", secrets.token_bytes(32))))
    ]
    try:
        async with asyncio.timeout(30):
            found = await asyncio.gather(first_other(early, ONE), first_other(late, TWO))
            nobody = await asyncio.gather(*map(round_of, outsiders))
        assert found == [TWO, ONE]
        assert nobody == [[], []]
        assert all("node" in each.note or each.note == "the DHT answers" for each in outsiders)
    finally:
        for each in (early, late, *outsiders):
            await each.close()


async def test_who_only_looks_is_not_seen(swarm: Swarm, mainline: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_S", 0.5)
    looking = MainlineSource(swarm, ONE.host, ONE.port, nodes=[mainline], announces=False)
    try:
        assert await round_of(looking) == []
        assert await round_of(looking) == [], "what the first look-up left behind is nothing"
    finally:
        await looking.close()


async def test_nodes_that_answered_are_a_way_in_when_those_to_start_from_have_gone(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUND_S", 0.5)
    node = dht_node("127.0.0.8")
    mainline, file = Address("127.0.0.8", node.listen_port()), tmp_path / "dht-nodes.json"
    save_nodes(file, [Address("127.0.0.7", 9), mainline])
    gone = Address("127.0.0.1", 9)
    sources = [
        MainlineSource(swarm, ONE.host, ONE.port, nodes=[mainline]),
        MainlineSource(swarm, TWO.host, TWO.port, nodes=[gone], remembered=file),
    ]
    try:
        await round_of(sources[0])
        monkeypatch.setattr(module, "ROUND_S", 2.5)
        assert ONE in await round_of(sources[1])
        kept = load_nodes(file)
        assert mainline in kept and Address("127.0.0.7", 9) not in kept, "those that answered, and no others"
    finally:
        for each in sources:
            await each.close()


async def test_nobody_answering_is_a_sentence(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    source = MainlineSource(swarm, ONE.host, ONE.port, nodes=[Address("127.0.0.1", 9)])
    try:
        with pytest.raises(SourceError, match="no node of the DHT has answered"):
            await round_of(source)
    finally:
        await source.close()


async def test_a_network_that_goes_away_later_is_a_sentence_too(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    monkeypatch.setattr(module, "SILENCE_S", 0.5)
    nodes = [dht_node("127.0.0.8")]
    source = MainlineSource(swarm, ONE.host, ONE.port, nodes=[Address("127.0.0.8", nodes[0].listen_port())])
    try:
        await round_of(source)
        nodes.clear()
        await asyncio.sleep(0.2)
        with pytest.raises(SourceError, match="no node of the DHT has answered"):
            await round_of(source)
    finally:
        await source.close()


async def test_no_libtorrent_is_a_sentence(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "libtorrent":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SourceError, match="libtorrent is not installed"):
        await round_of(MainlineSource(swarm, ONE.host, ONE.port))


async def test_strangers_cannot_aim_a_peer_at_its_own_network(swarm: Swarm) -> None:
    public = MainlineSource(swarm, "0.0.0.0", 1)
    for host in ("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.1.1", "224.0.0.1", "0.0.0.0", "::1", "fe80::1"):
        assert not public._is_worth_a_dial(Address(host, 80))
    assert public._is_worth_a_dial(Address("9.9.9.9", 4810))
    assert not public._is_worth_a_dial(Address("9.9.9.9", 0))


async def test_the_public_settings_are_quiet_and_send_nothing_but_dht(swarm: Swarm) -> None:
    """With nowhere to start from, so that nothing leaves this machine: no multicast, no mapped port, one UDP port."""
    parameters = libtorrent.session_params()
    parameters.settings = {**module.QUIET, "listen_interfaces": "127.0.0.5:0", "dht_bootstrap_nodes": ""}
    session = await asyncio.to_thread(libtorrent.session, parameters)
    settings = session.get_settings()
    assert settings["dht_read_only"] and settings["enable_dht"]
    assert not any(settings[name] for name in module.QUIET if name.startswith("enable_") and name != "enable_dht")
    own = [each for each in psutil.Process().net_connections("udp") if each.laddr and each.laddr.ip == "127.0.0.5"]
    assert len(own) == 1
    assert session.get_torrents() == []


async def test_the_event_loop_is_never_held_up(
    swarm: Swarm, mainline: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUND_S", 1.0)
    source = MainlineSource(swarm, ONE.host, ONE.port, nodes=[mainline])
    worst = 0.0
    looking = asyncio.create_task(round_of(source))
    while not looking.done():
        before = time.monotonic()
        await asyncio.sleep(0.01)
        worst = max(worst, time.monotonic() - before)
    await looking
    await source.close()
    assert worst < 1.0, "libtorrent's own pauses are seconds long where it waits"
