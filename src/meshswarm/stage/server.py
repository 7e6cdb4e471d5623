"""Serves one span to other peers' sessions: the shell around `SpanSession`.

It owns the streams, the engine slots and the timers of each session. The rule it keeps: whatever ends a session (CLOSE,
CANCEL, a deadline, a lost stream, a protocol error) releases its slot exactly once, and a session that breaks never
touches another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshswarm.errors import MeshswarmError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.span import Span
from meshswarm.stage.engine import EngineInputError, Job, JobResult, SpanEngine
from meshswarm.stage.messages import (
    HOP_STREAM,
    MAX_FRAME_BYTES,
    MAX_TOP_K,
    SESSION_STREAM,
    Cancel,
    Close,
    Dtype,
    Failed,
    FullRow,
    FullRowRequest,
    Hop,
    Message,
    Open,
    Opened,
    ReceiptAck,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Returns,
    Row,
    Step,
)
from meshswarm.stage.profile import Profile
from meshswarm.stage.sent_rows import SentRows
from meshswarm.stage.session import Compute, Forward, Reply, SpanSession
from meshswarm.stage.wire import decode, encode
from meshswarm.tasks import Tasks

BUSY_RETRY_MS = 2000
MAX_SESSION_S = 3600.0  # no session lives longer, whatever its head asks for
ACKNOWLEDGE_S = 10.0  # a head that has closed and does not answer the receipt is not waited for longer


class Bookkeeper(Protocol):
    """What the ledger does for a provider at the end of a session."""

    def offer(self, session: SpanSession, numclass: str, lasted_s: float) -> bytes:
        """The provider's signed receipt."""

    def acknowledged(self, receipt: bytes, acknowledgement: bytes) -> None:
        """The consumer countersigned. Raises RemoteProtocolError when it signed something else."""


