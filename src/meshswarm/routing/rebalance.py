"""Whether a peer should serve other layers than it does: decided by each peer alone, without a coordinator.

A move must raise the weakest of the layers it leaves and takes (Petals chooses spans by the weakest block too,
arXiv:2209.01188; SWARM moves peers to the stage that lacks them most, arXiv:2301.11913), and what those layers could
do evenly must be at least a quarter above that weakest one. The weakest layers of the swarm therefore only ever rise
by moves, sorted from below, and no chain of moves comes back to where it began.

The rule this file keeps: of peers that would move and are neighbours (they hold, or would take, layers that touch) only
one moves in a round, and who it is follows from what all of them know. A peer never leaves a layer that nobody else
has loaded, but where others are missing already and more of them get a holder than lose one. What others claim to have
loaded it relies on only where it trusts them, or where nothing is answered without the move.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from meshswarm.identity import PeerId
from meshswarm.routing.restraint import settle_s
from meshswarm.routing.view import Holder, View, level, lot, rows_per_s
from meshswarm.span import MAX_LAYERS, Span

ROUND_S = 10.0
"""How often a peer asks itself. Layers without a holder are looked at in every round."""
CALM_ROUNDS = 3
"""Other moves are thought of in each third round only: by then everybody has heard of those before."""
GAIN_PERCENT = 125
"""What the weakest layer must be able to gain before anybody moves for it."""
FAIR_ROUNDS = 4
"""In each fourth round the lot alone decides who chooses first: somebody who claims to be spare and never goes must not
keep all others from a gap."""
MAX_WAIT_S = 3.0
"""Jitter: who is to move waits up to so long, then asks again."""


@dataclass(frozen=True, slots=True)
class Own:
    """What only the peer itself knows. `fits`: whether a legal span fits into its memory alone; `fits_beside`: whether
    it does beside what is loaded now, so that nothing has to be given up before. `moved_s`: when it last took layers,
    on the clock of `now`; `n_moves`: how often it did so lately. `trusted`: whose claims it relies on when it leaves
    layers, None for everybody's. `is_pinned`: a person chose its layers."""

    peer: PeerId
    fits: Callable[[Span], bool]
    fits_beside: Callable[[Span], bool]
    moved_s: float = float("-inf")
    n_moves: int = 0
    trusted: frozenset[PeerId] | None = None
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Serve `span` instead, after `wait_s` if it still holds then. `is_beside`: load it before the old one is let go;
    else the old one is drained first, and others have its layers. `reason`: a sentence."""

    span: Span
    is_beside: bool
    reason: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class Stay:
    """Serve on. `is_spare`: others can serve these layers without this peer. `reason`: a sentence."""

    reason: str
    is_spare: bool = False


def propose(view: View, own: Own, rng: random.Random, now: float) -> Move | Stay:
    """What this peer should do in the round that `now`, in seconds of Unix time, lies in."""
    me = view.by_peer.get(own.peer)
    if me is None or not me.stays:
        return Stay("It is not serving yet, or not any more.")
    is_spare = own.peer in view.spare
    if own.is_pinned or not me.is_mobile:
        return Stay("A person chose its layers.", is_spare=False)
    if not _is_time(view, now):
        return Stay(_content(view, me), is_spare)
    wanted = _candidates(view, me)
    if not wanted:
        return Stay(_content(view, me), is_spare)
    if now - own.moved_s < settle_s(own.n_moves, is_urgent=wanted[0].is_urgent):
        return Stay("It took these layers just now." if own.n_moves < 2 else "It moved often of late.", is_spare)
    wish = _elected(view, now).get(own.peer)
    if wish is None:
        return Stay("A neighbour moves first.", is_spare)
    real = _real(view, me, wish, own)
    if real is None:
        return Stay("The layers that need a holder more do not fit here, or not without leaving these alone.", is_spare)
    return Move(real.span, own.fits_beside(real.span), _because(view, me, real), rng.uniform(0, MAX_WAIT_S))


# -- what a move is worth


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A move to `span`: the weakest level of the layers it leaves and takes, `before` and `after` it, and what all of
    them could do evenly. `n_weakest`: how many of the layers it takes are that weak; `n_lost`: how many of those it
    leaves nobody else has loaded."""

    span: Span
    before: int
    after: int
    n_weakest: int
    n_lost: int
    even: int

    @property
    def is_urgent(self) -> bool:
        """Whether it takes layers that nobody has."""
        return self.before == 0

    @property
    def is_worth_it(self) -> bool:
        if self.is_urgent:
            return self.n_weakest > self.n_lost
        return self.after > self.before and max(self.after, self.even) * 100 >= GAIN_PERCENT * self.before


