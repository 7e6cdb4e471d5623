"""Groups of decode steps: single decisions, and whole routes on a virtual clock, with turns as long as measured."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from meshswarm.stage.engine.batching import Backlog, Shape, Waiting
from meshswarm.stage.engine.grouping import Grouping
from meshswarm.stage.engine.profile import Profile

TURN_S = {1: 0.150, 2: 0.145, 3: 0.150, 4: 0.159, 5: 0.238, 6: 0.259, 7: 0.269, 8: 0.268, 16: 0.482}
"""By rows: of a random model of 1 billion weights in Q4_0, on one thread (llama-cpp-python 0.3.36)."""
STEP = Shape(1, Profile.FAST, True, 10)
MEASURED_AT_LOAD = {1: TURN_S[1], 4: TURN_S[4], 16: TURN_S[16]}


def grouping(*, is_first: bool = True, scale: float = 1.0) -> Grouping:
    return Grouping(is_first=is_first, turn_s={size: scale * turn_s for size, turn_s in MEASURED_AT_LOAD.items()})


def turn(groups: Grouping, *slots: int, at: float) -> float:
    """Compute these slots; returns the time at the end."""
    turn_s = TURN_S[len(slots)]
    groups.took(len(slots), turn_s)
    groups.computed(slots, at + turn_s)
    return at + turn_s


def test_a_lone_session_never_waits() -> None:
    groups = grouping()
    now = 0.0
    for _ in range(5):
        groups.arrived(0, now)
        assert groups.plan(now).groups
        now = turn(groups, 0, at=now) + 0.1


def test_a_group_waits_for_the_one_that_is_about_to_come() -> None:
    groups = grouping()
    now = 0.0
    for _ in range(3):
        for slot in (0, 1):
            groups.arrived(slot, now)
        assert [sorted(group) for group in groups.plan(now).groups] == [[0, 1]]
        now = turn(groups, 0, 1, at=now) + 0.001
    groups.arrived(0, now)
    plan = groups.plan(now)
    assert not plan.groups and now < plan.wait_until <= now + 0.001
    groups.arrived(1, now + 0.0002)
    assert groups.plan(now + 0.0002).groups


def test_a_group_that_does_not_fit_into_one_turn_goes_in_several_at_once() -> None:
    """Steps of different row counts cannot share a turn: the rest does not wait until the others are back."""
    groups = grouping()
    now = 0.0
    for _ in range(5):
        for slot in range(4):
            groups.arrived(slot, now)
        assert [sorted(group) for group in groups.plan(now).groups] == [[0, 1, 2, 3]]
        now = turn(groups, 0, 1, at=now)
        assert groups.plan(now).groups
        now = turn(groups, 2, 3, at=now) + 0.001


def test_who_does_not_come_is_not_waited_for_long() -> None:
    groups = grouping()
    for slot in (0, 1):
        groups.arrived(slot, 0.0)
    now = turn(groups, 0, 1, at=0.0) + 0.05
    for slot in (0, 1):
        groups.arrived(slot, now)
    now = turn(groups, 0, 1, at=now) + 0.05
    groups.arrived(0, now)
    assert not groups.plan(now).groups
    assert groups.plan(now + 0.03).groups
    groups.forget(1)
    assert groups.plan(now).groups


def test_a_span_behind_the_first_waits_only_for_what_is_coming_in() -> None:
    groups = grouping(is_first=False)
    now = 0.0
    for _ in range(2):
        for slot in (0, 1):
            groups.arrived(slot, now + slot * 0.0004)
        now = turn(groups, 0, 1, at=now) + 0.2
    groups.arrived(0, now)
    plan = groups.plan(now)
    assert not plan.groups and plan.wait_until <= now + 0.0101
    assert groups.plan(plan.wait_until).groups
    groups.arrived(1, now + 0.0004)
    assert groups.plan(now + 0.0004).groups


def test_one_interrupted_turn_does_not_part_sessions_for_ever() -> None:
    groups = grouping()
    now = 0.0
    for number in range(6):
        for slot in range(3):
            groups.arrived(slot, now)
        assert [sorted(group) for group in groups.plan(now).groups] == [[0, 1, 2]]
        groups.took(3, 30.0 if number == 2 else TURN_S[3])
        now += TURN_S[3]
        groups.computed([0, 1, 2], now)
        now += 0.001


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    groups = grouping()
    groups.took(3, 1.0)
    assert groups._estimate(3) > 1.5 * TURN_S[3]
    for _ in range(600):
        groups.took(1, TURN_S[1])
    assert groups._estimate(3) == pytest.approx(TURN_S[3], rel=0.2)


def test_what_a_turn_takes_is_learned_anew_when_the_machine_gets_slower() -> None:
    groups = grouping()
    for _ in range(40):
        groups.took(1, 10 * TURN_S[1])
    assert groups._estimate(1) == pytest.approx(10 * TURN_S[1], rel=0.1)
    assert groups._estimate(4) == pytest.approx(10 * TURN_S[4], rel=0.1)


@dataclass
class Stage:
    """A span on the virtual clock. `sequence_of`: the streams' places in it."""

    scale: float
    is_first: bool
    sequence_of: Sequence[int]
    is_grouped: bool
    can_fill: bool
    is_busy: bool = False
    backlog: Backlog[int] = field(init=False)
    groups: Grouping = field(init=False)

    def __post_init__(self) -> None:
        self.backlog = Backlog(512, can_fill=lambda _: self.can_fill)
        self.groups = grouping(is_first=self.is_first, scale=self.scale)


