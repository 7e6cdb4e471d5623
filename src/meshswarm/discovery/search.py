"""Whom to dial when, and when to look again: what is decided in finding peers, without clock, network or tasks.

Every source has a few dials of its own at a time, so that a list full of ghosts in one never holds up another; an
address where nobody answered is left alone for a time that grows. While nobody is known the sources are asked again
after growing pauses. Once the swarm is joined only little is done: addresses that a person gave are tried on, and now
and then a few others, which is how two halves of a swarm that parted find each other again.

The rule this file keeps: whatever candidates come, from whomever, the number of dials at a time, of those remembered
and of those dialled while the swarm is joined is bounded.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshswarm.config import Address
from meshswarm.discovery.candidate import Candidate, Source
from meshswarm.identity import PeerId

DIALS_AT_A_TIME = 16  # of each source
MAX_TARGETS = 128  # of each source
MAX_ADDRESSES = 8  # of each target; `net` tries them 50 ms apart
GHOST_S = 2.5  # what a dial to nobody takes, with a little to spare
AGAIN_S = 30.0  # who proved the swarm, and is not known of it then, is dialled again after this
REFRESH_S = 900.0  # how often to look again when the swarm is joined
FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 600.0  # between rounds while nobody is known
BACK_OFF_S: Mapping[Source, tuple[float, float]] = {
    Source.KNOWN: (5.0, 600.0),
    Source.ASKED: (1.0, 45.0),
    Source.LAN: (5.0, 300.0),
    Source.RENDEZVOUS: (30.0, 3600.0),
}
"""After the first failure at an address, and at most; doubles in between."""
ALLOWANCE: Mapping[Source, int] = {Source.KNOWN: 2, Source.ASKED: 60, Source.LAN: 16, Source.RENDEZVOUS: 4}
"""Dials for each REFRESH_S while the swarm is joined."""


Key = PeerId | Address


@dataclass(frozen=True, slots=True)
class Attempt:
    """Dial `peer` (None: whoever is there) at `addresses`, and say what came of it. `target`: whom `Search` means.
    `vouched`: those of the addresses that not only a person's word stands for."""

    target: Key
    peer: PeerId | None
    addresses: tuple[Address, ...]
    source: Source
    vouched: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What came of one source so far. `off`: why it is not used, or "". `problem`: why its last round failed, or "".
    `failure`: what the last dial that failed ran into. `looks_again_s`: None while it looks."""

    source: Source
    off: str = ""
    note: str = ""
    problem: str = ""
    candidates: int = 0
    dialled: int = 0
    reached: int = 0
    failure: str = ""
    looks_again_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        counts = {"candidates": self.candidates, "dialled": self.dialled, "reached": self.reached}
        return {
            "source": self.source.value,
            "what": self.source.words,
            "found": self.sentence,
            "used": not self.off,
            "failed": bool(self.problem),
            **counts,
        }

    @property
    def sentence(self) -> str:
        if self.off:
            return f"off: {self.off}"
        if self.problem:
            return self.problem
        note = f"; {self.note}" if self.note else ""
        if not self.candidates:
            return f"nobody{note}"
        failed = f" ({self.failure})" if self.failure and not self.reached else ""
        peers = "peer" if self.candidates == 1 else "peers"
        return f"{self.candidates} possible {peers}, {self.dialled} dialled, {self.reached} reached{failed}{note}"


@dataclass(slots=True, eq=False)
class _Target:
    """A candidate as it is remembered. `retry_at`: when each address may be dialled again; `failures`: in a row.
    `vouched`: the addresses that a source gave which is no person's word."""

    peer: PeerId | None
    made_by: Source
    sources: set[Source] = field(default_factory=set)
    retry_at: dict[Address, float] = field(default_factory=dict)
    failures: dict[Address, int] = field(default_factory=dict)
    vouched: set[Address] = field(default_factory=set)
    is_dialled: bool = False  # at this moment
    was_reached: bool = False
    dialled_by: set[Source] = field(default_factory=set)
    reached_by: set[Source] = field(default_factory=set)

    @property
    def worth(self) -> int:
        """The less, the sooner it is forgotten for another."""
        return -sum(self.failures.values())


