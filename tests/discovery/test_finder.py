"""The finder with real endpoints: who is met through what, and what goes wrong without stopping anything."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from tests.discovery.conftest import Bind

from meshswarm.config import Address
from meshswarm.dht.known_peers import KnownPeer, KnownPeers, SeenPeer
from meshswarm.discovery.candidate import Candidate, CandidateSource, Source, SourceError
from meshswarm.discovery.finder import Finder, Found, Missed, News, Trouble
from meshswarm.discovery.told import AskedSource, KnownSource
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm


@pytest.fixture
def silent() -> Iterator[Address]:
    """A loopback address where somebody listens and never answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        yield Address("127.0.0.1", holder.getsockname()[1])


class Listed:
    """A source that gives what it was made with, or fails."""

    patience_s = 1.0
    note = ""

    def __init__(self, source: Source, *candidates: Candidate, error: Exception | None = None) -> None:
        self.source = source
        self.error = error
        self.given = candidates
        self.is_closed = False

    async def candidates(self) -> AsyncIterator[Candidate]:
        for each in self.given:
            yield each
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.is_closed = True


class Peer:
    """An endpoint with a finder; whoever was met is a member."""

    def __init__(self, endpoint: Endpoint, *sources: CandidateSource) -> None:
        self.met: list[KnownPeer] = []
        self.is_met = asyncio.Event()
        self.told: list[News] = []
        self.finder = Finder(
            sources, endpoint, self._meet, lambda: [peer for peer, _ in self.met], tell=self.told.append,
            off={Source.LAN: "--no-lan"}, rng=random.Random(3),
        )  # fmt: skip

    async def _meet(self, peers: Sequence[KnownPeer]) -> None:
        self.met += peers
        self.is_met.set()

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[Finder]:
        task = asyncio.create_task(self.finder.run())
        try:
            async with asyncio.timeout(15):
                yield self.finder
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def report(finder: Finder, source: Source) -> str:
    return next(each.sentence for each in finder.reports() if each.source is source)


async def test_the_peers_of_last_time_are_met_again_though_a_ghost_comes_first(
    bind: Bind, swarm: Swarm, silent: Address, tmp_path: Path
) -> None:
    me = Identity.generate()
    here, there = await bind(identity=me), await bind()
    known = KnownPeers(tmp_path / "peers.json", me, swarm.swarm_id)
    now = time.time()
    ghosts = [SeenPeer(Identity.generate().peer_id, (silent,), now) for _ in range(5)]
    known.save([*ghosts, SeenPeer(there.peer_id, (there.address,), now - 1000)], now)
    peer = Peer(here, KnownSource(known))
    async with peer.looking() as finder:
        assert await finder.first() is True
        assert not any(isinstance(news, Missed) for news in peer.told), "nobody waits for the ghosts"
    assert peer.met == [(there.peer_id, (there.address,))]
    assert peer.told[0] == Found(there.peer_id, there.address, Source.KNOWN)


async def test_a_ghost_alone_costs_two_seconds(bind: Bind, silent: Address) -> None:
    peer = Peer(await bind(), AskedSource([(Identity.generate().peer_id, (silent,))]))
    begun = time.monotonic()
    async with peer.looking() as finder:
        assert await finder.first() is False
    assert 1.9 < time.monotonic() - begun < 8, "2 s and what a busy machine adds"
    (missed,) = peer.told
    assert isinstance(missed, Missed) and "no answer in 2 s" in missed.reason
    assert report(peer.finder, Source.ASKED).startswith("1 possible peer, 1 dialled, 0 reached (peer ")


async def test_an_address_without_a_key_is_enough(bind: Bind) -> None:
    here, there = await bind(), await bind()
    nowhere = Address("127.0.0.1", 9)
    peer = Peer(here, Listed(Source.RENDEZVOUS, Candidate(None, (nowhere, there.address), Source.RENDEZVOUS)))
    async with peer.looking() as finder:
        assert await finder.first() is True
    assert peer.met == [(there.peer_id, (there.address,))]


