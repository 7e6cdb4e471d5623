"""A peer for one errand: it is ready within the block and gone after it, and says why where it cannot be."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

import pytest

from meshswarm.commands.control import RunningPeer
from meshswarm.commands.show import show_status
from meshswarm.commands.throwaway import Where, endpoint_of, throwaway_peer
from meshswarm.config import Address, Home, HomeLock
from meshswarm.dht.known_peers import KnownPeers, SeenPeer
from meshswarm.errors import ConfigError, UnknownModelError
from meshswarm.identity import Identity

NOBODY = (Identity.from_seed(bytes(32)).peer_id, Address("127.0.0.1", 9))


def where(folder: Path, *join: object) -> Where:
    return Where(Home(folder), f"test-{secrets.token_hex(4)}", join=join)  # type: ignore[arg-type]


async def test_it_answers_within_the_block_and_lets_the_folder_go_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = where(tmp_path)
    async with throwaway_peer(place) as peer:
        status = await asyncio.to_thread(endpoint_of(peer).get, "/meshswarm/status")
        assert status["swarm"] == place.swarm and status["model"] is None
        show_status(status)
        assert "client: it asks, and serves nothing" in capsys.readouterr().out
        with pytest.raises(ConfigError):
            HomeLock(place.home)
    HomeLock(place.home).release()


async def test_the_errands_own_error_comes_out_and_the_peer_is_gone(tmp_path: Path) -> None:
    place = where(tmp_path)
    with pytest.raises(ZeroDivisionError):
        async with throwaway_peer(place):
            raise ZeroDivisionError
    HomeLock(place.home).release()


async def test_who_reaches_nobody_is_told_what_to_check(tmp_path: Path) -> None:
    place = where(tmp_path, NOBODY)
    with pytest.raises(ConfigError, match=rf"nobody can be asked: no way in through {NOBODY[0]} at .*firewall\?"):
        async with throwaway_peer(place):
            pytest.fail("there is nobody to ask")


async def test_what_keeps_it_from_starting_is_said(tmp_path: Path) -> None:
    place = where(tmp_path)
    lock = HomeLock(place.home.create())
    with pytest.raises(ConfigError, match="folder"):
        async with throwaway_peer(place):
            pytest.fail("another peer has the folder")
    lock.release()


def test_a_peer_that_runs_is_asked_in_its_own_swarm_only(tmp_path: Path) -> None:
    running = RunningPeer(1, "http://127.0.0.1:1/v1", None)
    assert Where(Home(tmp_path)).leave_to(running, "plan") is running
    for chosen in (where(tmp_path), Where(Home(tmp_path), private=True), Where(Home(tmp_path), join=(NOBODY,))):
        with pytest.raises(ConfigError, match="meshswarm --home DIR plan"):
            chosen.leave_to(running, "plan")


async def test_of_a_model_that_nobody_knew_it_is_said_when_nobody_was_there(tmp_path: Path) -> None:
    place = where(tmp_path)
    with pytest.raises(
        UnknownModelError, match=rf"no such, and no peer of the swarm '{place.swarm}' was reached \(none"
    ):
        async with throwaway_peer(place) as peer:
            known = KnownPeers(peer.membership.known_peers, peer.identity, peer.membership.swarm.swarm_id)
            raise UnknownModelError("no such")
    gone = SeenPeer(NOBODY[0], (NOBODY[1],), time.time())
    known.save([gone], time.time())
    tried = rf"\(tried {NOBODY[0]} at 127.0.0.1:9: .*\)\. Is it running\? --join names another"
    with pytest.raises(UnknownModelError, match=tried):
        async with throwaway_peer(place):
            raise UnknownModelError("no such")
    with pytest.raises(ConfigError, match=rf"nobody can be asked: no way in through {NOBODY[0]} at 127.0.0.1:9"):
        async with throwaway_peer(Where(place.home, place.swarm, join=(NOBODY,))):
            pytest.fail("it is remembered, and yet nobody was reached")