def _candidates(view: View, me: Holder) -> list[_Candidate]:
    """Moves to as many layers as it has now that are worth it, the most needed first: that much everybody can work out
    for everybody."""
    found = view.memo.get((me.peer, "candidates"))
    if found is None:
        prospect = _Prospect(view, me)
        assessed = [prospect.of(span) for span in _weak_windows(view, len(me.span)) if span != me.span]
        found = sorted((each for each in assessed if each.is_worth_it), key=lambda each: _need(me, each))
        view.memo[me.peer, "candidates"] = found
    assert isinstance(found, list)
    return found


def _need(me: Holder, move: _Candidate) -> tuple[int, int, int, int, int]:
    overlap = max(0, min(me.span.stop, move.span.stop) - max(me.span.start, move.span.start))
    return move.before, move.n_lost - move.n_weakest, -move.after, -overlap, move.span.start


def _weak_windows(view: View, n_layers: int) -> list[Span]:
    """The legal spans of at most `n_layers`, none within another, with a layer so weak that moving there may be worth
    it: leaving others behind, a move lifts the weakest to what the strongest is at most."""
    if view.cuts.refusal is not None:
        return []
    found = view.memo.get(("windows", n_layers))
    if found is None:
        by_stop: dict[int, Span] = {}
        for start in view.cuts.starts:
            stops = [stop for stop in _stops(view, start) if stop <= start + n_layers]
            if stops:
                by_stop.setdefault(stops[-1], Span(start, stops[-1]))
        most = 100 * max(view.levels)
        weak = (span for span in by_stop.values() if GAIN_PERCENT * min(view.levels[span.start : span.stop]) <= most)
        found = view.memo["windows", n_layers] = list(weak)
    assert isinstance(found, list)
    return found


def _stops(view: View, start: int) -> Iterator[int]:
    """Where a span from there may stop."""
    yield from (at for at in view.cuts.starts if at > start)
    yield view.n_layers


class _Prospect:
    """What becomes of each layer when one holder moves. `kept`: for each layer, whether others have it loaded who can
    be relied on; else whoever says so counts."""

    def __init__(self, view: View, me: Holder, kept: Sequence[bool] | None = None) -> None:
        self._levels = view.levels
        self._old = old = me.span
        self._me = me
        rate = me.rate(len(old))
        self._others = [
            (all_rate - rate, count - 1) if i in old else (all_rate, count)
            for i, (all_rate, count) in enumerate(zip(view.rates, view.counts, strict=True))
        ]
        # What nobody else has loaded cannot be left, whoever is on the way to it.
        kept = [n > 1 for n in view.firm] if kept is None else kept
        self._left = [level(*self._others[i]) if kept[i] else 0 for i in range(old.start, old.stop)]
        self._with: dict[int, list[int]] = {}
        self._is_incomplete = bool(view.unheld)

    def of(self, span: Span) -> _Candidate:
        """What moving to `span` is worth."""
        old, levels = self._old, self._levels
        there = levels[span.start : span.stop]
        first, last = max(old.start, min(old.stop, span.start)), min(old.stop, max(old.start, span.stop))
        if first >= last:  # they do not overlap
            first = last = old.stop
        leaving = [*levels[old.start : first], *levels[last : old.stop]]
        left = [*self._left[: first - old.start], *self._left[last - old.start :]]
        before = min(*there, *leaving)
        after = min(*self._served(len(span))[span.start : span.stop], *left)
        even = (sum(there) + sum(leaving)) // (len(there) + len(leaving))
        # Where layers are missing nothing is answered anyway, and the more of them have a holder the better.
        n_lost = left.count(0) if self._is_incomplete else MAX_LAYERS * (0 in left)
        return _Candidate(span, before, after, there.count(before), n_lost, even)

    def _served(self, n_layers: int) -> list[int]:
        """Each layer's level with this peer, when it serves so many."""
        if n_layers not in self._with:
            rate = self._me.rate(n_layers)
            self._with[n_layers] = [level(others + rate, count + 1) for others, count in self._others]
        return self._with[n_layers]


