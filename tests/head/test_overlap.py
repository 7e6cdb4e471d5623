"""A prompt over a route on a virtual clock: real session cores, spans that take their time, links that carry so much.

A span computes one step at a time, a link carries one at a time, and all of them work at once.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from meshswarm.head.link_speed import MEMORY, LinkSpeed
from meshswarm.head.session import HeadSession
from meshswarm.head.session_actions import Action, Hop, Rows, Terms, ToSpan
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.prompt_time import Pace, max_chunk_rows
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import Message, Open, Opened, Row, Step
from meshswarm.stage.sessions.session import Forward, Reply, SpanSession

WIDTH = 2048  # rows of 8 KB
ROW = Row(np.array([7], "<i4").tobytes(), np.array([1.0], "<f4").tobytes(), -1.0)
PACE = Pace(row_s=0.003, step_s=0.010)
THIN = 10e6 / 8  # bytes per second of 10 Mbit/s
FLIGHT_S = 0.0001


def peer(number: int) -> PeerId:
    return Identity.from_seed(bytes([number]) * 32).peer_id


@dataclass
class Timeline:
    """One session, over as many even spans as `paces`, joined by links of `bytes_per_s` (None: in no time)."""

    paces: list[Pace]
    link: LinkSpeed
    bytes_per_s: float | None = None
    profile: Profile = Profile.FAST
    slowdown: float = 1.0  # spans take so much longer than they say
    now: float = 0.0
    done_at: float | None = None
    sizes: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        n_spans = len(self.paces)
        hops = tuple(Hop(peer(at), (), Span(at, at + 1)) for at in range(n_spans))
        terms = Terms(bytes(32), n_spans, WIDTH, 8192, self.profile, 0.0, 1, 60_000)
        self.head = HeadSession(bytes(16), peer(100), (), hops, terms, route=self.paces, link=self.link)
        self.spans: dict[int, SpanSession] = {}
        self._busy = [0.0] * n_spans
        self._link_busy = [0.0] * n_spans
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._act(self.head.start(0.0))
        self._run()

    def prompt_s(self, n_rows: int) -> float:
        """How long a prompt of so many rows takes from its push to its row."""
        began = self.now
        self.sizes.clear()
        self.done_at = None
        self._act(self.head.push([1] * n_rows, self.now))
        self._run()
        assert self.done_at is not None
        return self.done_at - began

    def _run(self) -> None:
        while self._due:
            self.now, _, happen = heapq.heappop(self._due)
            happen()

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), happen))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToSpan(hop, Open() as opening):
                    self.spans[hop] = SpanSession(opening, WIDTH, 512)
                    self._tell_head(hop, Opened("cpu", 512, bytes(32)))
                case ToSpan(hop, Step() as step):
                    self.sizes[step.n_rows] += 1
                    self._at(self.now + FLIGHT_S, partial(self._step, hop, step))
                case Rows():
                    self.done_at = self.now

    def _tell_head(self, hop: int, message: Message) -> None:
        self._at(self.now + FLIGHT_S, lambda: self._act(self.head.on_message(hop, message, self.now)))

    def _step(self, hop: int, step: Step) -> None:
        for compute in self.spans[hop].on_step(step):
            pace = self.paces[hop]
            seconds = self.slowdown * (pace.step_s + compute.step.n_rows * pace.row_s)
            self._busy[hop] = max(self.now, self._busy[hop]) + seconds
            self._at(self._busy[hop], partial(self._computed, hop, compute.step, compute.output_rows))

    def _computed(self, hop: int, step: Step, outputs: tuple[int, ...]) -> None:
        hidden = bytes(step.n_rows * WIDTH * 4)
        for action in self.spans[hop].on_computed(step.seq, hidden, (ROW,) * len(outputs)):
            match action:
                case Forward(forwarded):
                    seconds = 0.0 if self.bytes_per_s is None else len(hidden) / self.bytes_per_s
                    self._link_busy[hop] = max(self.now, self._link_busy[hop]) + seconds
                    arrives = self._link_busy[hop] + FLIGHT_S
                    self._at(arrives, partial(self._step, hop + 1, forwarded))
                case Reply(message):
                    self._tell_head(hop, message)


def compute_s(n_rows: int, paces: list[Pace]) -> float:
    """All spans one after the other, each with the whole prompt in the fewest steps."""
    n_steps = -(-n_rows // max_chunk_rows(Profile.FAST))
    return sum(n_steps * pace.step_s + n_rows * pace.row_s for pace in paces)


@pytest.mark.parametrize(("n_spans", "gain"), [(2, 1.7), (3, 2.2)])
def test_spans_overlap_on_a_long_prompt(n_spans: int, gain: float) -> None:
    paces = [PACE] * n_spans
    timeline = Timeline(paces, LinkSpeed())
    for _ in range(2):
        assert compute_s(1024, paces) / timeline.prompt_s(1024) >= gain


@pytest.mark.parametrize("n_rows", [128, 256, 1000])
def test_on_a_thin_link_later_prompts_travel_in_steps_that_overlap(n_rows: int) -> None:
    """The first one taught how thin it is, whatever its length."""
    link = LinkSpeed()
    first = Timeline([PACE, PACE], link, THIN)
    before_s, before = first.prompt_s(n_rows), first.sizes
    row_s = WIDTH * 4 / THIN
    assert link.byte_s * WIDTH * 4 == pytest.approx(row_s, rel=0.1)
    later = Timeline([PACE, PACE], link, THIN)
    later_s = later.prompt_s(n_rows)
    assert later.sizes.total() >= before.total()
    assert later_s <= before_s * 1.001
    least_s = n_rows * row_s + 32 * 2 * PACE.row_s + 2 * PACE.step_s  # the link never rests, from the first step on
    assert later_s <= least_s * 1.05


def test_in_exact_too() -> None:
    link = LinkSpeed()
    times = [Timeline([PACE, PACE], link, THIN, Profile.EXACT).prompt_s(400) for _ in range(2)]
    assert times[1] <= times[0]


def test_links_that_take_no_time_change_nothing() -> None:
    link = LinkSpeed()
    first, second = Timeline([PACE, PACE], link), Timeline([PACE, PACE], link)
    assert first.prompt_s(1000) == second.prompt_s(1000)
    assert first.sizes == second.sizes


def test_a_span_that_was_busy_once_is_not_taken_for_a_thin_link() -> None:
    link = LinkSpeed()
    plain = Timeline([PACE, PACE], LinkSpeed())
    plain.prompt_s(1000)
    Timeline([PACE, PACE], link, slowdown=3.0).prompt_s(1000)
    Timeline([PACE, PACE], link).prompt_s(1000)
    assert link.byte_s == 0.0
    after = Timeline([PACE, PACE], link)
    after.prompt_s(1000)
    assert after.sizes == plain.sizes


def test_a_link_that_became_thinner_is_believed_after_a_few_prompts() -> None:
    link = LinkSpeed()
    Timeline([PACE, PACE], link).prompt_s(500)
    thin = Timeline([PACE, PACE], link, THIN)
    for _ in range(MEMORY):
        assert link.byte_s == 0.0
        thin.prompt_s(500)
    assert link.byte_s == pytest.approx(1 / THIN, rel=0.1)


def test_nothing_is_learned_where_spans_do_not_say_how_fast_they_are() -> None:
    link = LinkSpeed()
    link.note(10.0, 100, 32, [Pace(0.0, 0.0), PACE], 8192)
    link.note(10.0, 100, 32, [PACE], 8192)
    link.note(10.0, 100, 32, [], 8192)
    assert link.byte_s == 0.0
