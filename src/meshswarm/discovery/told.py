"""The peers of last time, and the addresses a person gave: candidates that need no looking for."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from meshswarm.dht.known_peers import KnownPeer, KnownPeers, KnownPeersError
from meshswarm.discovery.candidate import Candidate, Source, SourceError


class KnownSource:
    """Those whom this peer met at earlier starts, the last met first."""

    source = Source.KNOWN
    patience_s = 1.0
    note = ""

    def __init__(self, known: KnownPeers, clock: Callable[[], float] = time.time) -> None:
        self._known = known
        self._clock = clock

    async def candidates(self) -> AsyncIterator[Candidate]:
        try:
            seen = self._known.load(self._clock())
        except KnownPeersError as error:
            raise SourceError(str(error)) from None
        for each in seen:
            yield Candidate(each.peer, each.addresses, Source.KNOWN)

    async def close(self) -> None:
        """Nothing is held."""


class AskedSource:
    """Those whom a person named: `--join`, and what came with an invite."""

    source = Source.ASKED
    patience_s = 1.0
    note = ""

    def __init__(self, peers: Sequence[KnownPeer]) -> None:
        self._peers = tuple(peers)

    async def candidates(self) -> AsyncIterator[Candidate]:
        for peer, addresses in self._peers:
            yield Candidate(peer, addresses, Source.ASKED)

    async def close(self) -> None:
        """Nothing is held."""