@dataclass(order=True)
class Event:
    at: float
    number: int
    happens: Callable[[float], None] = field(compare=False)


class Route:
    """Streams that decode for ever over spans that compute as fast as `scales` times `TURN_S`."""

    def __init__(
        self,
        scales: Sequence[float],
        n_streams: int,
        seed: int,
        *,
        hop_s: float = 0.001,
        head_s: Callable[[int], float] = lambda _stream: 0.001,
        sequences: Sequence[Sequence[int]] | None = None,
        is_grouped: bool = True,
        can_fill: bool = True,
    ) -> None:
        self._random = random.Random(seed)
        self._hop_s, self._head_s = hop_s, head_s
        self._events: list[Event] = []
        self._numbers = itertools.count()
        self._stages = [
            Stage(scale, index == 0, (sequences or [range(n_streams)] * 9)[index], is_grouped, can_fill)
            for index, scale in enumerate(scales)
        ]
        self.tokens = [0] * n_streams
        for stream in range(n_streams):
            self._at(self._random.random() * 0.05, self._arrival(0, stream))

    def run(self, until: float) -> None:
        while self._events and self._events[0].at <= until:
            event = heapq.heappop(self._events)
            event.happens(event.at)

    def _at(self, at: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, Event(at, next(self._numbers), happens))

    def _arrival(self, index: int, stream: int) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            stage = self._stages[index]
            sequence = stage.sequence_of[stream]
            stage.backlog.add(Waiting(sequence, STEP, 1, stream))
            stage.groups.arrived(sequence, now)
            self._compute(index, now)

        return arrive

    def _compute(self, index: int, now: float) -> None:
        stage = self._stages[index]
        if stage.is_busy or not stage.backlog:
            return
        plan = stage.groups.plan(now) if stage.is_grouped else None
        if plan is not None and not plan.groups:
            self._at(max(plan.wait_until, now + 1e-6), lambda then: self._compute(index, then))
            return
        turn = stage.backlog.next_turn(plan.groups if plan is not None else None)
        n_rows = len(turn.slots) + len(turn.fills)
        took_s = stage.scale * (TURN_S.get(n_rows) or 0.06 + 0.026 * n_rows) * self._random.uniform(1, 1.03)
        stage.is_busy = True

        def end(then: float) -> None:
            stage.is_busy = False
            stage.groups.took(n_rows, then - now)
            stage.groups.computed(turn.slots, then)
            for place, stream in enumerate(turn.items):
                self._leave(index, stream, then + 0.0004 * place)
            self._compute(index, then)

        self._at(now + took_s, end)

    def _leave(self, index: int, stream: int, at: float) -> None:
        at += self._hop_s
        if index + 1 < len(self._stages):
            self._at(at, self._arrival(index + 1, stream))
            return
        self.tokens[stream] += 1
        self._at(at + self._hop_s + self._head_s(stream) * self._random.random(), self._arrival(0, stream))


def tokens_per_s(scales: Sequence[float], n_streams: int, seed: int, **settings: object) -> float:
    """Once it has settled."""
    route = Route(scales, n_streams, seed, **settings)  # type: ignore[arg-type]
    route.run(20.0)
    before = sum(route.tokens)
    route.run(50.0)
    return (sum(route.tokens) - before) / 30.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("scales", "n_streams", "best"),
    [
        ((0.5, 0.5), 8, 8 / (2 * 0.5 * TURN_S[4])),
        ((0.25, 0.75), 8, 8 / (2 * 0.75 * TURN_S[4])),
        ((0.75, 0.25), 8, 8 / (2 * 0.75 * TURN_S[4])),
        ((1 / 3,) * 3, 8, 8 / TURN_S[4]),
        ((1.0,), 8, 8 / TURN_S[8]),
        ((0.5, 0.5), 6, 6 / (2 * 0.5 * TURN_S[3])),
        ((0.5, 0.5), 1, 1 / TURN_S[1]),
    ],
    ids=str,
)
def test_streams_settle_near_the_best_that_equal_groups_can_reach(
    scales: Sequence[float], n_streams: int, best: float, seed: int
) -> None:
    assert tokens_per_s(scales, n_streams, seed) >= 0.9 * best


def test_taking_everyone_who_is_there_would_settle_far_below() -> None:
    """What the groups are for; if this fails, they are not needed any more."""
    for seed in range(3):
        greedy, grouped = (tokens_per_s((0.5, 0.5), 8, seed, is_grouped=each) for each in (False, True))
        assert grouped > 1.3 * greedy


def test_a_slow_stream_does_not_hold_up_the_others() -> None:
    """One head takes up to half a second for a token, three answer at once."""

    def route(is_grouped: bool) -> list[int]:
        slow = Route((0.5, 0.5), 4, 1, head_s=lambda stream: 1.0 if stream == 3 else 0.001, is_grouped=is_grouped)
        slow.run(20.0)
        before = list(slow.tokens)
        slow.run(80.0)
        return [now - then for now, then in zip(slow.tokens, before, strict=True)]

    grouped, greedy = route(True), route(False)
    assert sum(grouped[:3]) >= 0.9 * sum(greedy[:3])
    assert grouped[3] >= 0.7 * greedy[3]


def test_streams_in_another_order_on_the_second_span_cost_gaps_not_runs() -> None:
    orders = [range(8), [3, 7, 0, 5, 1, 6, 2, 4]]
    filled, apart = (tokens_per_s((0.5, 0.5), 8, 0, sequences=orders, can_fill=each) for each in (True, False))
    assert filled > 1.1 * apart
