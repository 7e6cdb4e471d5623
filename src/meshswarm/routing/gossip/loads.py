"""The load reports of others: the newest of each peer, for as long as it is fresh.

The rule this file keeps: a report is as old as the time since its number was first heard of here, whatever time it
names; a clock that is hours off changes nothing. What is passed on is asked for: a neighbour lists what it has, and
gets what is clearly newer.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.messages import MAX_DIGEST, STEP_MS, Digest, tag
from meshswarm.routing.gossip.report import LoadReport, SignedReport, is_news

FRESH_S = 30.0
MAX_REPORTS = 256
OLD_STEPS = 8000 // STEP_MS
"""A copy this much older than ours is worth replacing, even if nothing of weight has changed."""


@dataclass(slots=True)
class Known:
    """`news_number`: of the last report that said something others should hear of soon."""

    signed: SignedReport
    heard_at: float
    news_number: int
    tag: int
    model_tag: int


class Loads:
    """At most `MAX_REPORTS`. Old ones make room first, then those of peers that are not known otherwise, then those
    of models that nobody here cares about."""

    def __init__(self) -> None:
        self._known: OrderedDict[PeerId, Known] = OrderedDict()  # heard of longest ago first
        self._by_tag: dict[int, PeerId] = {}

    def number(self, peer: PeerId) -> int:
        """The number of the report known, -1 when none is."""
        known = self._known.get(peer)
        return -1 if known is None else known.signed.report.seq

    def get(self, peer: PeerId) -> SignedReport | None:
        known = self._known.get(peer)
        return None if known is None else known.signed

    def peers(self) -> list[PeerId]:
        return list(self._known)

    def take(
        self, signed: SignedReport, now: float, keep: Callable[[PeerId], bool], interests: Collection[int]
    ) -> bool:
        """Keeps a verified report that is newer than the one known; True when it says something new of weight.
        `keep`: whose reports make room last; `interests`: tags of models whose reports do so among equals."""
        report = signed.report
        before = self._known.pop(report.peer, None)
        news = before is None or is_news(report, before.signed.report)
        number = report.seq if news or before is None else before.news_number
        known = Known(signed, now, number, tag(report.peer.key), tag(report.model_id or b""))
        self._known[report.peer] = known
        self._by_tag[known.tag] = report.peer
        if len(self._known) > MAX_REPORTS:
            self._evict(now, keep, interests)
        return news

    def drop(self, peer: PeerId) -> None:
        known = self._known.pop(peer, None)
        if known is not None and self._by_tag.get(known.tag) == peer:
            del self._by_tag[known.tag]

    def fresh(self, now: float, within_s: float = FRESH_S) -> Iterator[LoadReport]:
        """Those heard within that time, the newest first."""
        for known in reversed(self._known.values()):
            if now - known.heard_at > within_s:
                return
            yield known.signed.report

    def digest(self, interests: Collection[int], now: float, rng: random.Random) -> Digest:
        """What is known of the models with these tags."""
        entries = [
            (known.tag, known.signed.report.seq // STEP_MS)
            for known in self._known.values()
            if known.model_tag in interests and now - known.heard_at <= FRESH_S
        ]
        if len(entries) <= MAX_DIGEST:
            return Digest(tuple(entries))
        return Digest(tuple(rng.sample(entries, MAX_DIGEST)), is_all=False)

    def lacking(self, digest: Digest, interests: Collection[int], asker: PeerId, now: float) -> list[SignedReport]:
        """What the asker has older or not at all, the most urgent first. `interests`: what it cares about."""
        listed = dict(digest.entries)
        older = []
        for tag_of, step in listed.items():
            known = self._known.get(self._by_tag.get(tag_of, asker))
            if known is None or now - known.heard_at > FRESH_S:
                continue
            steps = known.signed.report.seq // STEP_MS - step
            if step < known.news_number // STEP_MS or steps >= OLD_STEPS:
                older.append((step >= known.news_number // STEP_MS, -steps, known.signed))
        found = [signed for _, _, signed in sorted(older, key=lambda item: item[:2])]
        if digest.is_all and interests:
            found += [
                known.signed
                for known in reversed(self._known.values())
                if known.model_tag in interests
                and known.tag not in listed
                and now - known.heard_at <= FRESH_S / 2
                and known.signed.report.peer != asker
            ]
        return found

    def _evict(self, now: float, keep: Callable[[PeerId], bool], interests: Collection[int]) -> None:
        def worth(item: tuple[PeerId, Known]) -> tuple[bool, bool, bool]:
            peer, known = item
            return now - known.heard_at <= FRESH_S, keep(peer), known.model_tag in interests

        self.drop(min(self._known.items(), key=worth)[0])
