"""Serves one span to other peers' sessions: who gets a slot of the engine, who waits for one, who is refused.

The rule this file keeps: a session that waits is let in before a newcomer, and a parked session keeps nobody waiting:
it gives its room up at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from meshswarm.errors import MeshswarmError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import (
    HOP_STREAM,
    MAX_FRAME_BYTES,
    MAX_TOP_K,
    SESSION_STREAM,
    Cancel,
    Hop,
    Message,
    Open,
    RefusalReason,
    Refused,
    Returns,
    Step,
    Waiting,
)
from meshswarm.stage.sessions.sent_rows import SentRows
from meshswarm.stage.sessions.served_session import Served, ServedSession
from meshswarm.stage.sessions.session import SpanSession
from meshswarm.stage.sessions.waiting_room import Place, Ticket, WaitingRoom
from meshswarm.stage.sessions.wire import decode, encode
from meshswarm.tasks import Tasks

__all__ = ["Bookkeeper", "Served", "SpanServer"]

MIN_RETRY_MS = 500
REST_RETRY_MS = 30_000
REST_PATIENCE_S = 40.0  # below the head's own patience, which would end the session without the reason
MAX_WAIT_S = 600.0  # nobody stands in line for longer, whatever its head asks for


class Bookkeeper(Protocol):
    """What the ledger does for a provider at the end of a session."""

    def offer(self, session: SpanSession, numclass: str, lasted_s: float) -> bytes:
        """The provider's signed receipt."""

    def acknowledged(self, receipt: bytes, acknowledgement: bytes) -> None:
        """The consumer countersigned. Raises RemoteProtocolError when it signed something else."""


