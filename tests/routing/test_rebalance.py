"""When a peer takes other layers: what a move must gain, who of those who would moves, and that swarms come to rest."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.balance import Member, Swarm, cuts_of, peer_id

from meshswarm.routing.rebalance import CALM_ROUNDS, ROUND_S, Move, Own, Stay, propose
from meshswarm.routing.restraint import SETTLE_S
from meshswarm.routing.view import Holder, View
from meshswarm.span import Span

CALM = CALM_ROUNDS * ROUND_S * 1000
"""A round in which every move is thought of."""
URGENT = CALM + ROUND_S
"""One in which only layers without a holder are."""


def holder(number: int, start: int, stop: int, us: int = 1000, **other: object) -> Holder:
    return replace(Holder(peer_id(number), Span(start, stop), us, is_mobile=True), **other)  # type: ignore[arg-type]


def own(number: int, *, most: int = 99, beside: bool = True, moved_s: float = 0, is_pinned: bool = False) -> Own:
    def fits(span: Span) -> bool:
        return len(span) <= most

    return Own(peer_id(number), fits, lambda span: beside and fits(span), moved_s, is_pinned=is_pinned)


def view(*holders: Holder, n_layers: int = 12, every: int = 1, demand: float = 1.0) -> View:
    return View(cuts_of(n_layers, every), holders, demand)


def ask(seen: View, number: int, now: float = CALM, **how: object) -> Move | Stay:
    return propose(seen, own(number, **how), random.Random(0), now)  # type: ignore[arg-type]


def movers(seen: View, now: float = CALM, **how: object) -> dict[int, Move]:
    """Who of the peers with the numbers 1 to their count moves."""
    asked = {number: ask(seen, number, now, **how) for number in range(1, len(seen.holders) + 1)}
    return {number: answer for number, answer in asked.items() if isinstance(answer, Move)}


def test_layers_without_a_holder_are_taken_at_once_by_one_of_those_who_are_not_needed() -> None:
    seen = view(*(holder(n, 0, 6) for n in (1, 2, 3, 4)))
    ((number, move),) = movers(seen, URGENT).items()
    assert move.span == Span(6, 12)
    assert peer_id(number) in seen.spare
    assert move.reason == "Nobody serves the layers 6:12: going to 6:12 from 0:6, which can do without this peer."
    assert 0 <= move.wait_s <= 3


def test_the_last_holder_of_a_layer_stays_whatever_is_missing_elsewhere() -> None:
    assert movers(view(holder(1, 0, 6), holder(2, 6, 9)), most=3) == {}


def test_where_layers_are_missing_anyway_they_may_become_fewer() -> None:
    seen = view(holder(1, 0, 4), holder(2, 3, 7), holder(3, 4, 8))
    ((number, move),) = movers(seen, URGENT, most=4, beside=False).items()
    assert (number, move.span) == (2, Span(8, 12)), "all its layers have another holder"
    seen = View(replace(cuts_of(12), starts=(0, 4, 6)), (holder(1, 0, 4), holder(2, 0, 6)))
    ((number, move),) = movers(seen, URGENT, most=6, beside=False).items()
    assert (number, move.span) == (2, Span(6, 12)), "two layers lose their holder, and six get one"
    as_many = view(holder(1, 0, 4), holder(2, 4, 8), holder(3, 9, 13), n_layers=13)
    assert movers(as_many, URGENT, most=4) == {}, "one for one is no gain"
    about_to_be = view(holder(1, 0, 4), holder(2, 4, 8), holder(3, 8, 12, next_span=Span(0, 4)))
    assert movers(about_to_be, URGENT, most=4) == {}, "nothing is missing yet"


def test_layers_that_are_only_on_their_way_do_not_set_anybody_free() -> None:
    coming = holder(2, 0, 6, is_loaded=False)
    moving = holder(3, 6, 12, next_span=Span(0, 6))
    assert movers(view(holder(1, 0, 6), coming, moving)) == {}


def test_nobody_runs_for_a_gap_that_somebody_is_on_the_way_to() -> None:
    on_the_way = holder(4, 0, 6, next_span=Span(6, 12))
    assert movers(view(*(holder(n, 0, 6) for n in (1, 2, 3)), on_the_way), URGENT) == {}
    leaving = replace(on_the_way, is_leaving=True)
    assert len(movers(view(*(holder(n, 0, 6) for n in (1, 2, 3)), leaving), URGENT)) == 1


def test_layers_with_one_holder_get_a_second_before_others_get_a_third() -> None:
    first = [holder(n, 0, 4) for n in (1, 2, 3)]
    seen = view(*first, holder(4, 4, 8, us=10), holder(5, 8, 12), holder(6, 8, 12))
    ((_, move),) = movers(seen, most=4).items()
    assert move.span == Span(4, 8), "though its holder is fast"
    assert move.reason.startswith("Layer 4 and others have one holder only: going to 4:8 from 0:4")


@pytest.mark.parametrize(("us_of_weak", "moves"), [(1000, 1), (600, 0)])
def test_a_move_must_gain_a_quarter(us_of_weak: int, moves: int) -> None:
    strong = [holder(n, 0, 6) for n in range(1, 5)]
    weak = [holder(n, 6, 12, us=us_of_weak) for n in (5, 6)]
    assert len(movers(view(*strong, *weak))) == moves


def test_moves_that_can_wait_do_so_for_their_round_and_after_another_move() -> None:
    seen = view(*(holder(n, 0, 6) for n in (1, 2, 3, 4, 5)), holder(6, 6, 12), holder(7, 6, 12))
    assert len(movers(seen)) == 1
    assert movers(seen, URGENT) == {}
    assert movers(seen, moved_s=CALM - SETTLE_S + 1) == {}
    gap = view(*(holder(n, 0, 6) for n in (1, 2, 3)))
    assert len(movers(gap, URGENT, moved_s=URGENT - 1)) == 1


def test_who_was_told_what_to_serve_never_moves() -> None:
    layers = [holder(n, 0, 6) for n in (1, 2, 3)]
    assert movers(view(*layers), is_pinned=True) == {}
    assert movers(view(*(replace(each, is_mobile=False) for each in layers))) == {}
    assert movers(view(*layers, holder(4, 6, 12, is_mobile=False)), URGENT) == {}


def test_where_two_slices_do_not_fit_only_those_move_whose_layers_others_serve_meanwhile() -> None:
    seen = view(holder(1, 0, 6), holder(2, 0, 6), holder(3, 4, 8))
    ((_, move),) = movers(seen, URGENT, beside=False).items()
    assert not move.is_beside
    seven_is_its_own = view(holder(1, 0, 7, us=5000), holder(2, 8, 12), holder(3, 4, 11))
    assert movers(seven_is_its_own, most=7)[3].span == Span(1, 8)
    assert movers(seven_is_its_own, most=7, beside=False) == {}


def test_a_move_goes_to_as_much_as_fits_and_may_be_cut_out() -> None:
    seen = view(*(holder(n, 0, 4) for n in (1, 2, 3)), n_layers=16, every=4)
    ((_, move),) = movers(seen, URGENT, most=9).items()
    assert move.span == Span(4, 12)
    ((_, move),) = movers(seen, URGENT, most=4).items()
    assert move.span == Span(4, 8)
    assert movers(seen, URGENT, most=3) == {}


def test_a_model_that_cannot_be_split_moves_nobody() -> None:
    whole = replace(cuts_of(12), starts=(0,), refusal="it is served whole")
    seen = View(whole, (holder(1, 0, 12), holder(2, 0, 12), holder(3, 0, 12)))
    assert movers(seen) == {}


@pytest.mark.parametrize(("demand", "n_spare"), [(0.0, 2), (1.0, 2), (3.0, 1), (50.0, 0)])
def test_a_peer_is_spare_when_others_have_its_layers_twice_and_fast_enough(demand: float, n_spare: int) -> None:
    """4 peers of 333 rows/s each, and 256 rows a request."""
    seen = view(*(holder(n, 0, 6, us=500) for n in (1, 2, 3, 4)), n_layers=6, demand=demand)
    assert len(seen.spare) == n_spare
    answers = [ask(seen, n, URGENT) for n in (1, 2, 3, 4)]
    assert sum(answer.is_spare for answer in answers if isinstance(answer, Stay)) == n_spare


def test_the_fastest_and_those_that_never_move_are_not_the_spare_ones() -> None:
    slow, pinned = holder(1, 0, 12, us=5000), holder(2, 0, 12, us=9000, is_mobile=False)
    fast = holder(3, 0, 12)
    assert view(slow, pinned, fast, demand=0).spare == {slow.peer}
    assert view(slow, pinned, replace(fast, is_leaving=True), demand=0).spare == frozenset()


spans = st.tuples(st.integers(0, 19), st.integers(1, 9)).map(lambda at: Span(at[0], min(20, sum(at))))
states = st.sampled_from(("", "", "", "gone", "next", "load", "pin"))
holders = st.lists(st.tuples(spans, st.sampled_from((200, 1000, 1100, 5000)), states), min_size=2, max_size=24)


def touching(one: Sequence[Span], other: Sequence[Span]) -> bool:
    return any(a.start <= b.stop and b.start <= a.stop for a in one for b in other)


@given(holders, st.integers(0, 50), st.randoms(use_true_random=False), st.integers(1, 9), st.booleans())
@settings(max_examples=150, deadline=None)
def test_never_two_neighbours_and_never_out_of_a_layer_nobody_else_serves(
    drawn: list[tuple[Span, int, str]], a_round: int, rng: random.Random, most: int, beside: bool
) -> None:
    told = [
        replace(
            holder(number, span.start, span.stop, us),
            is_leaving=state == "gone",
            next_span=Span(0, 3) if state == "next" and span != Span(0, 3) else None,
            is_loaded=state != "load",
            is_mobile=state != "pin",
        )
        for number, (span, us, state) in enumerate(drawn, start=1)
    ]
    seen, now = view(*told, n_layers=20), CALM + a_round * ROUND_S
    moving = movers(seen, now, most=most, beside=beside)
    rng.shuffle(told)
    again = movers(view(*told, n_layers=20), now, most=most, beside=beside)
    assert {n: move.span for n, move in again.items()} == {n: move.span for n, move in moving.items()}
    zones = {n: (drawn[n - 1][0], move.span) for n, move in moving.items()}
    assert not any(touching(one, other) for one, other in itertools.combinations(zones.values(), 2))
    after = [replace(h, span=moving[n].span) if n in moving else h for n, h in ((_number(h), h) for h in told)]
    served = View(seen.cuts, tuple(h for h in after if h.stays)).counts
    before = View(seen.cuts, tuple(h for h in told if h.stays)).counts
    lost = sum(was and not now_served for now_served, was in zip(served, before, strict=True))
    won = sum(now_served and not was for now_served, was in zip(served, before, strict=True))
    assert not lost or (seen.unheld and won > lost)
    for number, move in moving.items():
        assert len(move.span) <= most
        assert move.is_beside == beside
        old = seen.by_peer[peer_id(number)].span
        assert beside or seen.unheld or all(seen.firm[i] > 1 for i in range(old.start, old.stop))


def _number(one: Holder) -> int:
    return next(number for number in range(1, 30) if peer_id(number) == one.peer)


# -- whole swarms


def grown(seed: int, n_peers: int, *, least: int = 4, most: int = 24, lag_rounds: int = 0) -> Swarm:
    """A swarm of unlike peers who came one after the other."""
    rng = random.Random(seed)
    swarm = Swarm(cuts_of(80), rng, lag_rounds=lag_rounds)
    for _ in range(n_peers):
        come(swarm, least, most)
    swarm.grow_old()
    return swarm


def come(swarm: Swarm, least: int = 4, most: int = 24) -> Member:
    rng = swarm.rng
    speed_us = int(rng.lognormvariate(6.2, 0.6))
    return swarm.join(most=rng.randrange(least, most), us_per_layer=speed_us, has_room_for_two=rng.random() < 0.5)


def test_500_peers_come_to_rest_near_the_best_there_is_after_half_a_model_lost_most_of_its_holders() -> None:
    """And newcomers and leavers go on meanwhile; what peers know of each other is up to a round old."""
    seed = 5
    swarm = grown(seed, 500, lag_rounds=1)
    swarm.leave([p for p, m in swarm.members.items() if m.holder.span.start >= 40 and swarm.rng.random() < 0.7])
    said = f"seed {seed}"
    assert swarm.weakest() < 0.4 * swarm.ideal(), said
    for _ in range(100):
        leaving = [peer for peer in swarm.members if swarm.rng.random() < 0.001]
        swarm.leave(leaving)
        for _ in leaving:
            come(swarm)
        swarm.round()
    for _ in range(30):
        swarm.round()
    assert swarm.weakest() > 0.8 * swarm.ideal(), said
    n_moves = [len(moves) for moves in swarm.moves]
    assert sum(n_moves[-10:]) == 0, f"{said}: it never rests, {n_moves}"
    assert max(member.n_moves for member in swarm.members.values()) <= 3, said
    assert sum(n_moves) < 100, said


@pytest.mark.parametrize("seed", range(8))
def test_when_3_of_10_peers_leave_at_once_every_layer_has_a_holder_again_within_a_minute(seed: int) -> None:
    """Of a model with few holders; loading other layers takes 20 s."""
    swarm = grown(seed, 24, least=8, most=16)
    swarm.now = 1000 * ROUND_S + seed
    swarm.round()
    swarm.leave([peer for peer in list(swarm.members) if swarm.rng.random() < 0.3])
    left_s = swarm.now
    while swarm.view().unheld:
        swarm.round()
        assert swarm.now - left_s <= 60, f"seed {seed}: {swarm.view().unheld}"
