"""Serves a span to other peers' sessions: who gets a slot of the engine, who waits for one, who is refused.

A peer that goes over to other layers serves two spans for a while: the new one, and the old one for those who have not
heard of it yet.

The rule this file keeps: a session that waits is let in before a newcomer, and a parked session keeps nobody waiting:
it gives its room up at once. A session stays on the slice it began on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable

from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.stage.sessions.arrivals import HopIn, Opening
from meshswarm.stage.sessions.host import Bookkeeper
from meshswarm.stage.sessions.messages import HOP_STREAM, MAX_FRAME_BYTES, SESSION_STREAM, Open, RefusalReason, Refused
from meshswarm.stage.sessions.sent_rows import SentRows
from meshswarm.stage.sessions.served_session import ServedSession
from meshswarm.stage.sessions.session import SpanSession
from meshswarm.stage.sessions.terms import Served, terms_refusal
from meshswarm.stage.sessions.waiting_room import Ticket, WaitingRoom
from meshswarm.tasks import Tasks

MIN_RETRY_MS = 500
REST_RETRY_MS = 30_000
REST_PATIENCE_S = 40.0  # below the head's own patience, which would end the session without the reason
DRAIN_LOOK_S = 0.25  # how often a peer that leaves looks whether its sessions still compute
MAX_WAIT_S = 600.0  # nobody stands in line for longer, whatever its head asks for
_MOVING = Refused(RefusalReason.DRAINING, "the peer is about to serve other layers", 0)


class SpanServer:
    """Accepts sessions on the endpoint's "session" and "hop" streams and runs them on the engine of their slice.

    Until `serve` is called every OPEN is refused. `tasks` owns the few background tasks (dialling the next span).
    `sent` keeps what goes to the next span, for replay and audits.
    """

    def __init__(self, endpoint: Endpoint, tasks: Tasks, bookkeeper: Bookkeeper, sent: SentRows) -> None:
        self.endpoint = endpoint
        self.tasks = tasks
        self.bookkeeper = bookkeeper
        self.sent = sent
        self.served: Served | None = None  # what is served here, the newest
        self._older: Served | None = None  # what was before, for those who still ask for it
        self._closing: Served | None = None  # the one of them that takes no new sessions
        self.draining = False
        self.leaving = asyncio.Event()  # set when everything is drained, for good
        self.resting = ""  # why strangers are asked to come back later; empty: they are not
        self._rest: asyncio.TimerHandle | None = None
        self.sessions: dict[tuple[PeerId, bytes], ServedSession] = {}
        self.session_ended = asyncio.Event()
        self.on_load: Callable[[], None] = lambda: None  # called whenever room is taken or can be had again
        self.sessions_total = 0
        self.rows_total = 0
        self._room = WaitingRoom(1)
        self._waiting: dict[Ticket, Opening] = {}
        self._admission: asyncio.Handle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        endpoint.handle_stream(SESSION_STREAM, self._on_session_stream, max_frame_bytes=MAX_FRAME_BYTES)
        endpoint.handle_stream(HOP_STREAM, self._on_hop_stream, max_frame_bytes=MAX_FRAME_BYTES)

    def serve(self, served: Served, *, beside: bool = False) -> None:
        """Start accepting sessions for this slice; with `beside` also, until it is emptied, for what was served before,
        else no more for that. Sessions that run go on."""
        self._older = self.served if beside else None
        self._closing = None
        self.served = served
        if not self._waiting:
            self._room = WaitingRoom(max(1, served.engine.n_free_slots))  # all of them are free now
        self.on_room(None)

    async def empty(self, served: Served, timeout_s: float) -> bool:
        """Take no new sessions on this slice and give those that run `timeout_s` to end: whether all have."""
        self._closing = served
        for opening in [each for each in self._waiting.values() if self._slice_for(each.message) is served]:
            opening.refuse(_MOVING)
        for parked in self._parked(served):
            parked.offer_receipt()
        self.on_load()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(session.served is served for session in self.sessions.values()):
                    self.session_ended.clear()
                    await self.session_ended.wait()
        return not any(session.served is served for session in self.sessions.values())

    def reopen(self) -> None:
        """Take sessions again on the slice that was being emptied."""
        self._closing = None
        self.on_room(None)
        self.on_load()

    async def retire(self, served: Served, timeout_s: float) -> None:
        """Empty the older slice; sessions that have not ended in time are ended with the reason."""
        if not await self.empty(served, timeout_s):
            for session in [each for each in self.sessions.values() if each.served is served]:
                session.fail("this peer serves other layers now", None)
        if self._older is served:
            self._older = None
        if self._closing is served:
            self._closing = None

    async def drain(self, timeout_s: float, *, idle_s: float = math.inf) -> None:
        """Refuse new sessions, give the running ones `timeout_s` to end, or as long as one of them computes something
        every `idle_s`, then end them with a reason."""
        self.draining = True
        self.leaving.set()
        for opening in list(self._waiting.values()):
            opening.refuse(Refused(RefusalReason.DRAINING, "the peer is about to leave", 0))
        for parked in self._parked():
            parked.offer_receipt()
        now = asyncio.get_running_loop().time
        deadline, n_rows, moved_at = now() + timeout_s, -1, now()
        while self.sessions and now() < min(deadline, moved_at + idle_s):
            self.session_ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(DRAIN_LOOK_S, max(0.0, deadline - now()))):
                    await self.session_ended.wait()
            n_before, n_rows = n_rows, sum(each.core.work.rows for each in self.sessions.values())
            if n_rows != n_before:
                moved_at = now()
        for session in list(self.sessions.values()):
            session.fail("the peer is shutting down", None)

    def n_at_work_for(self, others_than: PeerId) -> int:
        """Sessions of other heads that are open and not parked."""
        return sum(each.parked_s is None and each.head != others_than for each in self.sessions.values())

    def rest(self, reason: str) -> None:
        """Take no sessions of strangers until `resume`. Those that run are told the reason if that takes too long; what
        they still ask for waits in the engine meanwhile."""
        if not self.resting:
            self._rest = asyncio.get_running_loop().call_later(REST_PATIENCE_S, self._end_strangers)
        self.resting = reason
        for opening in [each for each in self._waiting.values() if each.head != self.endpoint.peer_id]:
            opening.refuse(self._resting())
        for parked in [each for each in self._parked() if each.head != self.endpoint.peer_id]:
            parked.offer_receipt()

    def _resting(self) -> Refused:
        return Refused(RefusalReason.BUSY, f"it makes room for its owner: {self.resting}", REST_RETRY_MS)

    def resume(self) -> None:
        """Take strangers' sessions again."""
        self.resting = ""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _end_strangers(self) -> None:
        for session in list(self.sessions.values()):
            if session.head != self.endpoint.peer_id and session.parked_s is None:
                session.fail(f"this peer makes room for its owner: {self.resting}", None)

    def _on_session_stream(self, stream: Stream) -> None:
        Opening(self, stream)

    def _on_hop_stream(self, stream: Stream) -> None:
        HopIn(self._session, stream)

    def _session(self, head: PeerId, session: bytes) -> ServedSession | None:
        return self.sessions.get((head, session))

    # -- terms

    def refusal(self, opening: Open, peer: PeerId) -> Refused | None:
        """Why this OPEN cannot be served here, or None."""
        if opening.head != peer:
            raise RemoteProtocolError("an OPEN came from another peer than the head it names", peer=str(peer))
        served = self._slice_for(opening)
        refused = terms_refusal(served, opening)
        if refused is not None:
            return refused
        if served is self._closing:
            return _MOVING
        if opening.fork is not None and self._fork_source(opening) is None:
            return Refused(RefusalReason.UNSUPPORTED, "there is no such session to begin as a copy of", 0)
        if self.draining:
            return Refused(RefusalReason.DRAINING, "the peer is about to leave", 0)
        if self.resting and peer != self.endpoint.peer_id:
            return self._resting()
        return None

    def _slice_for(self, opening: Open) -> Served | None:
        """The slice that this session runs on: that of the session it copies, or else the newest that meets its
        terms."""
        source = None if opening.fork is None else self._fork_source(opening)
        if source is not None:
            return source.served
        if self._older is not None and terms_refusal(self.served, opening) and not terms_refusal(self._older, opening):
            return self._older
        return self.served

    def knows(self, head: PeerId, session: bytes) -> bool:
        """Whether this session runs or waits here: a second one of its name would push it out of the book, with its
        room."""
        waiting = (opening.message for opening in self._waiting.values())
        return (head, session) in self.sessions or any((each.head, each.session) == (head, session) for each in waiting)

    def _fork_source(self, opening: Open) -> ServedSession | None:
        """The parked session of the same head that `opening` wants to begin as a copy of, if that can be."""
        assert opening.fork is not None
        source = self.sessions.get((opening.head, opening.fork.session))
        if source is None or source.parked_s is None or source.slot is None:
            return None
        theirs = source.core.opening
        is_alike = (theirs.span, theirs.profile, theirs.dtype) == (opening.span, opening.profile, opening.dtype)
        fits = 0 < opening.fork.n_positions <= min(source.core.length, opening.n_ctx)
        return source if is_alike and fits else None

    # -- room

    @property
    def n_parked(self) -> int:
        return len(self._parked())

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_free_slots(self) -> int:
        """Sessions that could begin now on the newest slice, parked ones giving way."""
        if self.served is None or self._waiting or self.served is self._closing:
            return 0
        return self.served.engine.n_free_slots + len(self._parked(self.served))

    def _parked(self, served: Served | None = None) -> list[ServedSession]:
        """Those whose room can be had, on one slice or all, the longest parked first."""
        parked = [
            each
            for each in self.sessions.values()
            if each.parked_s is not None and each.slot is not None and served in (None, each.served)
        ]
        return sorted(parked, key=lambda each: each.parked_s or 0.0)

    def slot_at_once(self, opening: Open) -> int | None:
        """A slot for a session that has just come: whoever waits goes first."""
        return None if self._waiting else self._take_slot(opening)

    def _take_slot(self, opening: Open) -> int | None:
        """A slot for a new session, made by ending the longest-parked one if need be. A copy of a parked session takes
        nobody's room: it saves work, and the parked one would have to be computed again."""
        served = self._slice_for(opening)
        assert served is not None
        slot = served.engine.acquire_slot()
        if slot is None and opening.fork is None and (parked := self._parked(served)):
            parked[0].offer_receipt()
            slot = served.engine.acquire_slot()
        return slot

    def begin(self, opening: Open, head: Stream, slot: int) -> None:
        """Run a session in the slot that was taken for it."""
        served = self._slice_for(opening)
        assert served is not None
        if opening.head == self.endpoint.peer_id:
            served.engine.own(slot)
        session = ServedSession(self, served, opening, head, slot)
        self.sessions[opening.head, opening.session] = session
        self.sessions_total += 1
        self.on_load()
        session.begin(None if opening.fork is None else self._fork_source(opening))

    # -- what sessions tell

    def on_parked(self, turn_s: float) -> None:
        """A session was parked after being at work for `turn_s`: whoever waits gets its room."""
        self.on_room(turn_s)
        self.on_load()

    def on_resumed(self) -> None:
        """A parked session is at work again: its room cannot be had any more."""
        self.on_load()

    def on_room(self, turn_s: float | None) -> None:
        """Room can be had; `turn_s` is how long it was in use, None when it was not."""
        if turn_s is not None:
            self._room.lasted(turn_s)
        if self._waiting and self._admission is None:
            self._admission = asyncio.get_running_loop().call_soon(self._admit)

    def on_end(self, session: SpanSession) -> None:
        """A session is over: forget it."""
        opening = session.opening
        del self.sessions[opening.head, opening.session]
        self.session_ended.set()
        self.rows_total += session.work.rows
        self.on_load()

    # -- the line

    def wait(self, opening: Opening, max_wait_s: float) -> Ticket | None:
        """A place in line; None when the line is too long already."""
        now = asyncio.get_running_loop().time()
        ticket = self._room.enter(opening.head, now + min(max_wait_s, MAX_WAIT_S))
        if ticket is not None:
            self._waiting[ticket] = opening
            self._tell_places()
            self._arm_expiry()
            self.on_load()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        self._room.leave(ticket)
        if self._waiting.pop(ticket, None) is not None:
            self._tell_places()
            self._arm_expiry()
            self.on_load()

    def retry_ms(self) -> int:
        """When a session that is refused now should ask again."""
        return max(MIN_RETRY_MS, int(self._room.estimate_s(len(self._room) + 1) * 1000))

    def _running(self) -> list[PeerId]:
        return [each.head for each in self.sessions.values() if each.parked_s is None and each.slot is not None]

    def _admit(self) -> None:
        self._admission = None
        while (found := self._next_in_line()) is not None:
            ticket, slot = found
            opening = self._waiting[ticket]
            self.leave(ticket)
            opening.start(slot)

    def _next_in_line(self) -> tuple[Ticket, int] | None:
        """The first in line whose slice has room, with its slot."""
        for ticket in self._room.line(self._running()):
            slot = self._take_slot(self._waiting[ticket].message)
            if slot is not None:
                return ticket, slot
        return None

    def _tell_places(self) -> None:
        for ticket, place in self._room.places(self._running()).items():
            self._waiting[ticket].tell(place)

    def _arm_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        due = self._room.next_expiry
        self._expiry = None if due is None else asyncio.get_running_loop().call_at(due, self._expire)

    def _expire(self) -> None:
        for ticket in self._room.expired(asyncio.get_running_loop().time()):
            opening = self._waiting[ticket]
            self.leave(ticket)  # before it is told how many others wait
            opening.refuse(self.busy())
        self._arm_expiry()

    def busy(self) -> Refused:
        n_waiting = len(self._room)
        others = "1 other waits" if n_waiting == 1 else f"{n_waiting} others wait"
        in_line = f", and {others}" if n_waiting else ""
        return Refused(RefusalReason.BUSY, f"all its sessions are taken{in_line}", self.retry_ms())