class SpanServer:
    """Accepts sessions on the endpoint's "session" and "hop" streams and runs them on one engine.

    Until `serve` is called every OPEN is refused. `tasks` owns the few background tasks (dialling the next span).
    `sent` keeps what goes to the next span, for replay and audits.
    """

    def __init__(self, endpoint: Endpoint, tasks: Tasks, bookkeeper: Bookkeeper, sent: SentRows) -> None:
        self.endpoint = endpoint
        self.tasks = tasks
        self.bookkeeper = bookkeeper
        self.sent = sent
        self.served: Served | None = None
        self.draining = False
        self.resting = ""  # why strangers are asked to come back later; empty: they are not
        self._rest: asyncio.TimerHandle | None = None
        self.sessions: dict[tuple[PeerId, bytes], ServedSession] = {}
        self.session_ended = asyncio.Event()
        self.on_load: Callable[[], None] = lambda: None  # called whenever room is taken or can be had again
        self.sessions_total = 0
        self.rows_total = 0
        self._room = WaitingRoom(1)
        self._waiting: dict[Ticket, _Opening] = {}
        self._admission: asyncio.Handle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        endpoint.handle_stream(SESSION_STREAM, self._on_session_stream, max_frame_bytes=MAX_FRAME_BYTES)
        endpoint.handle_stream(HOP_STREAM, self._on_hop_stream, max_frame_bytes=MAX_FRAME_BYTES)

    def serve(self, served: Served) -> None:
        """Start accepting sessions for this slice."""
        self.served = served
        self._room = WaitingRoom(max(1, served.engine.n_free_slots))  # all of them are free now

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sessions, give the running ones `timeout_s` to end, then end them with a reason."""
        self.draining = True
        for opening in list(self._waiting.values()):
            opening.refuse(Refused(RefusalReason.DRAINING, "the peer is about to leave", 0))
        for parked in self._parked():
            parked.offer_receipt()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.sessions:
                    self.session_ended.clear()
                    await self.session_ended.wait()
        for session in list(self.sessions.values()):
            session.fail("the peer is shutting down", None)

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
        _Opening(self, stream)

    def _on_hop_stream(self, stream: Stream) -> None:
        _HopIn(self, stream)

    # -- terms

    def refusal(self, opening: Open, peer: PeerId) -> Refused | None:
        """Why this OPEN cannot be served here, or None."""
        served = self.served
        if opening.head != peer:
            raise RemoteProtocolError("an OPEN came from another peer than the head it names", peer=str(peer))
        if served is None or opening.model_id != served.model_id or opening.n_layers != served.n_layers:
            return Refused(RefusalReason.UNKNOWN_SPAN, "this model is not served here", 0)
        span = opening.span
        if served.is_whole_only and span != served.span:
            why = f"a part of a model is not computed here, on {served.engine.numclass}"
            return Refused(RefusalReason.UNKNOWN_SPAN, why, 0)
        if span.start != served.span.start or span.stop > served.span.stop:
            return Refused(RefusalReason.UNKNOWN_SPAN, f"layers {served.span} are served here, not {span}", 0)
        is_last = span.stop == served.n_layers
        if is_last != (opening.returns is Returns.LOGITS) or is_last != (opening.next is None):
            return Refused(RefusalReason.UNSUPPORTED, "only the last span returns logits to the head", 0)
        if (span.start == 0) != (opening.previous is None):
            return Refused(RefusalReason.UNSUPPORTED, "only the first span takes its rows from the head", 0)
        if not 2 <= opening.n_ctx <= served.n_ctx:
            return Refused(RefusalReason.CONTEXT, f"sessions may use up to {served.n_ctx} positions here", 0)
        if not 1 <= opening.top_k <= MAX_TOP_K:
            return Refused(RefusalReason.UNSUPPORTED, f"top_k {opening.top_k}", 0)
        if opening.profile is Profile.EXACT and served.engine.exact_obstacle is not None:
            return Refused(RefusalReason.UNSUPPORTED, served.engine.exact_obstacle, 0)
        if opening.fork is not None and self.fork_source(opening) is None:
            return Refused(RefusalReason.UNSUPPORTED, "there is no such session to begin as a copy of", 0)
        if self.draining:
            return Refused(RefusalReason.DRAINING, "the peer is about to leave", 0)
        if self.resting and peer != self.endpoint.peer_id:
            return self._resting()
        return None

    def knows(self, head: PeerId, session: bytes) -> bool:
        """Whether this session runs or waits here: a second one of its name would push it out of the book, with its
        room."""
        waiting = (opening.message for opening in self._waiting.values())
        return (head, session) in self.sessions or any((each.head, each.session) == (head, session) for each in waiting)

    def fork_source(self, opening: Open) -> ServedSession | None:
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
        """Sessions that could begin now, parked ones giving way."""
        if self.served is None or self._waiting:
            return 0
        return self.served.engine.n_free_slots + self.n_parked

    def _parked(self) -> list[ServedSession]:
        """Those whose room can be had, the longest parked first."""
        parked = [each for each in self.sessions.values() if each.parked_s is not None and each.slot is not None]
        return sorted(parked, key=lambda each: each.parked_s or 0.0)

    def take_slot(self, opening: Open) -> int | None:
        """A slot for a new session, made by ending the longest-parked one if need be. A copy of a parked session takes
        nobody's room: it saves work, and the parked one would have to be computed again."""
        assert self.served is not None
        slot = self.served.engine.acquire_slot()
        if slot is None and opening.fork is None and (parked := self._parked()):
            parked[0].offer_receipt()
            slot = self.served.engine.acquire_slot()
        return slot

    def on_parked(self, turn_s: float) -> None:
        """A session was parked after being at work for `turn_s`: whoever waits gets its room."""
        self.on_room(turn_s)
        self.on_load()

    def on_room(self, turn_s: float | None) -> None:
        """Room can be had; `turn_s` is how long it was in use, None when it was not."""
        if turn_s is not None:
            self._room.lasted(turn_s)
        if self._waiting and self._admission is None:
            self._admission = asyncio.get_running_loop().call_soon(self._admit)

    # -- the line

    def wait(self, opening: _Opening, max_wait_s: float) -> Ticket | None:
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
        while line := self._room.line(self._running()):
            opening = self._waiting[line[0]]
            slot = self.take_slot(opening.message)
            if slot is None:
                return
            self.leave(line[0])
            opening.start(slot)

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