async def test_peers_of_other_swarms_and_this_very_one_are_not_met(bind: Bind) -> None:
    here, stranger = await bind(), await bind(swarm=Swarm("another"))
    given = [Candidate(None, (endpoint.address,), Source.RENDEZVOUS) for endpoint in (here, stranger)]
    peer = Peer(here, Listed(Source.RENDEZVOUS, *given))
    async with peer.looking() as finder:
        assert await finder.first() is False
    assert peer.met == [] and len(peer.told) == 2
    assert any("this very peer" in each.reason for each in peer.told if isinstance(each, Missed))


async def test_a_source_that_fails_is_a_sentence_and_stops_nothing(bind: Bind) -> None:
    here, there = await bind(), await bind()
    broken = Listed(Source.RENDEZVOUS, error=SourceError("the DHT does not answer"))
    worse = Listed(Source.ASKED, error=RuntimeError("a mistake"))
    fine = Listed(Source.KNOWN, Candidate(there.peer_id, (there.address,), Source.KNOWN))
    peer = Peer(here, broken, worse, fine)
    async with peer.looking() as finder:
        assert await finder.first() is True
        assert report(finder, Source.RENDEZVOUS) == "the DHT does not answer"
        assert report(finder, Source.ASKED) == "failed unexpectedly: RuntimeError('a mistake')"
        assert report(finder, Source.LAN) == "off: --no-lan"
    assert broken.is_closed and worse.is_closed and fine.is_closed


async def test_a_changed_file_of_known_peers_is_a_sentence(bind: Bind, swarm: Swarm, tmp_path: Path) -> None:
    known = KnownPeers(tmp_path / "peers.json", Identity.generate(), swarm.swarm_id)
    known.path.write_text("{}")
    peer = Peer(await bind(), KnownSource(known))
    async with peer.looking() as finder:
        assert await finder.first() is False
        assert str(known.path) in report(finder, Source.KNOWN)
    assert [type(news) for news in peer.told] == [Trouble]


async def test_who_comes_later_is_found_later(bind: Bind, swarm: Swarm) -> None:
    """Alone at first; then the peer that was named starts after all."""
    here, place = await bind(), await bind()
    address, identity = place.address, Identity.generate()
    await place.close()
    peer = Peer(here, AskedSource([(identity.peer_id, (address,))]))
    async with peer.looking() as finder:
        assert await finder.first() is False
        there = await bind(identity=identity, listen=address)
        await peer.is_met.wait()
    assert peer.met == [(there.peer_id, (address,))]


@pytest.mark.parametrize(("source", "is_kept"), [(Source.ASKED, False), (Source.KNOWN, True)])
async def test_a_mistyped_address_is_not_kept_of_a_peer_that_was_met_elsewhere(
    bind: Bind, silent: Address, source: Source, is_kept: bool
) -> None:
    here, there = await bind(), await bind()
    peer = Peer(here, Listed(source, Candidate(there.peer_id, (silent, there.address), source)))
    async with peer.looking():
        await peer.is_met.wait()
    assert peer.met == [(there.peer_id, (there.address, silent) if is_kept else (there.address,))]


async def test_a_peer_that_cannot_be_met_after_all_is_no_reason_to_stop(bind: Bind) -> None:
    here, there = await bind(), await bind()
    tried: list[PeerId] = []

    async def refuse(peers: Sequence[KnownPeer]) -> None:
        tried.append(peers[0][0])
        raise OSError("gone again")

    source = Listed(Source.KNOWN, Candidate(there.peer_id, (there.address,), Source.KNOWN))
    finder = Finder([source], here, refuse, lambda: ())
    task = asyncio.create_task(finder.run())
    async with asyncio.timeout(10):
        assert await finder.first() is False
    assert tried == [there.peer_id] and not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