@dataclass(slots=True)
class _Round:
    """A source's looking. `next_at` inf: it looks now."""

    patience_s: float
    next_at: float
    pauses: int = 0
    is_first: bool = True
    problem: str = ""
    n_dialling: int = 0
    n_refreshed: int = 0
    failure: str = ""


class Search:
    """`patience_s` of each source that is used: how long its first round may take. Times are seconds of any clock."""

    def __init__(self, patience_s: Mapping[Source, float], rng: random.Random, now: float) -> None:
        self._rng = rng
        self._begun = self._refreshed_at = now
        self._rounds = {source: _Round(patience_s[source], now) for source in Source if source in patience_s}
        self._targets: dict[Key, _Target] = {}
        self._members: frozenset[PeerId] = frozenset()

    @property
    def is_alone(self) -> bool:
        return not self._members

    # -- what happens

    def members(self, peers: Iterable[PeerId], now: float) -> None:
        """Who is known of the swarm at this moment. When they have all gone, everybody is worth a dial again."""
        was_alone, self._members = self.is_alone, frozenset(peers)
        if self.is_alone and not was_alone:
            for target in self._targets.values():
                target.retry_at = dict.fromkeys(target.retry_at, now)
                target.failures.clear()
                target.was_reached = False
            for each in self._rounds.values():
                each.pauses = 0
                each.next_at = min(each.next_at, now) if each.next_at != math.inf else math.inf
        if now - self._refreshed_at >= REFRESH_S:
            self._refreshed_at = now
            for each in self._rounds.values():
                each.n_refreshed = 0

    def offer(self, candidate: Candidate, now: float) -> None:
        """A source gave a candidate; the same one may come any number of times, with other addresses as well."""
        key = candidate.peer or candidate.addresses[0]
        target = self._targets.get(key)
        if target is None:
            if not self._has_room(candidate.source):
                return
            target = self._targets[key] = _Target(candidate.peer, candidate.source)
        target.sources.add(candidate.source)
        for address in candidate.addresses:
            if address not in target.retry_at and len(target.retry_at) >= MAX_ADDRESSES:
                self._forget_an_address(target)
            if len(target.retry_at) < MAX_ADDRESSES:
                target.retry_at.setdefault(address, now)
                target.vouched |= set() if candidate.source is Source.ASKED else {address}

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Somebody proved a key there, and the swarm."""
        target, _ = self._over(attempt)
        if target is not None:
            target.was_reached = True
            target.reached_by.add(attempt.source)
            target.failures.clear()
            target.retry_at = dict.fromkeys(target.retry_at, now + AGAIN_S)

    def failed(self, attempt: Attempt, reason: str, now: float) -> None:
        target, each = self._over(attempt)
        each.failure = reason
        if target is None:
            return
        first_s, longest_s = BACK_OFF_S[attempt.source]
        for address in attempt.addresses:
            if address in target.retry_at:
                n = target.failures[address] = target.failures.get(address, 0) + 1
                pause_s = min(first_s * 2.0 ** min(n - 1, 20), longest_s)
                target.retry_at[address] = now + pause_s * self._rng.uniform(0.9, 1.1)

    def round_ended(self, source: Source, problem: str, now: float) -> None:
        """A source has looked; `problem` says why it could not, or is ""."""
        each = self._rounds[source]
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(each.pauses, 20), LONGEST_PAUSE_S) if self.is_alone else REFRESH_S
        each.pauses += 1
        each.problem = problem
        each.is_first = False
        each.next_at = now + pause_s * self._rng.uniform(0.8, 1.2)

    # -- what to do

    def rounds(self, now: float) -> list[Source]:
        """The sources that should begin to look now; they count as looking from here on."""
        due = [source for source, each in self._rounds.items() if each.next_at <= now]
        for source in due:
            self._rounds[source].next_at = math.inf
        return due

    def dials(self, now: float) -> list[Attempt]:
        """Whom to dial now, the best first; they count as being dialled from here on."""
        return [attempt for source in self._rounds for attempt in self._dials_of(source, now)]

    def next_at(self, now: float) -> float:
        """When `rounds`, `dials` or `is_settled` may say something else, if nothing happens before."""
        times = [each.next_at for each in self._rounds.values()]
        for target in self._targets.values():
            if not target.is_dialled and any(self._may_dial(target, source) for source in target.sources):
                times += [at for at in target.retry_at.values() if at > now]
        times += [at for at in self._deadlines() if at > now]
        return min(times, default=math.inf)

    def is_settled(self, now: float) -> bool:
        """Whether a peer that starts should go on with what it knows: the swarm is joined, or whoever is quick to
        answer has had the time to."""
        if not self.is_alone:
            return True
        if now >= self._deadlines()[-1]:
            return True
        looking = any(each.is_first and now < self._begun + each.patience_s for each in self._rounds.values())
        untried = any(
            target.is_dialled or not (target.failures or target.was_reached) for target in self._targets.values()
        )
        return not looking and not untried

    def reports(self, notes: Mapping[Source, str], now: float) -> list[SourceReport]:
        targets = self._targets.values()
        return [
            SourceReport(
                source=source,
                note=notes.get(source, ""),
                problem=each.problem,
                candidates=sum(source in target.sources for target in targets),
                dialled=sum(source in target.dialled_by for target in targets),
                reached=sum(source in target.reached_by for target in targets),
                failure=each.failure,
                looks_again_s=None if each.next_at == math.inf else max(0.0, each.next_at - now),
            )
            for source, each in self._rounds.items()
        ]

    # -- inside

    def _dials_of(self, source: Source, now: float) -> Iterator[Attempt]:
        each = self._rounds[source]
        for key, target in self._targets.items():
            if each.n_dialling >= DIALS_AT_A_TIME:
                return
            if source not in target.sources or target.is_dialled or not self._may_dial(target, source):
                continue
            addresses = tuple(address for address, at in target.retry_at.items() if at <= now)
            if addresses:
                target.is_dialled = True
                each.n_dialling += 1
                each.n_refreshed += not self.is_alone
                target.dialled_by.add(source)
                vouched = tuple(address for address in addresses if address in target.vouched)
                yield Attempt(key, target.peer, addresses, source, vouched)

    def _deadlines(self) -> list[float]:
        """When the patience for each source ends, and last the patience for those whom they gave."""
        ends = sorted(self._begun + each.patience_s for each in self._rounds.values())
        return [*ends, (ends[-1] if ends else self._begun) + GHOST_S]

    def _may_dial(self, target: _Target, source: Source) -> bool:
        if self.is_alone:
            return True
        is_known = target.was_reached or target.peer in self._members
        return not is_known and self._rounds[source].n_refreshed < ALLOWANCE[source]

    def _over(self, attempt: Attempt) -> tuple[_Target | None, _Round]:
        each = self._rounds[attempt.source]
        each.n_dialling -= 1
        target = self._targets.get(attempt.target)
        if target is not None:
            target.is_dialled = False
        return target, each

    def _has_room(self, source: Source) -> bool:
        """Makes room for one more of `source`, if need be in place of the one that failed most."""
        own = {key: target for key, target in self._targets.items() if target.made_by is source}
        if len(own) < MAX_TARGETS:
            return True
        worst = min(own, key=lambda key: (own[key].is_dialled, own[key].worth))
        if own[worst].is_dialled or not own[worst].failures:
            return False
        del self._targets[worst]
        return True

    def _forget_an_address(self, target: _Target) -> None:
        """The one that failed most, if any did and none of them is being dialled."""
        if target.failures and not target.is_dialled:
            worst = max(target.failures, key=lambda address: target.failures[address])
            del target.failures[worst], target.retry_at[worst]
            target.vouched.discard(worst)
