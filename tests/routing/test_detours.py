"""A peer that becomes as near, fast or free as was said is in the next plan, and not a little before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.routing.peers import HEAD, near, peer, record

from meshswarm.dht.records import WHOLE_ONLY, CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.candidates import MissingLayersError
from meshswarm.routing.detours import detours
from meshswarm.routing.planner import Planning, Situation

N_LAYERS = 6


@dataclass(frozen=True)
class Case:
    records: list[CoverageRecord]
    rtts: dict[PeerId, float]
    queues: dict[PeerId, float]

    def planning(self) -> Planning:
        situation = Situation(HEAD, lambda _head, other: self.rtts.get(other), queue_s=self.queues)
        return Planning.of(N_LAYERS, self.records, situation, 1)

    def uses(self, other: PeerId) -> bool:
        return any(hop.peer == other for hop in self.planning().routes[0].hops)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    numbers = sorted(draw(st.sets(st.integers(1, 7), min_size=2)))
    records = []
    for number in numbers:
        start = draw(st.integers(0, N_LAYERS - 1))
        stop = draw(st.integers(start + 1, N_LAYERS))
        told = draw(st.dictionaries(st.sampled_from(numbers), st.sampled_from([0, 2000, 9000]), max_size=3))
        told.pop(number, None)
        roles = draw(st.sampled_from([(), (), (), (WHOLE_ONLY,)]))
        numclass = draw(st.sampled_from(["cpu", "cpu", "gpu"]))
        us = draw(st.integers(100, 3000))
        records.append(record(number, f"{start}:{stop}", us, numclass=numclass, rtts=told, roles=roles))
    records.append(record(9, f"0:{N_LAYERS}", draw(st.integers(100, 9000))))
    peers = [each.peer for each in records]
    rtts = {other: draw(st.sampled_from([0.001, 0.005, 0.02])) for other in peers}
    queues = {other: draw(st.sampled_from([0.0, 0.0, 0.003])) for other in peers}
    return Case(records, rtts, queues)


def changed(case: Case, other: PeerId, **what: int) -> Case:
    return replace(
        case,
        records=[replace(each, **what) if each.peer == other else each for each in case.records],  # type: ignore[arg-type]
    )


@settings(max_examples=300, deadline=None)
@given(cases(), st.data())
def test_what_would_change_it_is_where_it_changes(case: Case, data: st.DataObject) -> None:
    try:
        planning = case.planning()
    except MissingLayersError:
        assume(False)
    position = data.draw(st.integers(0, len(planning.records) - 1))
    left_out = planning.records[position]
    found = detours(planning)
    if case.uses(left_out.peer) or position not in found:
        return
    detour = found[position]
    best = planning.best_rank / 1000 / 1e9
    assert detour.tpot_s >= best - 1e-9
    a_bit = 2e-8
    if detour.rtt_s is not None and detour.rtt_s > 2 * a_bit:
        nearer = replace(case, rtts={**case.rtts, left_out.peer: detour.rtt_s - a_bit})
        assert nearer.uses(left_out.peer)
        assert not replace(case, rtts={**case.rtts, left_out.peer: detour.rtt_s + a_bit}).uses(left_out.peer)
    elif detour.rtt_s is None:
        assert not replace(case, rtts={**case.rtts, left_out.peer: 0.0}).uses(left_out.peer)
    if detour.us_per_layer is not None and detour.us_per_layer > 2:
        assert changed(case, left_out.peer, us_per_layer=int(detour.us_per_layer - 0.01)).uses(left_out.peer)
        assert not changed(case, left_out.peer, us_per_layer=int(detour.us_per_layer + 1.01)).uses(left_out.peer)
    if detour.queue_s is not None and detour.queue_s > 2 * a_bit:
        freer = replace(case, queues={**case.queues, left_out.peer: detour.queue_s - a_bit})
        assert freer.uses(left_out.peer)


def test_a_peer_that_is_faster_but_far_is_told_how_near_it_would_have_to_be() -> None:
    case = Case([record(1, "0:6", us=2000), record(2, "0:6", us=1000)], {peer(1): 0.001, peer(2): 0.050}, {})
    planning = case.planning()
    assert [hop.peer for hop in planning.routes[0].hops] == [peer(1)]
    detour = detours(planning)[1]
    assert detour.rtt_s == pytest.approx(0.001 + 6 * 0.001)
    assert detour.us_per_layer is None, "not even if it computed in no time"


def test_every_peer_that_could_be_on_some_route_is_answered_for() -> None:
    offered: Sequence[CoverageRecord] = [
        record(1, "0:6", us=100), record(2, "0:3", us=500), record(3, "2:6", us=500), record(4, "1:4", us=500)
    ]  # fmt: skip
    planning = Planning.of(N_LAYERS, offered, Situation(HEAD, near), 1)
    assert set(detours(planning)) == {0, 1, 2, 3}
