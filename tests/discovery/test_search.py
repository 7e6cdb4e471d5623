"""Whom to dial when, on a virtual clock: ghosts, floods, parted halves, and a swarm that goes away."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.discovery.candidate import Candidate, Source
from meshswarm.discovery.search import (
    ALLOWANCE,
    BACK_OFF_S,
    DIALS_AT_A_TIME,
    GHOST_S,
    LONGEST_PAUSE_S,
    MAX_ADDRESSES,
    MAX_TARGETS,
    REFRESH_S,
    Attempt,
    Search,
)
from meshswarm.identity import PeerId

ALL = {Source.KNOWN: 1.0, Source.ASKED: 1.0, Source.LAN: 1.5, Source.RENDEZVOUS: 6.0}
DIAL_TO_NOBODY_S = 2.0  # what `net` waits for a first packet


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32))


def address(number: int) -> Address:
    return Address(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 4810)


def candidate(number: int, source: Source = Source.KNOWN) -> Candidate:
    return Candidate(peer(number), (address(number),), source)


class World:
    """Drives a `Search` on a virtual clock. `living`: who answers, and after how long; others cost 2 s each."""

    def __init__(self, patience_s: dict[Source, float] = ALL, living: dict[PeerId, float] | None = None) -> None:
        self.now = 1000.0
        self.search = Search(patience_s, random.Random(7), self.now)
        self.living = living or {}
        self.members: set[PeerId] = set()
        self.begun: list[Source] = []
        self.ending: set[Source] = set()
        """Whose rounds end as soon as they have begun."""
        self.dialled: list[tuple[float, Attempt]] = []
        self.met_at: dict[PeerId, float] = {}
        self.settled_at: float | None = None
        self.most_at_once = 0
        self._flying: list[tuple[float, int, Attempt]] = []
        self._order = itertools.count()

    def offer(self, *candidates: Candidate) -> None:
        for each in candidates:
            self.search.offer(each, self.now)

    def end_rounds(self, sources: Iterable[Source] = ()) -> None:
        """Every round that is due begins; those of `sources` give nothing more."""
        begun = self.search.rounds(self.now)
        self.begun += begun
        for source in begun:
            if source in {*sources, *self.ending}:
                self.search.round_ended(source, "", self.now)

    def run(self, for_s: float) -> None:
        end = self.now + for_s
        while True:
            self.search.members(self.members, self.now)
            self.end_rounds()
            for attempt in self.search.dials(self.now):
                self.dialled.append((self.now, attempt))
                takes_s = self.living.get(attempt.peer, DIAL_TO_NOBODY_S) if attempt.peer else DIAL_TO_NOBODY_S
                heapq.heappush(self._flying, (self.now + takes_s, next(self._order), attempt))
            self.most_at_once = max(self.most_at_once, len(self._flying))
            if self.settled_at is None and self.search.is_settled(self.now):
                self.settled_at = self.now
            times = [self.search.next_at(self.now), self.now + 2.0]
            if self._flying:
                times.append(self._flying[0][0])
            if min(times) > end:
                self.now = end
                return
            self.now = min(times)
            while self._flying and self._flying[0][0] <= self.now:
                _, _, attempt = heapq.heappop(self._flying)
                if attempt.peer in self.living:
                    assert attempt.peer is not None
                    self.search.succeeded(attempt, self.now)
                    self.members.add(attempt.peer)
                    self.met_at.setdefault(attempt.peer, self.now)
                else:
                    self.search.failed(attempt, "no answer in 2 s", self.now)


def test_a_ghost_costs_two_seconds_once_and_holds_nobody_up() -> None:
    """64 ghosts of last time, and one peer on the local network that answers at once."""
    world = World({Source.KNOWN: 1.0, Source.LAN: 1.5}, living={peer(999): 0.05})
    world.end_rounds([Source.KNOWN])
    world.offer(*(candidate(n) for n in range(64)))
    world.run(0.3)
    world.offer(candidate(999, Source.LAN))
    world.run(0.1)
    assert world.met_at[peer(999)] - 1000 < 0.4 and world.settled_at is not None and world.settled_at - 1000 < 0.4
    world.run(600)
    tries = [attempt.peer for _, attempt in world.dialled if attempt.peer != peer(999)]
    assert len(tries) == DIALS_AT_A_TIME + 2, "those under way when somebody answered, and two to find parted halves"


def test_one_ghost_alone_delays_a_start_by_what_one_dial_takes() -> None:
    world = World({Source.KNOWN: 1.0})
    world.offer(candidate(1))
    world.end_rounds([Source.KNOWN])
    world.run(4.5)
    assert world.settled_at == 1000 + DIAL_TO_NOBODY_S
    assert len(world.dialled) == 1, "not dialled again within its back-off"
    world.run(3600)
    pauses = [b - a for (a, _), (b, _) in itertools.pairwise(world.dialled)]
    first_s, longest_s = BACK_OFF_S[Source.KNOWN]
    assert pauses == pytest.approx(sorted(pauses), rel=0.25)
    assert pauses[0] == pytest.approx(first_s + DIAL_TO_NOBODY_S, rel=0.1)
    assert pauses[-1] == pytest.approx(longest_s + DIAL_TO_NOBODY_S, rel=0.1)


def test_nothing_to_look_at_settles_at_once_and_ghosts_settle_in_bounded_time() -> None:
    world = World({Source.KNOWN: 1.0})
    assert not world.search.is_settled(world.now), "the first round is not over"
    world.end_rounds([Source.KNOWN])
    assert world.search.is_settled(world.now)
    world.offer(*(candidate(n) for n in range(64)))
    world.run(10)
    assert world.settled_at is not None and world.settled_at - 1000 <= 1.0 + GHOST_S


def test_a_start_waits_for_each_source_as_long_as_it_needs() -> None:
    world = World(ALL)
    world.end_rounds([Source.KNOWN, Source.ASKED])
    assert not world.search.is_settled(1000 + 5.9)
    assert world.search.is_settled(1000 + 6.0)


def test_all_sources_are_dialled_at_the_same_time_and_the_known_first() -> None:
    world = World(ALL)
    world.offer(candidate(1, Source.RENDEZVOUS), candidate(2, Source.LAN), candidate(3, Source.ASKED), candidate(4))
    assert [each.source for each in world.search.dials(world.now)] == list(Source)


def test_the_addresses_of_one_peer_from_several_sources_are_one_target() -> None:
    world = World(ALL)
    elsewhere = Address("10.9.9.9", 9)
    world.offer(candidate(1), candidate(1, Source.LAN), Candidate(peer(1), (elsewhere,), Source.RENDEZVOUS))
    (attempt,) = world.search.dials(world.now)
    assert attempt.addresses == (address(1), elsewhere)
    world.search.failed(attempt, "nobody", world.now)
    fresh = Address("10.9.9.10", 9)
    world.offer(Candidate(peer(1), (address(1), fresh), Source.LAN))
    (again,) = world.search.dials(world.now)
    assert again.addresses == (fresh,), "the others have their back-off"


def test_rounds_come_ever_more_rarely_while_alone_and_hardly_when_joined() -> None:
    world = World({Source.RENDEZVOUS: 6.0})
    search, now = world.search, world.now + 60
    pauses = []
    for _ in range(12):
        assert search.rounds(now) == [Source.RENDEZVOUS]
        assert search.rounds(now + 1e6) == [], "it looks already"
        search.round_ended(Source.RENDEZVOUS, "", now)
        pauses.append(search.next_at(now) - now)
        now += pauses[-1]
    assert 10 < pauses[0] < 20 and pauses == pytest.approx(sorted(pauses), rel=0.5)
    assert max(pauses) <= LONGEST_PAUSE_S * 1.2
    search.members([peer(1)], now)
    assert search.rounds(now) == [Source.RENDEZVOUS]
    search.round_ended(Source.RENDEZVOUS, "", now)
    assert search.next_at(now) - now == pytest.approx(REFRESH_S, rel=0.21)


def test_a_swarm_that_goes_away_is_looked_for_again_at_once() -> None:
    world = World({Source.KNOWN: 1.0, Source.RENDEZVOUS: 6.0}, living={peer(1): 0.1})
    world.ending = {Source.KNOWN, Source.RENDEZVOUS}
    world.offer(candidate(1), candidate(2))
    world.run(100)
    assert world.members == {peer(1)}
    world.members.clear()
    before = len(world.dialled)
    world.begun.clear()
    world.run(0)
    assert {attempt.peer for _, attempt in world.dialled[before:]} == {peer(1), peer(2)}
    assert set(world.begun) == {Source.KNOWN, Source.RENDEZVOUS}


def test_who_proved_the_swarm_and_never_came_into_it_is_tried_again() -> None:
    world = World({Source.KNOWN: 1.0})
    world.offer(candidate(1))
    for _ in range(3):
        (attempt,) = world.search.dials(world.now)
        world.search.succeeded(attempt, world.now)
        assert world.search.dials(world.now) == []
        world.now += 31


def test_an_address_that_a_person_gave_is_tried_on_though_the_swarm_is_joined() -> None:
    world = World({Source.KNOWN: 1.0, Source.ASKED: 1.0}, living={peer(1): 0.1})
    world.offer(candidate(1), candidate(2, Source.ASKED))
    world.run(120)
    tries = [at for at, attempt in world.dialled if attempt.peer == peer(2)]
    assert len(tries) >= 5
    world.living[peer(2)] = 0.1
    world.run(60)
    assert world.members == {peer(1), peer(2)}


def test_once_joined_a_flood_of_candidates_gets_a_few_dials_only() -> None:
    world = World(ALL)
    world.members = {peer(10**6)}
    for n in range(0, 3000, 100):
        world.offer(*(Candidate(None, (address(m),), Source.RENDEZVOUS) for m in range(n, n + 100)))
        world.run(1)
    assert len(world.dialled) == ALLOWANCE[Source.RENDEZVOUS]
    world.run(REFRESH_S)
    assert len(world.dialled) == 2 * ALLOWANCE[Source.RENDEZVOUS]


def test_a_flood_in_one_source_takes_nothing_from_the_others() -> None:
    world = World(ALL, living={peer(1): 0.2})
    world.offer(*(Candidate(None, (address(n),), Source.RENDEZVOUS) for n in range(5000)))
    world.run(3)
    assert world.most_at_once <= DIALS_AT_A_TIME
    world.offer(candidate(1, Source.LAN))
    world.run(0.3)
    assert peer(1) in world.met_at
    reports = {report.source: report for report in world.search.reports({}, world.now)}
    assert reports[Source.RENDEZVOUS].candidates == MAX_TARGETS


def test_newcomers_take_the_place_of_those_that_failed_most() -> None:
    world = World({Source.RENDEZVOUS: 6.0})
    for n in range(MAX_TARGETS):
        world.offer(Candidate(None, (address(n),), Source.RENDEZVOUS))
    world.offer(Candidate(None, (address(9999),), Source.RENDEZVOUS))
    assert address(9999) not in {attempt.target for attempt in _everybody(world)}, "nobody has failed yet"
    world.offer(Candidate(None, (address(9999),), Source.RENDEZVOUS))
    assert address(9999) in {attempt.target for attempt in _everybody(world)}


def _everybody(world: World) -> list[Attempt]:
    """Dials all that are due once; nobody answers."""
    seen = []
    while attempts := world.search.dials(world.now):
        for attempt in attempts:
            seen.append(attempt)
            world.search.failed(attempt, "nobody", world.now)
    return seen


def test_reports_say_what_came_of_each_source() -> None:
    world = World({Source.KNOWN: 1.0, Source.LAN: 1.5, Source.RENDEZVOUS: 6.0}, living={peer(1): 0.1})
    world.end_rounds([Source.KNOWN])
    world.search.round_ended(Source.RENDEZVOUS, "no node has answered", world.now)
    world.offer(candidate(1), candidate(2))
    world.run(5)
    known, lan, rendezvous = world.search.reports({Source.LAN: "3 peers of other swarms there"}, world.now)
    assert known.sentence == "2 possible peers, 2 dialled, 1 reached"
    assert lan.sentence == "nobody; 3 peers of other swarms there" and lan.looks_again_s is None
    assert rendezvous.sentence == "no node has answered" and rendezvous.looks_again_s is not None
    world.members.clear()
    ghosts = World({Source.KNOWN: 1.0})
    ghosts.offer(candidate(2))
    ghosts.run(3)
    assert ghosts.search.reports({}, 0)[0].sentence == "1 possible peer, 1 dialled, 0 reached (no answer in 2 s)"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["offer", "unknown", "dial", "ok", "bad", "join", "leave", "wait"]),
            st.integers(0, 300),
            st.sampled_from(list(Source)),
        ),
        max_size=200,
    )
)
def test_whatever_happens_the_bounds_hold(events: list[tuple[str, int, Source]]) -> None:
    search, now = Search(ALL, random.Random(1), 0.0), 0.0
    flying: list[Attempt] = []
    for what, n, source in events:
        match what:
            case "offer":
                addresses = tuple(address(n * 7 + m) for m in range(n % 11 + 1))
                search.offer(Candidate(peer(n % 40), addresses, source), now)
            case "unknown":
                search.offer(Candidate(None, (address(n), address(n + 1)), source), now)
            case "dial":
                flying += search.dials(now)
            case "ok" if flying:
                search.succeeded(flying.pop(n % len(flying)), now)
            case "bad" if flying:
                search.failed(flying.pop(n % len(flying)), "no", now)
            case "join":
                search.members([peer(n)], now)
            case "leave":
                search.members([], now)
            case "wait":
                now += n
        for each in Source:
            assert sum(attempt.source is each for attempt in flying) <= DIALS_AT_A_TIME
        assert len({attempt.target for attempt in flying}) == len(flying), "nobody is dialled twice at a time"
        assert all(0 < len(attempt.addresses) <= MAX_ADDRESSES for attempt in flying)
        assert search.next_at(now) >= 0 and len(search.reports({}, now)) == len(Source)