@dataclass(frozen=True, slots=True)
class Served:
    """The slice this peer has loaded."""

    model_id: bytes
    n_layers: int
    span: Span
    slice_root: bytes
    engine: SpanEngine
    n_ctx: int
    window: int


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
        self.sessions: dict[tuple[PeerId, bytes], _Session] = {}
        self.session_ended = asyncio.Event()
        self.on_load: Callable[[], None] = lambda: None  # called whenever a session starts or ends
        self.sessions_total = 0
        self.rows_total = 0
        endpoint.handle_stream(SESSION_STREAM, self._on_session_stream, max_frame_bytes=MAX_FRAME_BYTES)
        endpoint.handle_stream(HOP_STREAM, self._on_hop_stream, max_frame_bytes=MAX_FRAME_BYTES)

    def serve(self, served: Served) -> None:
        """Start accepting sessions for this slice."""
        self.served = served

    async def drain(self, timeout_s: float) -> None:
        """Refuse new sessions, give the running ones `timeout_s` to end, then end them with a reason."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.sessions:
                    self.session_ended.clear()
                    await self.session_ended.wait()
        for session in list(self.sessions.values()):
            session.fail("the peer is shutting down", None)

    def _on_session_stream(self, stream: Stream) -> None:
        _Opening(self, stream)

    def _on_hop_stream(self, stream: Stream) -> None:
        _HopIn(self, stream)

    def refusal(self, opening: Open, peer: PeerId) -> Refused | None:
        """Why this OPEN cannot be served here, or None."""
        served = self.served
        if opening.head != peer:
            raise RemoteProtocolError("an OPEN came from another peer than the head it names", peer=str(peer))
        if served is None or opening.model_id != served.model_id or opening.n_layers != served.n_layers:
            return Refused(RefusalReason.UNKNOWN_SPAN, "this model is not served here", 0)
        span = opening.span
        if span.start != served.span.start or span.stop > served.span.stop:
            return Refused(RefusalReason.UNKNOWN_SPAN, f"layers {served.span} are served here, not {span}", 0)
        is_last = span.stop == served.n_layers
        if is_last != (opening.returns is Returns.LOGITS) or is_last != (opening.next is None):
            return Refused(RefusalReason.UNSUPPORTED, "only the last span returns logits to the head", 0)
        if (span.start == 0) != (opening.previous is None):
            return Refused(RefusalReason.UNSUPPORTED, "only the first span takes its rows from the head", 0)
        if not 2 <= opening.n_ctx <= served.n_ctx:
            return Refused(RefusalReason.CONTEXT, f"sessions may use up to {served.n_ctx} positions here", 0)
        if opening.dtype is not Dtype.F32 or not 1 <= opening.top_k <= MAX_TOP_K:
            return Refused(RefusalReason.UNSUPPORTED, f"dtype {opening.dtype}, top_k {opening.top_k}", 0)
        if opening.profile is Profile.EXACT and served.engine.exact_obstacle is not None:
            return Refused(RefusalReason.UNSUPPORTED, served.engine.exact_obstacle, 0)
        if self.draining:
            return Refused(RefusalReason.DRAINING, "the peer is about to leave", 0)
        return None


class _Opening:
    """A session stream whose OPEN has not been answered yet."""

    def __init__(self, server: SpanServer, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        stream.receive_with(self._on_frame, lambda error: None)

    def _on_frame(self, frame: bytes) -> None:
        message = decode(frame)
        if not isinstance(message, Open):
            raise RemoteProtocolError(f"a session began with {type(message).__name__} instead of OPEN")
        peer = self._stream.peer_id
        if (message.head, message.session) in self._server.sessions:
            raise RemoteProtocolError("a session was opened twice", peer=str(peer))
        refused = self._server.refusal(message, peer)
        if refused is not None:
            self._refuse(refused)
            return
        served = self._server.served
        assert served is not None
        slot = served.engine.acquire_slot()
        if slot is None:
            self._refuse(Refused(RefusalReason.BUSY, "all its sessions are taken", BUSY_RETRY_MS))
            return
        session = _Session(self._server, served, message, self._stream, slot)
        self._server.sessions[message.head, message.session] = session
        self._server.sessions_total += 1
        self._server.on_load()
        if message.next is None:
            session.opened()
        else:
            self._server.tasks.create_task(session.dial_next())

    def _refuse(self, refused: Refused) -> None:
        self._stream.send(encode(refused))
        self._stream.finish()


class _HopIn:
    """The stream on which the previous span sends its steps."""

    def __init__(self, server: SpanServer, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._session: _Session | None = None
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


class _Session:
    """One running session: streams, slot, timer."""

    def __init__(self, server: SpanServer, served: Served, opening: Open, head: Stream, slot: int) -> None:
        self.core = SpanSession(opening, served.engine.n_embd, served.window)
        self.hop_in: Stream | None = None
        self._server = server
        self._served = served
        self._head = head
        self._slot: int | None = slot
        self._next: Connection | None = None
        self._hop_out: Stream | None = None
        self._release_hold: Callable[[], None] | None = None
        self._forget_next: Callable[[], None] | None = None
        self._is_open = False
        self._sent = server.sent.open()
        self._receipt: bytes | None = None
        loop = asyncio.get_running_loop()
        self._opened_s = loop.time()
        lives_s = min(opening.deadline_ms / 1000, MAX_SESSION_S)
        self._deadline = loop.call_later(lives_s, self.fail, "the session's deadline is over", None)
        head.receive_with(self._on_head_frame, self._on_head_end)

    # -- opening

    async def dial_next(self) -> None:
        """Connect to the next span before OPENED is sent, so that steps never wait for a handshake."""
        opening = self.core.opening
        assert opening.next is not None
        try:
            connection = await self._server.endpoint.dial(opening.next, opening.next_addresses)
            if self._slot is None:
                return
            hold = connection.hold()
            self._release_hold = hold.release
            self._forget_next = connection.on_lost(self._on_next_lost)
            self._next = connection
        except MeshswarmError as error:
            if self._slot is not None:
                self._head.send(encode(Refused(RefusalReason.NEXT_UNREACHABLE, str(error), 0)))
                self._end()
            return
        self.opened()

    def opened(self) -> None:
        served = self._served
        self._is_open = True
        self._tell_head(Opened(served.engine.numclass, served.window, served.slice_root))

    # -- what arrives

    def _on_head_frame(self, frame: bytes) -> None:
        try:
            message = decode(frame)
            match message:
                case Step() if self.core.opening.previous is None:
                    self.on_step(message)
                case FullRowRequest():
                    self._send_full_row(message.seq, message.row)
                case Cancel():
                    self._end()
                case Close():
                    self._close()
                case ReceiptAck() if self._receipt is not None:
                    self._server.bookkeeper.acknowledged(self._receipt, message.acknowledgement)
                    self._end()
                case _:
                    raise RemoteProtocolError(f"the head sent a {type(message).__name__} out of place")
        except MeshswarmError as error:
            self.fail(str(error), self.core.opening.head)

    def on_step(self, step: Step) -> None:
        """A step from the previous peer (or from the head, on the first span)."""
        if self._slot is None or self._receipt is not None:
            return
        try:
            if not self._is_open:
                raise RemoteProtocolError("rows came before the session was open")
            actions = self.core.on_step(step)
        except RemoteProtocolError as error:
            self.fail(str(error), self._previous())
            return
        for action in actions:
            assert isinstance(action, Compute)
            self._submit(action)

    def _previous(self) -> PeerId:
        opening = self.core.opening
        return opening.head if opening.previous is None else opening.previous

    def _submit(self, action: Compute) -> None:
        step, opening = action.step, self.core.opening
        assert self._slot is not None
        tokens = hidden = None
        if step.tokens is not None:
            tokens = np.frombuffer(step.tokens, dtype="<i4")
        elif step.hidden is not None:
            hidden = np.frombuffer(step.hidden, dtype="<f4").reshape(step.n_rows, self.core.n_embd)
        job = Job(
            slot=self._slot,
            pos0=step.pos0,
            truncate_to=step.truncate_to,
            tokens=tokens,
            hidden=hidden,
            stop_layer=opening.span.stop,
            outputs=action.output_rows,
            top_k=opening.top_k,
            temperature=opening.temperature,
            profile=opening.profile,
        )
        seq = step.seq
        self._served.engine.submit(job, lambda outcome: self._on_computed(seq, outcome))

    def _on_computed(self, seq: int, outcome: JobResult | Exception) -> None:
        if self._slot is None:
            return
        if isinstance(outcome, Exception):
            # Rows the engine's door refuses came from the previous peer; anything else is this peer's own failure.
            self.fail(str(outcome), self._previous() if isinstance(outcome, EngineInputError) else None)
            return
        hidden = None if outcome.hidden is None else outcome.hidden.tobytes()
        rows = tuple(
            Row(row.ids.tobytes(), row.logits.tobytes(), float(row.tail_log_mass)) for row in outcome.rows or ()
        )
        for action in self.core.on_computed(seq, hidden, rows):
            match action:
                case Forward(step):
                    self._forward(step)
                case Reply(message):
                    self._tell_head(message)

    def _forward(self, step: Step) -> None:
        """The first step opens the stream: by then every span has answered OPENED, so no frame overtakes its OPEN."""
        if self._hop_out is None:
            assert self._next is not None
            opening = self.core.opening
            self._hop_out = self._next.open_stream(HOP_STREAM, max_frame_bytes=MAX_FRAME_BYTES)
            self._hop_out.receive_with(self._on_hop_out_frame, self._on_next_lost)
            self._hop_out.send(encode(Hop(opening.head, opening.session)))
        self._hop_out.send(encode(step))
        self._server.sent.keep(self._sent, step)

    def _send_full_row(self, seq: int, row: int) -> None:
        self.core.check_full_row(seq, row)
        if self._slot is None:
            return
        self._tell_head(FullRow(seq, self._served.engine.full_row(self._slot, row).tobytes(), row))

    # -- the end

    def _close(self) -> None:
        if self._receipt is not None:
            raise RemoteProtocolError("the session was closed twice")
        lasted_s = asyncio.get_running_loop().time() - self._opened_s
        self._receipt = self._server.bookkeeper.offer(self.core, self._served.engine.numclass, lasted_s)
        self._release_slot()
        self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(ACKNOWLEDGE_S, self._end)
        self._server.sent.close(self._sent)
        self._tell_head(ReceiptOffer(self._receipt))

    def _on_hop_out_frame(self, frame: bytes) -> None:
        self.fail("the next span sent something on a one-way stream", self.core.opening.next)

    def _on_next_lost(self, error: MeshswarmError | None) -> None:
        """A stream that ends in good order is the next span's CLOSE running ahead of ours."""
        if error is not None and self._slot is not None and self._receipt is None:
            self.fail(f"the next span was lost: {error}", self.core.opening.next)

    def on_hop_in_end(self, error: MeshswarmError | None) -> None:
        """The previous span's stream ended. In good order that is its CLOSE running ahead of ours."""
        if error is not None and self._slot is not None and self._receipt is None:
            self.fail(f"the previous span was lost: {error}", self.core.opening.previous)

    def _on_head_end(self, error: MeshswarmError | None) -> None:
        self._end()

    def fail(self, message: str, blamed: PeerId | None) -> None:
        """Tell the head why this session ends here, and end it."""
        if self._ended:
            return
        self._tell_head(Failed(message, blamed))
        self._end()

    @property
    def _ended(self) -> bool:
        opening = self.core.opening
        return self._server.sessions.get((opening.head, opening.session)) is not self

    def _tell_head(self, message: Message) -> None:
        self._head.send(encode(message))

    def _release_slot(self) -> None:
        if self._slot is not None:
            self._served.engine.release_slot(self._slot)
            self._slot = None

    def _end(self) -> None:
        if self._ended:
            return
        opening = self.core.opening
        del self._server.sessions[opening.head, opening.session]
        self._server.session_ended.set()
        self._server.on_load()
        self._deadline.cancel()
        self._release_slot()
        if self._receipt is None:
            self._server.sent.wipe(self._sent)
        self._server.rows_total += self.core.work.rows
        if self._forget_next is not None:
            self._forget_next()
        for stream in (self._hop_out, self.hop_in):
            if stream is not None:
                stream.finish()
        if self._release_hold is not None:
            self._release_hold()
        self._head.finish()
