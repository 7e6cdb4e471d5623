"""What lookups cost and give, seen from outside the core that makes them.

The rule this file keeps: rounds are counted by who named whom, not by what a core says of itself. Contacts of the own
table are the first round, those that they name the second, and so on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.peers import Crowd, Peer

from meshswarm.dht.keys import node_id
from meshswarm.dht.signed import RecordSet
from meshswarm.identity import PeerId


@dataclass(frozen=True, slots=True)
class Outcome:
    """One lookup. `hit`: what was sought came back. `hit_round`: the round of the first answer with it, None without
    one; `rounds`: of the last answer that was waited for. `questions`: how many peers answered."""

    hit: bool
    hit_round: int | None
    rounds: int
    questions: int
    elapsed_s: float


@dataclass(slots=True)
class _Watch:
    """What is seen of one lookup while it runs."""

    sought: PeerId
    round_of: dict[PeerId, int] = field(default_factory=dict)
    answered: int = 0
    rounds: int = 0
    hit_round: int | None = None

    def saw(self, contact: Any, found: Any) -> None:
        depth = self.round_of.get(contact.peer, 1)
        self.answered += 1
        self.rounds = max(self.rounds, depth)
        for named in found.contacts:
            self.round_of.setdefault(named.peer, depth + 1)
        has_it = any(self.sought.key in record for record in found.records)
        if has_it or any(named.peer == self.sought for named in found.contacts):
            self.hit_round = min(self.hit_round or depth, depth)


async def find_record(seeker: Peer, key: bytes, author: Peer) -> Outcome:
    """`seeker` looks up `key` over the network for what `author` has published under it."""
    watch = _Watch(author.peer_id)
    records, elapsed_s = await _watched(seeker, key, watch, wants_records=True)
    now = seeker.network.loop.unix_s()
    hit = any(record.author == author.peer_id for record in records.live(now))
    return Outcome(hit, watch.hit_round if hit else None, watch.rounds, watch.answered, elapsed_s)


async def find_peer(seeker: Peer, sought: Peer) -> Outcome:
    """`seeker` looks up the place of `sought`. A hit is its contact among the nearest that answered."""
    watch = _Watch(sought.peer_id)
    began = seeker.network.loop.now_s
    lookups, _ = await _look_up(seeker, node_id(sought.peer_id), watch, wants_records=False)
    hit = any(found.contact.peer == sought.peer_id for found in lookups[0].found())
    if watch.hit_round is None and hit:
        watch.hit_round = 1  # it was in the own table
    return Outcome(hit, watch.hit_round, watch.rounds, watch.answered, seeker.network.loop.now_s - began)


async def _watched(seeker: Peer, key: bytes, watch: _Watch, *, wants_records: bool) -> tuple[RecordSet, float]:
    began = seeker.network.loop.now_s
    _, records = await _look_up(seeker, key, watch, wants_records=wants_records)
    return records, seeker.network.loop.now_s - began


async def _look_up(seeker: Peer, key: bytes, watch: _Watch, *, wants_records: bool) -> Any:
    core = seeker.dht._core
    honest: Callable[..., bool] = core.take_found

    def take_found(contact: Any, found: Any, lookups: Iterable[Any], *more: Any, **named: Any) -> bool:
        if any(lookup.target == key for lookup in lookups):
            watch.saw(contact, found)
        return honest(contact, found, lookups, *more, **named)

    core.take_found = take_found  # type: ignore[method-assign]
    try:
        return await seeker.dht._questions.look_up([key], wants_records=wants_records)
    finally:
        del core.take_found


@dataclass(frozen=True, slots=True)
class Summary:
    """Many lookups."""

    n: int
    n_hits: int
    median_hit_round: float
    median_rounds: float
    median_questions: float
    median_s: float
    p99_s: float

    @property
    def success(self) -> float:
        return self.n_hits / self.n

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Summary:
        times = sorted(outcome.elapsed_s for outcome in outcomes)
        return cls(
            n=len(outcomes),
            n_hits=sum(outcome.hit for outcome in outcomes),
            median_hit_round=statistics.median(o.hit_round for o in outcomes if o.hit_round is not None),
            median_rounds=statistics.median(outcome.rounds for outcome in outcomes),
            median_questions=statistics.median(outcome.questions for outcome in outcomes),
            median_s=statistics.median(times),
            p99_s=times[min(len(times) - 1, int(0.99 * len(times)))],
        )


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes a peer sends in a second, of peers that lived through the whole measurement."""

    mean: float
    median: float
    p99: float
    dials: float
    questions: float
    answers: float
    pings: float
    dials_per_s: float
    questions_per_s: float


class TrafficMeter:
    """From its making to `read`, of peers that lived through all of it and are not in `excluded`: those that measured
    something else meanwhile."""

    def __init__(self, crowd: Crowd) -> None:
        self.excluded: set[Peer] = set()
        self._crowd = crowd
        self._began_s = crowd.loop.now_s
        crowd.network.settle()
        self._before = {peer: peer.endpoint.traffic.copy() for peer in crowd.living}

    def read(self) -> Sent:
        self._crowd.network.settle()
        seconds = self._crowd.loop.now_s - self._began_s
        counted = ((peer, old) for peer, old in self._before.items() if peer.is_up and peer not in self.excluded)
        spent = [peer.endpoint.traffic.since(old) for peer, old in counted]
        totals = sorted(traffic.total / seconds for traffic in spent)

        def mean(part: Callable[[Any], int]) -> float:
            return sum(part(traffic) for traffic in spent) / len(spent) / seconds

        return Sent(
            mean=statistics.mean(totals),
            median=statistics.median(totals),
            p99=totals[min(len(totals) - 1, int(0.99 * len(totals)))],
            dials=mean(lambda t: t.dials),
            questions=mean(lambda t: t.requests),
            answers=mean(lambda t: t.replies),
            pings=mean(lambda t: t.pings),
            dials_per_s=mean(lambda t: t.n_dials),
            questions_per_s=mean(lambda t: t.n_requests),
        )
