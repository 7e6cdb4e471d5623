"""The head's session core against real span cores, without sockets: flights, credit, deadlines, failures.

Messages travel on a virtual clock: one unit per flight between two different peers, nothing within one peer, nothing
for computing. So the time between two tokens is the number of one-way flights a token costs.
"""

import dataclasses
import heapq
import itertools

import numpy as np
import pytest

from meshswarm.errors import PeerUnreachableError, RefusedError, RemoteError, RemoteProtocolError
from meshswarm.head.history import History
from meshswarm.head.session import CLOSE_TIMEOUT_S, OPEN_TIMEOUT_S, STALL_TIMEOUT_S, HeadSession, State
from meshswarm.head.session_actions import (
    Action,
    Broken,
    Done,
    Hop,
    InLine,
    Origin,
    Ready,
    Receipt,
    Rows,
    Terms,
    ToSpan,
)
from meshswarm.identity import Identity, PeerId
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import (
    Cancel,
    Close,
    Counters,
    Credit,
    Failed,
    Fork,
    Message,
    Open,
    Opened,
    Park,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Resume,
    Row,
    Step,
    Waiting,
)
from meshswarm.stage.sessions.session import Forward, Reply, SpanSession

N_EMBD = 4
OPENED = Opened("cpu", 512, bytes(32))
ROW = Row(np.array([7], "<i4").tobytes(), np.array([1.0], "<f4").tobytes(), -1.0)


def peer(number: int) -> PeerId:
    return Identity.from_seed(bytes([number]) * 32).peer_id


def terms(profile: Profile = Profile.FAST, n_ctx: int = 4096) -> Terms:
    return Terms(bytes(32), 30, N_EMBD, n_ctx, profile, 0.0, 1, 60_000)


def route(n_spans: int, *, head_serves_first: bool = True) -> tuple[PeerId, tuple[Hop, ...]]:
    head = peer(100)
    width = 30 // n_spans
    hops = [Hop(peer(i), (), Span(i * width, 30 if i == n_spans - 1 else (i + 1) * width)) for i in range(n_spans)]
    if head_serves_first:
        hops[0] = Hop(head, (), hops[0].span)
    return head, tuple(hops)


class Swarm:
    """Carries messages between one HeadSession and its spans; `now` counts flights."""

    def __init__(
        self, n_spans: int, *, head_serves_first: bool = True, window: int = 512, needs_tokens: bool = False
    ) -> None:
        self.head_peer, self.hops = route(n_spans, head_serves_first=head_serves_first)
        self.core = HeadSession(bytes(16), self.head_peer, (), self.hops, terms())
        self.window = window
        self.needs_tokens = needs_tokens
        self.way: dict[int, float] = {}  # flights from the head to a span, where it is not one
        self.spans: dict[int, SpanSession] = {}
        self.now = 0.0
        self.rows_at: list[float] = []
        self.events: list[Action] = []
        self._order = itertools.count()
        self._mail: list[tuple[float, int, str, int, Message]] = []

    def post(self, sender: PeerId, receiver: PeerId, to: str, hop: int, message: Message) -> None:
        flight = 0.0 if sender == receiver else 1.0
        if to == "span" and sender == self.head_peer:
            flight = self.way.get(hop, flight)
        heapq.heappush(self._mail, (self.now + flight, next(self._order), to, hop, message))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToSpan(hop, message):
                    self.post(self.head_peer, self.hops[hop].peer, "span", hop, message)
                case Rows():
                    self.rows_at.append(self.now)
                    self.events.append(action)
                case _:
                    self.events.append(action)

    def run(self) -> None:
        while self._mail:
            self.now, _, to, hop, message = heapq.heappop(self._mail)
            if to == "head":
                self.act(self.core.on_message(hop, message, self.now))
            else:
                self.at_span(hop, message)

    def at_span(self, hop: int, message: Message) -> None:
        me = self.hops[hop].peer
        match message:
            case Open():
                self.spans[hop] = SpanSession(message, N_EMBD, self.window, self.needs_tokens)
                opened = Opened("cpu", self.window, bytes(32), Rollback.KV, self.needs_tokens)
                self.post(me, self.head_peer, "head", hop, opened)
            case Park():
                self.spans[hop].on_park()
            case Step() | Resume():
                span = self.spans[hop]
                for compute in span.on_step(message) if isinstance(message, Step) else span.on_resume(message):
                    hidden = bytes(compute.step.n_rows * N_EMBD * 4)
                    rows = (ROW,) * len(compute.output_rows)
                    for action in span.on_computed(compute.step.seq, hidden, rows):
                        if isinstance(action, Forward):
                            self.post(me, self.hops[hop + 1].peer, "span", hop + 1, action.step)
                        else:
                            assert isinstance(action, Reply)
                            self.post(me, self.head_peer, "head", hop, action.message)
            case Close():
                assert self.core.counters(hop) == self.spans[hop].counters, "head and span count alike"
                self.post(me, self.head_peer, "head", hop, ReceiptOffer(b"receipt"))
            case _:
                self.events.append(Done())

    def open(self) -> None:
        self.act(self.core.start(self.now))
        self.run()
        assert isinstance(self.events[-1], Ready)

    def decode(self, n_tokens: int) -> list[float]:
        """Time between consecutive tokens, in flights."""
        for _ in range(n_tokens):
            self.act(self.core.push([1], self.now))
            self.run()
        return [later - earlier for earlier, later in itertools.pairwise(self.rows_at)]