def _round(now: float) -> int:
    return int(now // ROUND_S)


def _is_time(view: View, now: float) -> bool:
    """Whether anybody may move in this round: layers are without a holder, or it is one for moves that can wait."""
    weakest = min(view.levels)
    return weakest == 0 or (_round(now) % CALM_ROUNDS == 0 and GAIN_PERCENT * weakest <= 100 * max(view.levels))


# -- one of a neighbourhood at a time


def _elected(view: View, now: float) -> dict[PeerId, _Candidate]:
    """Who is to move in this round, and where to, as everybody works it out who has this view.

    Those first whose going costs no layer its holder, and of them the spare ones, else by lot, each gets the most
    needed of its moves that touches none given out before, nor, unless layers are without a holder, one still going on.
    """
    key = ("elected", _round(now))
    elected = view.memo.get(key)
    if elected is None:
        given: dict[PeerId, _Candidate] = {}
        moving = [
            span for holder in view.holders if holder.next_span is not None for span in (holder.span, holder.planned)
        ]
        zones: list[Span] = []
        would = [holder for holder in view.holders if holder.is_mobile and holder.stays]
        would = [holder for holder in would if _candidates(view, holder)]
        for holder in sorted(would, key=lambda each: _turn(view, each, now)):
            if _touches([holder.span], zones):
                continue
            for wish in _candidates(view, holder):
                zone = _zone(holder.span, wish)
                if not _touches(zone, zones) and (wish.is_urgent or not _touches(zone, moving)):
                    given[holder.peer] = wish
                    zones += zone
                    break
        elected = view.memo[key] = given
    assert isinstance(elected, dict)
    return elected


def _turn(view: View, holder: Holder, now: float) -> tuple[int, bool, bytes]:
    """Who chooses first: another order in each round."""
    if _round(now) % FAIR_ROUNDS == FAIR_ROUNDS - 1:
        return 0, False, lot(holder.peer, _round(now))
    return _candidates(view, holder)[0].n_lost, holder.peer not in view.spare, lot(holder.peer, _round(now))


def _zone(old: Span, wish: _Candidate) -> tuple[Span, Span]:
    """What a peer holds, and what it may take: it may find room for twice as many layers as others expect."""
    return old, Span(wish.span.start, min(wish.span.start + 2 * len(wish.span), MAX_LAYERS))


def _touches(zone: Iterable[Span], others: Sequence[Span]) -> bool:
    return any(a.start <= b.stop and b.start <= a.stop for a in zone for b in others)


# -- memory, which only the peer itself knows


def _real(view: View, me: Holder, wish: _Candidate, own: Own) -> _Candidate | None:
    """The best move within the zone that is this peer's in this round: to what fits beside the old layers, or, where
    others have those or nothing is answered without the new ones, to what fits alone."""
    _, zone = _zone(me.span, wish)
    is_missed = wish.is_urgent and bool(view.unheld)
    kept = _kept(view, me, None if is_missed else own.trusted)
    prospect = _Prospect(view, me, kept)
    can_swap = is_missed or all(kept[me.span.start : me.span.stop])
    found: list[_Candidate] = []
    for start in (at for at in view.cuts.starts if at in zone and at < wish.span.stop):
        for stop in reversed([at for at in _stops(view, start) if at <= zone.stop]):
            span = Span(start, stop)
            move = prospect.of(span)
            fits = span != me.span and move.is_worth_it and move.before <= wish.before and own.fits(span)
            if fits and (can_swap or own.fits_beside(span)):
                found.append(move)
                break
    return min(found, key=lambda move: (_need(me, move)[:2], -len(move.span), _need(me, move)), default=None)


def _kept(view: View, me: Holder, trusted: frozenset[PeerId] | None) -> list[bool]:
    """For each layer, whether another holder has it loaded and stays, of those who are `trusted`."""
    kept = [False] * view.n_layers
    for holder in view.holders:
        if holder.stays and holder.peer != me.peer and (trusted is None or holder.peer in trusted):
            kept[holder.span.start : holder.span.stop] = [True] * len(holder.span)
    return kept


# -- in words


def _because(view: View, me: Holder, move: _Candidate) -> str:
    going = f"going to {move.span} from {me.span}"
    gap = next((gap for gap in view.unheld if _overlap(gap, move.span)), None)
    if gap is not None:
        return f"Nobody serves the layers {gap}: {going}, which can do without this peer."
    weakest = next(i for i in range(move.span.start, move.span.stop) if view.levels[i] <= move.before)
    if move.is_urgent:
        return f"Whoever serves layer {weakest} is about to leave it: {going}."
    if view.counts[weakest] == 1:
        return f"Layer {weakest} and others have one holder only: {going}."
    share = move.before * 100 // max(move.even, move.after)
    return f"Layer {weakest} does {rows_per_s(view.rates[weakest]):.0f} rows/s, {share} % of an even share: {going}."


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop


def _content(view: View, me: Holder) -> str:
    if view.unheld and view.cuts.refusal is None:
        return "Layers without a holder cannot be taken without leaving others alone."
    return f"The layers {me.span} need it as much as any others do."
