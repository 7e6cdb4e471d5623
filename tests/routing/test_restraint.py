"""Swarms with a liar in them, who claims layers and takes that back at the worst moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from tests.routing.balance import Swarm, cuts_of, peer_id

from meshswarm.routing.rebalance import ROUND_S
from meshswarm.routing.restraint import (
    MAX_SETTLE_S,
    MAX_URGENT_SETTLE_S,
    MEMORY_S,
    N_FREE_MOVES,
    SETTLE_S,
    TRUST_S,
    Claims,
    Moves,
    settle_s,
)
from meshswarm.routing.view import Holder, View
from meshswarm.span import Span

HOUR = int(3600 / ROUND_S)
LOW, HIGH = Span(0, 6), Span(6, 12)


@dataclass(slots=True)
class LiedTo(Swarm):
    """`lie`: what is claimed in a round, by somebody who sees where everybody is and goes."""

    lie: Callable[[Sequence[Holder]], Sequence[Holder]] = lambda honest: ()

    def view(self) -> View:
        honest = tuple(member.holder for member in self.members.values())
        return View(self.cuts, (*honest, *self.lie(honest)), self.demand)

    def n_moves(self, rounds: int = HOUR) -> int:
        for _ in range(rounds):
            self.round()
        return sum(map(len, self.moves))


def lied_to(lie: Callable[[Sequence[Holder]], Sequence[Holder]], *spans: Span, seed: int = 0) -> LiedTo:
    swarm = LiedTo(cuts_of(12), random.Random(seed), load_s=10.0, now=1e6, lie=lie)
    for span in spans:
        swarm.join(span, most=6, us_per_layer=1000)
    swarm.grow_old()
    return swarm


def claim(span: Span, number: int = 99, us: int = 10) -> Holder:
    return Holder(peer_id(number), span, us, is_mobile=False)


def lure_away(honest: Sequence[Holder]) -> Sequence[Holder]:
    """Claims the half of one of two, so that it goes to help the other, and takes the claim back once it has."""
    planned = {holder.planned for holder in honest}
    return [claim(HIGH)] if planned == {LOW, HIGH} else []


def lure_both_ways(honest: Sequence[Holder]) -> Sequence[Holder]:
    """Claims what the only other holder has, so that it leaves it for the half that nobody has."""
    return [claim(honest[0].planned)]


def stand_still(honest: Sequence[Holder]) -> Sequence[Holder]:
    """Says of each of three that they are spare, and move by themselves; they never do."""
    return [Holder(peer_id(90 + n), LOW, 90_000 + n, is_mobile=True) for n in range(3)]


def without_restraint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshswarm.routing.restraint.TRUST_S", -1.0)
    monkeypatch.setattr(
        "meshswarm.routing.rebalance.settle_s", lambda n_moves, *, is_urgent: 0.0 if is_urgent else SETTLE_S
    )


@pytest.mark.parametrize(
    ("lie", "spans", "most", "before"), [(lure_away, (LOW, HIGH), 8, 20), (lure_both_ways, (LOW,), 12, 100)]
)
def test_a_liar_makes_peers_move_a_few_times_an_hour_at_most(
    lie: Callable[[Sequence[Holder]], Sequence[Holder]],
    spans: tuple[Span, ...],
    most: int,
    before: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = [lied_to(lie, *spans, seed=seed).n_moves() for seed in range(5)]
    assert max(moves) <= most, moves
    without_restraint(monkeypatch)
    assert lied_to(lie, *spans).n_moves() >= before, "so many without restraint: the lie is one that works"


def test_whoever_claims_to_be_spare_and_never_goes_keeps_nobody_from_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = lied_to(stand_still, LOW, LOW)
    for _ in range(30):
        swarm.round()
    assert not swarm.view().unheld and any(swarm.moves[:8])
    monkeypatch.setattr("meshswarm.routing.rebalance.FAIR_ROUNDS", 10**9)
    kept_out = lied_to(stand_still, LOW, LOW)
    for _ in range(30):
        kept_out.round()
    assert kept_out.view().unheld, "so it would be else"


def test_layers_are_left_to_those_whose_claims_have_stood_for_minutes() -> None:
    """Each half has one holder, and a fast one comes to the second: nobody is in a hurry."""
    swarm = lied_to(lambda honest: [], LOW, HIGH)
    newcomer = swarm.join(HIGH, most=6, us_per_layer=10)
    newcomer.moves.moved(swarm.now)
    while not swarm.round():
        assert swarm.now < 1e6 + 3 * TRUST_S
    assert swarm.now - 1e6 > TRUST_S and swarm.moves[-1] == [(HIGH, LOW)]


def test_a_claim_that_was_taken_back_begins_anew() -> None:
    claims, standing = Claims(), View(cuts_of(12), (claim(LOW), claim(HIGH, 98)))
    claims.see(standing, 0.0)
    claims.see(standing, TRUST_S)
    assert claims.trusted(TRUST_S) == {peer_id(99), peer_id(98)}
    claims.see(View(cuts_of(12), (claim(LOW),)), TRUST_S)
    claims.see(standing, TRUST_S + 1)
    assert claims.trusted(2 * TRUST_S) == {peer_id(99)}
    assert claims.trusted(2 * TRUST_S + 1) == {peer_id(99), peer_id(98)}
    claims.see(View(cuts_of(12), (claim(HIGH), claim(HIGH, 98))), 3 * TRUST_S)
    assert claims.trusted(3 * TRUST_S) == {peer_id(98)}, "other layers are another claim"


def test_each_further_move_takes_twice_as_long_up_to_a_limit_and_is_forgotten_in_time() -> None:
    moves = Moves(0.0)
    assert moves.n_lately(0.0) == 0 and moves.last_s == 0.0
    waits = []
    for at in range(12):
        moves.moved(float(at))
        waits.append((settle_s(moves.n_lately(at), is_urgent=False), settle_s(moves.n_lately(at), is_urgent=True)))
    assert [calm for calm, _ in waits[:4]] == [SETTLE_S, 2 * SETTLE_S, 4 * SETTLE_S, 8 * SETTLE_S]
    assert [urgent for _, urgent in waits[: N_FREE_MOVES + 2]] == [0.0] * N_FREE_MOVES + [30.0, 60.0]
    assert waits[-1] == (MAX_SETTLE_S, MAX_URGENT_SETTLE_S)
    assert moves.n_lately(MEMORY_S + 5.5) == 6
