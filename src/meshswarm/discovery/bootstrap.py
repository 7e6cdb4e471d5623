"""A running peer's way into its swarm: the finder between endpoint and DHT, its events, and what is kept for next time.

The rule this file keeps: who was met is written down while the peer runs, not only when it ends in good order.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from meshswarm.dht.known_peers import KnownPeer, KnownPeers
from meshswarm.dht.node import Dht
from meshswarm.discovery.candidate import Source
from meshswarm.discovery.finder import Finder, Found, Missed, News, Trouble
from meshswarm.discovery.search import SourceReport
from meshswarm.discovery.settings import DiscoverySettings, make_sources
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

EXPLAINED_S = 0.5  # who dialled somebody knows by then through what it was found
MAX_MISSED = 16
SAVE_FIRST_S, SAVE_EVERY_S = 30.0, 600.0

Report = Callable[[Mapping[str, Any]], None]


class Bootstrap:
    """`run` it. `asked`: peers that a person named; `remembered`: a file for nodes of BitTorrent's DHT. `report` hears
    the events `joined`, `alone`, `join-failed` and `warning`."""

    def __init__(
        self,
        settings: DiscoverySettings,
        endpoint: Endpoint,
        dht: Dht,
        swarm: Swarm,
        known: KnownPeers,
        asked: Sequence[KnownPeer],
        report: Report,
        remembered: Path | None = None,
    ) -> None:
        sources, off = make_sources(settings, endpoint, swarm, known, asked, remembered=remembered)
        self.announced = [each.source.words for each in sources if each.source in (Source.LAN, Source.RENDEZVOUS)]
        """Where others are told that this peer is there, in words."""
        self.missed: list[dict[str, str]] = []
        """The last peers that were not reached, each once: `peer`, `address`, `why`."""
        self._dht = dht
        self._swarm = swarm
        self._known = known
        self._report = report
        self._asked = frozenset(peer for peer, _ in asked)
        self._found_through: dict[PeerId, Source] = {}
        self._is_joined = self._was_found = False
        self._n_meeting = 0
        self._found_by_others_at = math.inf
        self._finder = Finder(sources, endpoint, self._meet, self._members, off=off, tell=self._tell)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._finder.run())
            group.create_task(self._keep_saving())

    async def first(self) -> None:
        """Waits until the swarm is joined, or it is time to start alone and look on; then that is reported."""
        if not await self._finder.first():
            tried = [report for report in self._finder.reports() if _is_worth_telling(report)]
            if tried:
                self._report({"event": "alone", "tried": [report.as_json() for report in tried]})

    def save(self) -> None:
        """Writes down who is known now."""
        self._known.save(self._dht.seen_peers(), time.time())

    def as_json(self) -> list[dict[str, Any]]:
        """What came of each way of finding peers."""
        return [report.as_json() for report in self._finder.reports()]

    # -- inside

    def _members(self) -> Collection[PeerId]:
        members = [seen.peer for seen in self._dht.seen_peers()]
        if not members:
            self._is_joined, self._found_by_others_at = False, math.inf
        elif not self._is_joined and not self._n_meeting:
            self._found_by_others_at = min(self._found_by_others_at, monotonic())
            if monotonic() - self._found_by_others_at >= EXPLAINED_S:
                self._found_by(len(members))
        return members

    async def _meet(self, peers: Sequence[KnownPeer]) -> None:
        through = self._found_through.pop(peers[0][0])
        self._n_meeting += 1
        try:
            n_known = await self._dht.join(peers)
        finally:
            self._n_meeting -= 1
        if n_known and not self._is_joined:
            self._joined(n_known, through.value, through.words)

    def _joined(self, n_known: int, through: str, what: str) -> None:
        self._is_joined = True
        self._report({"event": "joined", "peers": n_known, "through": through, "what": what})

    def _found_by(self, n_peers: int) -> None:
        """Others come and go where only this peer is known: that is told once."""
        self._is_joined = True
        if not self._was_found:
            self._was_found = True
            self._joined(n_peers, "others", "them: they found this one")

    def _tell(self, news: News) -> None:
        match news:
            case Found(peer, _, source):
                self._found_through[peer] = source
            case Trouble(source, problem) if source is Source.KNOWN:
                self._report({"event": "warning", "message": problem})
            case Missed(attempt, reason) if attempt.peer is not None:
                failed = {"peer": str(attempt.peer), "address": ", ".join(map(str, attempt.addresses)), "why": reason}
                self.missed = [*self.missed, failed][-MAX_MISSED:]
                if attempt.peer in self._asked:  # whoever else named it as well
                    self._report({"event": "join-failed", **failed, "swarm": self._swarm.name})

    async def _keep_saving(self) -> None:
        await asyncio.sleep(SAVE_FIRST_S)
        while True:
            await asyncio.to_thread(self._known.save, self._dht.seen_peers(), time.time())  # a disk may hang
            await asyncio.sleep(SAVE_EVERY_S)


def _is_worth_telling(report: SourceReport) -> bool:
    """Whether somebody was looked for: an empty list of earlier peers is no news."""
    return not report.off and (report.source in (Source.LAN, Source.RENDEZVOUS) or bool(report.candidates))
