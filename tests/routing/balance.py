"""A swarm of one model on a virtual clock, whose peers decide with the real core: for tests and for measuring.

What a peer knows is what was true some rounds ago. A move takes `load_s`; meanwhile the old layers are served where
both fit, and not where they do not.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshswarm.identity import PeerId
from meshswarm.routing.placement import neediest
from meshswarm.routing.rebalance import ROUND_S, Move, Own, propose
from meshswarm.routing.restraint import TRUST_S, Claims, Moves
from meshswarm.routing.view import Holder, View, rows_per_s
from meshswarm.span import Span
from meshswarm.stage.families.cuts import LegalCuts


def peer_id(number: int) -> PeerId:
    return PeerId(hashlib.sha256(number.to_bytes(8, "big")).digest())


def cuts_of(n_layers: int, every: int = 1) -> LegalCuts:
    return LegalCuts(n_layers, tuple(range(0, n_layers, every)), None)


@dataclass(slots=True)
class Member:
    """A peer: what it holds, how many layers fit, whether both slices do, and when it took layers."""

    holder: Holder
    most: int
    has_room_for_two: bool
    moves: Moves = field(default_factory=lambda: Moves(float("-inf")))
    ready_s: float = 0.0
    n_moves: int = 0
    is_beside: bool = True

    def own(self, now: float, trusted: frozenset[PeerId] | None) -> Own:
        def fits(span: Span) -> bool:
            return len(span) <= self.most

        def fits_beside(span: Span) -> bool:
            return self.has_room_for_two and fits(span)

        return Own(self.holder.peer, fits, fits_beside, self.moves.last_s, self.moves.n_lately(now), trusted)


@dataclass(slots=True)
class Swarm:
    """`lag_rounds`: how old what a peer knows may be. `claims`: since when all of them have known of each claim."""

    cuts: LegalCuts
    rng: random.Random
    load_s: float = 20.0
    lag_rounds: int = 0
    demand: float = 1.0
    now: float = 0.0
    members: dict[PeerId, Member] = field(default_factory=dict)
    known: list[View] = field(default_factory=list)
    moves: list[list[tuple[Span, Span]]] = field(default_factory=list)
    claims: Claims = field(default_factory=Claims)
    n_born: int = 0

    def join(self, span: Span | None = None, *, most: int, us_per_layer: int, has_room_for_two: bool = True) -> Member:
        """A newcomer, loaded at once: at `span`, or where it is needed most."""
        self.n_born += 1
        if span is None:
            windows = [Span(at, min(at + most, self.cuts.n_layers)) for at in self.cuts.starts]
            span = neediest(windows, self.view().levels)
            assert span is not None
        holder = Holder(peer_id(self.n_born), span, us_per_layer, is_mobile=True)
        member = self.members[holder.peer] = Member(holder, most, has_room_for_two)
        return member

    def grow_old(self) -> None:
        """Everybody has known everybody for long."""
        self.claims.see(self.view(), self.now - 2 * TRUST_S)

    def leave(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            del self.members[peer]

    def view(self) -> View:
        """What is true now."""
        return View(self.cuts, tuple(member.holder for member in self.members.values()), self.demand)

    def round(self) -> int:
        """One round; how many peers began to move."""
        self._arrive()
        self.known = [self.view(), *self.known][: self.lag_rounds + 1]
        self.claims.see(self.known[0], self.now)
        trusted = self.claims.trusted(self.now)
        begun: list[tuple[Span, Span]] = []
        for member in self.members.values():
            view = self.known[self.rng.randrange(len(self.known))]
            decision = propose(view, member.own(self.now, trusted), self.rng, self.now)
            if isinstance(decision, Move) and member.holder.next_span is None:
                begun.append((member.holder.span, decision.span))
                member.is_beside = decision.is_beside
                member.holder = replace(
                    member.holder, next_span=decision.span, is_loaded=member.holder.is_loaded and decision.is_beside
                )
                member.ready_s = self.now + self.load_s
                member.moves.moved(self.now)
                member.n_moves += 1
        self.moves.append(begun)
        self.now += ROUND_S
        return len(begun)

    def _arrive(self) -> None:
        for member in self.members.values():
            if member.holder.next_span is not None and member.ready_s <= self.now:
                member.holder = replace(member.holder, span=member.holder.next_span, next_span=None, is_loaded=True)

    def ideal(self) -> float:
        """What every layer would do if all speed lay evenly on all layers: no swarm of these peers can do better."""
        return sum(1e6 / m.holder.us_per_layer for m in self.members.values()) / self.cuts.n_layers

    def weakest(self) -> float:
        """Rows a second of the weakest layer, of what is loaded now."""
        loaded = tuple(m.holder for m in self.members.values() if m.holder.is_loaded)
        rates = View(self.cuts, tuple(replace(h, next_span=None) for h in loaded)).rates
        return rows_per_s(min(rates))