class _Opening:
    """A session stream whose OPEN has not been answered yet."""

    message: Open

    def __init__(self, server: SpanServer, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._ticket: Ticket | None = None
        self._told: int | None = None
        self._is_refused = False
        stream.receive_with(self._on_frame, self._on_end)

    @property
    def head(self) -> PeerId:
        return self.message.head

    def _on_frame(self, frame: bytes) -> None:
        if self._is_refused:
            return  # nothing can be said on this stream any more
        message = decode(frame)
        if self._ticket is not None:
            self._on_frame_in_line(message)
            return
        if not isinstance(message, Open):
            raise RemoteProtocolError(f"a session began with {type(message).__name__} instead of OPEN")
        server, peer = self._server, self._stream.peer_id
        if server.knows(message.head, message.session):
            raise RemoteProtocolError("a session was opened twice", peer=str(peer))
        refused = server.refusal(message, peer)
        if refused is not None:
            self.refuse(refused)
            return
        self.message = message
        slot = None if server.n_waiting else server.take_slot(message)
        if slot is not None:
            self.start(slot)
            return
        if message.max_wait_ms and message.fork is None:
            self._ticket = server.wait(self, message.max_wait_ms / 1000)
        if self._ticket is None:
            self.refuse(server.busy())

    def _on_frame_in_line(self, message: Message) -> None:
        self._leave()
        if not isinstance(message, Cancel):
            raise RemoteProtocolError(f"a head that waits for room sent a {type(message).__name__}")
        self._stream.finish()

    def _on_end(self, error: MeshswarmError | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._ticket is not None:
            self._server.leave(self._ticket)
            self._ticket = None

    def tell(self, place: Place) -> None:
        """The session's place in line; said when it changes."""
        if place.number != self._told:
            self._told = place.number
            self._stream.send(encode(Waiting(place.number, int(place.estimate_s * 1000))))

    def start(self, slot: int) -> None:
        """There is room: the session begins."""
        server, message, served = self._server, self.message, self._server.served
        assert served is not None
        self._ticket = None
        if self.head == server.endpoint.peer_id:
            served.engine.own(slot)
        session = ServedSession(server, served, message, self._stream, slot)
        server.sessions[message.head, message.session] = session
        server.sessions_total += 1
        server.on_load()
        source = None if message.fork is None else server.fork_source(message)
        if source is None:
            session.begin()
        else:
            session.begin_as_copy(source)

    def refuse(self, refused: Refused) -> None:
        self._leave()
        self._is_refused = True
        self._stream.send(encode(refused))
        self._stream.finish()


class _HopIn:
    """The stream on which the previous span sends its steps."""

    def __init__(self, server: SpanServer, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._session: ServedSession | None = None
        stream.receive_with(self._on_frame, self._on_end)

    def _on_frame(self, frame: bytes) -> None:
        if self._session is None:
            self._join(decode(frame))
            return
        try:
            message = decode(frame)
            if not isinstance(message, Step):
                raise RemoteProtocolError(f"a hop stream carried {type(message).__name__} instead of STEP")
        except RemoteProtocolError as error:
            self._session.fail(str(error), self._stream.peer_id)
            raise
        self._session.on_step(message)

    def _join(self, message: Message) -> None:
        if not isinstance(message, Hop):
            raise RemoteProtocolError(f"a hop stream began with {type(message).__name__} instead of HOP")
        session = self._server.sessions.get((message.head, message.session))
        if session is None or session.core.opening.previous != self._stream.peer_id or session.hop_in is not None:
            # The same answer for all three: a stranger learns nothing about other peers' sessions.
            raise RemoteProtocolError("a hop stream named a session that it has no part in")
        session.hop_in = self._stream
        self._session = session

    def _on_end(self, error: MeshswarmError | None) -> None:
        if self._session is not None:
            self._session.on_hop_in_end(error)