@pytest.mark.parametrize("n_spans", [1, 2, 3, 5])
def test_a_token_costs_exactly_one_flight_per_span_when_the_head_serves_the_first(n_spans: int) -> None:
    swarm = Swarm(n_spans)
    swarm.open()
    gaps = swarm.decode(300)  # long enough for credit to be renewed on the way
    expected = 0.0 if n_spans == 1 else float(n_spans)
    assert set(gaps) == {expected}


def test_a_head_without_layers_pays_one_flight_more() -> None:
    swarm = Swarm(3, head_serves_first=False)
    swarm.open()
    assert set(swarm.decode(20)) == {4.0}


def test_opening_costs_one_round_trip_however_many_spans() -> None:
    swarm = Swarm(5, head_serves_first=False)
    swarm.open()
    assert swarm.now == 2.0


def test_a_long_prompt_goes_in_chunks_within_every_window_and_emits_once() -> None:
    swarm = Swarm(3, window=256)
    swarm.open()
    swarm.act(swarm.core.push(list(range(1000)), swarm.now))
    assert swarm.core.length == 1000
    swarm.run()
    assert len(swarm.rows_at) == 1
    assert [span.length for span in swarm.spans.values()] == [1000] * 3


@pytest.mark.parametrize("window", range(171, 176))
def test_a_window_that_is_accepted_never_stops_a_chunk_for_good(window: int) -> None:
    """Rows of which the credit is still owed, up to a quarter of the window, must leave room for a whole chunk."""
    swarm = Swarm(2, window=window)
    swarm.open()
    for n_rows in (window // 4 - 1, 128, 128):  # the first stay below the quarter: no credit comes for them alone
        swarm.act(swarm.core.push([1] * n_rows, swarm.now))
        swarm.run()
    assert len(swarm.rows_at) == 3


def test_a_window_with_too_little_room_for_a_chunk_breaks_the_opening() -> None:
    head, hops = route(2)
    core = HeadSession(bytes(16), head, (), hops, terms())
    core.start(0.0)
    error = broken_by(core.on_message(0, Opened("cpu", 170, bytes(32)), 0.0))
    assert isinstance(error, RemoteProtocolError)
    assert "a window of only 170 rows" in str(error)


def test_closing_brings_a_receipt_from_every_span_and_then_ends() -> None:
    swarm = Swarm(3)
    swarm.open()
    swarm.act(swarm.core.push([1, 2, 3], swarm.now))
    swarm.run()
    swarm.decode(5)
    swarm.act(swarm.core.close(swarm.now))
    swarm.run()
    assert sorted(event.hop for event in swarm.events if isinstance(event, Receipt)) == [0, 1, 2]
    assert isinstance(swarm.events[-1], Done)
    assert swarm.core.state is State.ENDED


def test_truncation_travels_with_the_rows() -> None:
    swarm = Swarm(2)
    swarm.open()
    swarm.act(swarm.core.push([1, 2, 3, 4, 5], swarm.now))
    swarm.run()
    swarm.act(swarm.core.push([9], swarm.now, truncate_to=3))
    swarm.run()
    assert [span.length for span in swarm.spans.values()] == [4, 4]
    assert swarm.core.length == 4


def test_a_draft_passes_like_one_token_and_taking_it_back_costs_no_flight() -> None:
    swarm = Swarm(3)
    swarm.open()
    swarm.decode(1)
    swarm.act(swarm.core.push([1, *range(7)], swarm.now, n_draft=7))
    swarm.run()
    assert [len(event.rows) for event in swarm.events if isinstance(event, Rows)] == [1, 8]
    swarm.act(swarm.core.push([2, *range(4)], swarm.now, truncate_to=4, n_draft=4))  # two of seven were right
    swarm.run()
    swarm.decode(1)  # all four were
    assert [later - earlier for earlier, later in itertools.pairwise(swarm.rows_at)] == [3.0, 3.0, 3.0]
    assert [span.length for span in swarm.spans.values()] == [10] * 3
    assert swarm.core.flights == 4
    counters = swarm.core.counters(0)
    assert (counters.prefill_rows, counters.decode_rows) == (0, 15)
    assert (counters.drafted_rows, counters.accepted_rows) == (11, 2 + 4)
    assert [span.counters.accepted_rows for span in swarm.spans.values()] == [6] * 3


@pytest.mark.parametrize(("n_tokens", "n_draft"), [(3, 3), (17, 16), (200, 1), (2, -1)])
def test_a_draft_that_does_not_fit_one_step_is_a_mistake_of_the_caller(n_tokens: int, n_draft: int) -> None:
    with pytest.raises(ValueError, match="does not fit one step"):
        opened_core().push([1] * n_tokens, 0.0, n_draft=n_draft)


def test_the_exact_profile_never_sends_more_than_48_rows_at_once() -> None:
    head, hops = route(1)
    core = HeadSession(bytes(16), head, (), hops, terms(Profile.EXACT))
    core.start(0.0)
    core.on_message(0, Opened("cpu", 512, bytes(32)), 0.0)
    steps = [a.message for a in core.push(list(range(100)), 0.0) if isinstance(a, ToSpan)]
    assert [step.n_rows for step in steps if isinstance(step, Step)] == [48, 48, 4]


def opened_core(n_spans: int = 2) -> HeadSession:
    head, hops = route(n_spans)
    core = HeadSession(bytes(16), head, (), hops, terms())
    core.start(0.0)
    for hop in range(n_spans):
        core.on_message(hop, Opened("cpu", 512, bytes(32)), 0.0)
    return core


def broken_by(actions: list[Action]) -> Exception:
    assert isinstance(actions[-1], Done)
    cancelled = [a.hop for a in actions if isinstance(a, ToSpan) and isinstance(a.message, Cancel)]
    assert cancelled, "a broken session is cancelled on every span"
    (broken,) = (action for action in actions if isinstance(action, Broken))
    return broken.error


def test_a_silent_span_breaks_the_opening_at_its_deadline_and_is_named() -> None:
    head, hops = route(2)
    core = HeadSession(bytes(16), head, (), hops, terms())
    core.start(100.0)
    core.on_message(0, Opened("cpu", 512, bytes(32)), 100.1)
    assert core.tick(100.0 + OPEN_TIMEOUT_S - 0.01) == []
    error = broken_by(core.tick(100.0 + OPEN_TIMEOUT_S))
    assert isinstance(error, PeerUnreachableError)
    assert error.peer == str(hops[1].peer)
    assert "15:30" in str(error)


def test_a_refusal_breaks_with_the_reason_and_when_to_retry() -> None:
    head, hops = route(2)
    core = HeadSession(bytes(16), head, (), hops, terms())
    core.start(0.0)
    error = broken_by(core.on_message(1, Refused(RefusalReason.BUSY, "all taken", 1500), 0.1))
    assert isinstance(error, RefusedError)
    assert error.retry_after_s == 1.5
    assert error.peer == str(hops[1].peer)


def test_a_lost_span_breaks_a_running_session_at_once() -> None:
    core = opened_core()
    core.push([1], 1.0)
    error = broken_by(core.on_lost(1, PeerUnreachableError("silent for 4 s"), 1.0))
    assert isinstance(error, PeerUnreachableError)
    assert error.peer == str(core.hops[1].peer)
    assert core.on_lost(1, None, 1.0) == [], "an ended session says nothing more"


def test_a_route_that_stalls_breaks_at_the_stall_deadline_and_credit_counts_as_progress() -> None:
    core = opened_core()
    core.push(list(range(200)), 1.0)
    core.on_message(0, Credit(128), 50.0)
    assert core.tick(1.0 + STALL_TIMEOUT_S) == []
    assert isinstance(broken_by(core.tick(50.0 + STALL_TIMEOUT_S)), RemoteError)


def test_receipts_that_never_come_do_not_hold_the_end() -> None:
    core = opened_core()
    assert all(isinstance(a, ToSpan) and isinstance(a.message, Close) for a in core.close(5.0))
    assert core.on_message(0, ReceiptOffer(b"r"), 5.1) == [Receipt(0, b"r")]
    assert core.tick(5.0 + CLOSE_TIMEOUT_S) == [Done()]


@pytest.mark.parametrize(
    ("hop", "message", "complaint"),
    [
        (0, Result(0, (ROW,), None), "not the last span"),
        (1, Result(7, (ROW,), None), "not due"),
        (1, Result(0, (ROW, ROW), None), "not due"),
        (1, Result(0, (ROW,), bytes(32)), "other logits than it hashed"),
        (0, Credit(10**6), "never sent"),
        (0, Opened("cpu", 512, bytes(32)), "twice"),
        (0, ReceiptOffer(b""), "not due"),
        (1, Close(), "heads never get"),
    ],
)
def test_messages_out_of_place_break_the_session_and_name_the_peer(hop: int, message: Message, complaint: str) -> None:
    core = opened_core()
    core.push([1], 0.0)
    error = broken_by(core.on_message(hop, message, 0.1))
    assert isinstance(error, RemoteProtocolError)
    assert complaint in str(error)
    assert error.peer == str(core.hops[hop].peer)


def test_a_failure_blames_the_peer_the_span_blames() -> None:
    core = opened_core()
    error = broken_by(core.on_message(1, Failed("rows with NaN", core.hops[0].peer), 0.1))
    assert isinstance(error, RemoteError)
    assert error.peer == str(core.hops[0].peer)


@pytest.mark.parametrize("blamed", [peer(77), peer(100), None], ids=["a stranger", "the head itself", "nobody"])
def test_a_span_cannot_blame_whom_it_has_nothing_to_do_with(blamed: PeerId | None) -> None:
    core = opened_core(3)
    error = broken_by(core.on_message(2, Failed("it was them", blamed), 0.1))
    assert isinstance(error, RemoteError)
    assert error.peer == str(core.hops[2].peer)


def test_routes_that_do_not_cover_the_model_are_refused_at_once() -> None:
    head, hops = route(3)
    with pytest.raises(ValueError, match="does not join at layer 10"):
        HeadSession(bytes(16), head, (), (hops[0], hops[2]), terms())
    with pytest.raises(ValueError, match="ends at layer 20"):
        HeadSession(bytes(16), head, (), hops[:2], terms())


# -- between two turns


def test_a_parked_session_goes_on_with_what_is_new_and_no_flight_more() -> None:
    swarm = Swarm(3)
    swarm.open()
    swarm.act(swarm.core.push([1, 2, 3], swarm.now))
    swarm.run()
    swarm.decode(2)
    swarm.act(swarm.core.park())
    swarm.run()
    assert [span.is_parked for span in swarm.spans.values()] == [True] * 3
    assert swarm.core.deadline is None, "nothing is due"
    began = swarm.now
    swarm.act(swarm.core.resume(0.7, 40, 60_000))
    swarm.act(swarm.core.push([7, 8], swarm.now, truncate_to=4))
    swarm.run()
    assert swarm.now - began == 3.0, "the word that it goes on costs no flight of its own"
    assert [span.length for span in swarm.spans.values()] == [6] * 3
    assert [(span.temperature, span.top_k) for span in swarm.spans.values()] == [(0.7, 40)] * 3
    assert swarm.core.history.tokens == [1, 2, 3, 1, 7, 8]
    swarm.act(swarm.core.close(swarm.now))
    swarm.run()
    assert swarm.core.state is State.ENDED


def test_rows_that_overtake_the_word_that_the_session_goes_on_wait_for_it() -> None:
    swarm = Swarm(3)
    swarm.open()
    swarm.decode(1)
    swarm.way = {2: 9.0}  # the last span hears from the head late
    swarm.act(swarm.core.park())
    swarm.act(swarm.core.resume(0.0, 1, 60_000))
    began = swarm.now
    swarm.act(swarm.core.push([7], swarm.now))
    swarm.run()
    assert len(swarm.rows_at) == 2
    assert swarm.now - began == 10.0


def parked_core(n_spans: int = 3) -> HeadSession:
    core = opened_core(n_spans)
    core.push([1, 2, 3], 0.0)
    core.on_message(n_spans - 1, Result(0, (ROW,), None), 0.1)
    core.park()
    return core


def closed(actions: list[Action]) -> list[int]:
    return [a.hop for a in actions if isinstance(a, ToSpan) and isinstance(a.message, Close)]


def test_a_span_that_needs_the_room_ends_a_parked_session_quietly_on_all() -> None:
    core = parked_core()
    actions = core.on_message(1, ReceiptOffer(b"r"), 5.0)
    assert actions[0] == Receipt(1, b"r")
    assert closed(actions) == [0, 2]
    assert not any(isinstance(action, Broken) for action in actions)
    assert core.state is State.CLOSING
    assert core.on_message(0, ReceiptOffer(b"r"), 5.1) == [Receipt(0, b"r")]
    assert core.on_message(2, ReceiptOffer(b"r"), 5.1) == [Receipt(2, b"r"), Done()]


@pytest.mark.parametrize("how", ["lost", "failed"])
def test_a_span_lost_from_a_parked_session_is_nobodys_error_and_the_others_still_sign(how: str) -> None:
    core = parked_core()
    gone = PeerUnreachableError("silent for 4 s")
    actions = core.on_lost(2, gone, 5.0) if how == "lost" else core.on_message(2, Failed("no room", None), 5.0)
    assert closed(actions) == [0, 1]
    assert not any(isinstance(action, Broken) for action in actions)
    core.on_message(0, ReceiptOffer(b"r"), 5.1)
    assert core.on_message(1, ReceiptOffer(b"r"), 5.1) == [Receipt(1, b"r"), Done()]


def test_a_turn_that_crosses_the_end_of_its_session_breaks_and_work_is_counted_as_each_span_knows_it() -> None:
    core = parked_core()
    core.resume(0.0, 1, 60_000)
    core.push([4, 5], 1.0)
    actions = core.on_message(1, ReceiptOffer(b"r"), 1.1)
    assert actions[0] == Receipt(1, b"r")
    (broken,) = (action for action in actions if isinstance(action, Broken))
    assert isinstance(broken.error, RemoteError)
    assert broken.error.peer == str(core.hops[1].peer)
    assert closed(actions) == [0, 2]
    assert [core.counters(hop).prefill_rows for hop in range(3)] == [5, 3, 3], "only the first had the new rows"


def test_once_the_new_turn_has_shown_a_result_an_unasked_receipt_breaks_the_rules() -> None:
    core = parked_core()
    core.resume(0.0, 1, 60_000)
    core.push([4, 5], 1.0)
    core.on_message(2, Result(1, (ROW,), None), 1.1)
    assert isinstance(broken_by(core.on_message(1, ReceiptOffer(b"r"), 1.2)), RemoteProtocolError)


def test_sessions_are_parked_and_resumed_at_the_right_time_only() -> None:
    core = opened_core()
    with pytest.raises(ValueError, match="only a parked"):
        core.resume(0.0, 1, 1)
    core.push([1], 0.0)
    with pytest.raises(ValueError, match="waits for nothing"):
        core.park()


# -- in line


def waiting_core(n_spans: int = 3) -> HeadSession:
    head, hops = route(n_spans, head_serves_first=False)
    return HeadSession(bytes(16), head, (), hops, dataclasses.replace(terms(), max_wait_ms=30_000))


def asked(actions: list[Action]) -> list[tuple[int, int]]:
    return [(a.hop, a.message.max_wait_ms) for a in actions if isinstance(a, ToSpan) and isinstance(a.message, Open)]


def test_spans_where_a_session_may_wait_are_asked_one_by_one_in_an_order_all_heads_share() -> None:
    core = waiting_core()
    order = sorted(range(3), key=lambda hop: core.hops[hop].peer.key)
    assert asked(core.start(100.0)) == [(order[0], 30_000)]
    assert core.on_message(order[0], Waiting(4, 2500), 100.1) == [InLine(order[0], 4, 2.5)]
    assert asked(core.on_message(order[0], OPENED, 110.0)) == [(order[1], 20_000)]
    assert asked(core.on_message(order[1], OPENED, 131.0)) == [(order[2], 0)], "all spans together wait no longer"
    assert isinstance(core.on_message(order[2], OPENED, 131.1)[0], Ready)


def test_two_heads_that_wait_at_the_same_spans_cannot_hold_what_the_other_waits_for() -> None:
    """Whatever their routes, both ask for the span with the lower key first."""
    there, back = route(2, head_serves_first=False)[1], route(2, head_serves_first=False)[1]
    swapped = tuple(dataclasses.replace(hop, peer=other.peer) for hop, other in zip(back, reversed(back), strict=True))
    firsts = []
    for hops in (there, swapped):
        core = HeadSession(bytes(16), peer(99), (), hops, dataclasses.replace(terms(), max_wait_ms=1000))
        ((hop, _),) = asked(core.start(0.0))
        firsts.append(hops[hop].peer)
    assert firsts[0] == firsts[1]


def test_a_session_that_waits_in_vain_is_cancelled_where_it_asked() -> None:
    core = waiting_core()
    ((first, _),) = asked(core.start(0.0))
    core.on_message(first, Waiting(1, 1000), 0.1)
    assert core.tick(30.0) == []
    actions = core.tick(30.0 + OPEN_TIMEOUT_S)
    assert [a.hop for a in actions if isinstance(a, ToSpan)] == [first]
    assert isinstance(broken_by(actions), PeerUnreachableError)


def test_a_span_that_lets_a_session_wait_unasked_breaks_it() -> None:
    head, hops = route(2)
    core = HeadSession(bytes(16), head, (), hops, terms())
    core.start(0.0)
    error = broken_by(core.on_message(1, Waiting(1, 1000), 0.1))
    assert isinstance(error, RemoteProtocolError)
    assert "not asked to" in str(error)


# -- copies


def test_a_copy_begins_with_what_it_took_over() -> None:
    held = History()
    held.add(list(range(10)))
    head, hops = route(2)
    core = HeadSession(b"2" * 16, head, (), hops, terms(), origin=Origin(b"1" * 16, held))
    opens = [a.message for a in core.start(0.0) if isinstance(a, ToSpan)]
    assert [each.fork for each in opens if isinstance(each, Open)] == [Fork(b"1" * 16, 10)] * 2
    for hop in range(2):
        core.on_message(hop, OPENED, 0.1)
    (first,) = core.push([77], 0.2)
    assert isinstance(first, ToSpan)
    assert isinstance(first.message, Step)
    assert first.message.pos0 == 10
    assert core.counters(0) == Counters(decode_rows=1, bytes_in=4, bytes_out=4 * N_EMBD), "copied rows are no work"


def test_where_every_span_needs_the_tokens_they_travel_beside_the_rows_and_are_counted() -> None:
    swarm = Swarm(3, needs_tokens=True)
    swarm.open()
    swarm.act(swarm.core.push([1, 2, 3], swarm.now))
    swarm.run()
    swarm.act(swarm.core.close(swarm.now))
    swarm.run()  # asserts that both ends count alike
    assert swarm.spans[1].counters.bytes_in == 3 * (4 + 4 * N_EMBD)
    assert swarm.core.state is State.ENDED
