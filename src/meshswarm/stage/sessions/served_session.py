"""One session that runs on this peer's engine: its streams, its slot, its timer.

The rule this file keeps: whatever ends a session (CLOSE, CANCEL, a deadline, silence, a lost stream, a protocol error,
the need for its room) gives its slot back exactly once, and a session that breaks never touches another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from meshswarm.errors import MeshswarmError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.stream import Stream
from meshswarm.stage.engine.engine import EngineInputError, Job, JobResult
from meshswarm.stage.sessions.host import Host
from meshswarm.stage.sessions.messages import (
    HOP_STREAM,
    MAX_FRAME_BYTES,
    Cancel,
    Close,
    Failed,
    Flag,
    FullRow,
    FullRowRequest,
    Hop,
    Message,
    Open,
    Opened,
    Park,
    ReceiptAck,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Resume,
    Row,
    Step,
)
from meshswarm.stage.sessions.rows_codec import decode_rows, encode_rows
from meshswarm.stage.sessions.session import Compute, Forward, Reply, SpanSession
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.sessions.wire import decode, encode

MAX_SESSION_S = 3600.0  # no turn lasts longer, whatever its head asks for
MAX_IDLE_S = 120.0  # an open session without a row: its head has room that it does not use
MAX_PARKED_S = 900.0  # nobody needed the room for so long; the head will not come back
ACKNOWLEDGE_S = 10.0  # a head that does not answer the receipt is not waited for longer


class ServedSession:
    """A session that has its slot; `begin` first. `head` is the stream to its head."""

    def __init__(self, host: Host, served: Served, opening: Open, head: Stream, slot: int) -> None:
        engine = served.engine
        self.core = SpanSession(opening, engine.row_width, served.window, engine.needs_tokens, engine.n_checkpoints)
        self.hop_in: Stream | None = None
        self.parked_s: float | None = None  # since when, on the loop's clock
        self._host = host
        self.served = served
        self._head = head
        self._slot: int | None = slot
        self._next: Connection | None = None
        self._hop_out: Stream | None = None
        self._release_hold: Callable[[], None] | None = None
        self._forget_next: Callable[[], None] | None = None
        self._is_open = False
        self._is_over = False
        self._sent = host.sent.open(self.core.length)
        self._receipt: bytes | None = None
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._turn_s = self._used_s = self._loop.time()
        self._deadline_s = self._opened_s + min(opening.deadline_ms / 1000, MAX_SESSION_S)
        self._timer = self._loop.call_at(self._due_s, self._on_time)

    @property
    def head(self) -> PeerId:
        return self.core.opening.head

    @property
    def slot(self) -> int | None:
        """Where its KV is; None once the session is over."""
        return self._slot

    # -- opening

    def begin(self, source: ServedSession | None = None) -> None:
        """Answer OPENED, as soon as the next span is reached where there is one. With `source`, a parked session of the
        same head, begin with its first positions."""
        self._head.receive_with(self._on_head_frame, self._on_head_end)
        if self._slot is None:
            return  # by what the head had sent already
        if source is None:
            self._reach_next()
            return
        fork = self.core.opening.fork
        assert fork is not None and source.slot is not None
        self.served.engine.copy_slot(source.slot, self._slot, fork.n_positions, self._on_copied)

    def _on_copied(self, error: Exception | None) -> None:
        if self._slot is None:
            return
        if error is None:
            self._reach_next()
        else:
            self._head.send(encode(Refused(RefusalReason.UNSUPPORTED, str(error), 0)))
            self._end()

    def _reach_next(self) -> None:
        if self.core.opening.next is None:
            self._opened()
        else:
            self._host.tasks.create_task(self._dial_next())

    async def _dial_next(self) -> None:
        """Connect to the next span before OPENED is sent, so that steps never wait for a handshake."""
        opening = self.core.opening
        assert opening.next is not None
        try:
            connection = await self._host.endpoint.dial(opening.next, opening.next_addresses)
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
        self._opened()

    def _opened(self) -> None:
        served, engine = self.served, self.served.engine
        self._is_open = True
        self._tell_head(
            Opened(
                engine.numclass,
                served.window,
                served.slice_root,
                engine.rollback,
                engine.needs_tokens,
                engine.n_checkpoints,
            )
        )

    # -- what arrives

    def _on_head_frame(self, frame: bytes) -> None:
        if self._slot is None and self._receipt is None:
            return  # sent before the head knew that the session had ended
        try:
            message = decode(frame)
            if self._receipt is not None:
                self._on_last_words(message)
                return
            match message:
                case Step() if self.core.opening.previous is None:
                    self.on_step(message)
                case FullRowRequest():
                    self._send_full_row(message.seq, message.row)
                case Park():
                    self._park()
                case Resume():
                    self._resume(message)
                case Cancel():
                    self._end()
                case Close():
                    self.offer_receipt()
                case _:
                    raise RemoteProtocolError(f"the head sent a {type(message).__name__} out of place")
        except MeshswarmError as error:
            self.fail(str(error), self.head)

    def _on_last_words(self, message: Message) -> None:
        """After the receipt was offered. When that was unasked, what the head had sent before it knew is still on its
        way: it was not heard, and the head will learn why."""
        match message:
            case ReceiptAck():
                assert self._receipt is not None
                self._host.bookkeeper.acknowledged(self._receipt, message.acknowledgement)
                self._end()
            case Cancel():
                self._end()
            case Close() if self.parked_s is None:
                raise RemoteProtocolError("the session was closed twice")
            case Step() | FullRowRequest() | Park() | Resume() | Close():
                pass
            case _:
                raise RemoteProtocolError(f"the head sent a {type(message).__name__} out of place")

    def on_step(self, step: Step) -> None:
        """A step from the previous peer (or from the head, on the first span)."""
        if self._slot is None or self._receipt is not None:
            return
        try:
            if not self._is_open:
                raise RemoteProtocolError("rows came before the session was open")
            self._submit(self.core.on_step(step))
        except RemoteProtocolError as error:
            self.fail(str(error), self._previous())

    def _previous(self) -> PeerId:
        opening = self.core.opening
        return opening.head if opening.previous is None else opening.previous

    def _submit(self, actions: list[Compute]) -> None:
        self._used_s = self._loop.time()
        for action in actions:
            self._compute(action.step, action.output_rows)

    def _compute(self, step: Step, outputs: tuple[int, ...]) -> None:
        core, opening = self.core, self.core.opening
        assert self._slot is not None
        tokens = hidden = None
        if step.tokens is not None:
            tokens = np.frombuffer(step.tokens, dtype="<i4")
        if step.hidden is not None:
            hidden = decode_rows(step.hidden, step.dtype, step.n_rows, core.row_width)
        job = Job(
            slot=self._slot,
            pos0=step.pos0,
            truncate_to=step.truncate_to,
            tokens=tokens,
            hidden=hidden,
            stop_layer=opening.span.stop,
            outputs=outputs,
            top_k=core.top_k,
            temperature=core.temperature,
            profile=opening.profile,
            is_window=bool(step.flags & Flag.DRAFT),
            checkpoints=step.checkpoints,
        )
        seq = step.seq
        self.served.engine.submit(job, lambda outcome: self._on_computed(seq, outcome))

    def _on_computed(self, seq: int, outcome: JobResult | Exception) -> None:
        if self._slot is None:
            return
        try:
            if isinstance(outcome, Exception):
                raise outcome
            rows = outcome.hidden
            hidden = None if rows is None else encode_rows(rows, self.core.opening.dtype)
        except Exception as error:
            # Rows the engine's door refuses came from the previous peer; anything else is this peer's own failure.
            self.fail(str(error), self._previous() if isinstance(error, EngineInputError) else None)
            return
        self._used_s = self._loop.time()
        logits = tuple(
            Row(row.ids.tobytes(), row.logits.tobytes(), float(row.tail_log_mass)) for row in outcome.rows or ()
        )
        for action in self.core.on_computed(seq, hidden, logits):
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
        self._host.sent.keep(self._sent, step)

    def _send_full_row(self, seq: int, row: int) -> None:
        self.core.check_full_row(seq, row)
        assert self._slot is not None
        self._tell_head(FullRow(seq, self.served.engine.full_row(self._slot, row).tobytes(), row))

    # -- between two turns

    def _park(self) -> None:
        self.core.on_park()
        self.parked_s = self._loop.time()
        self._arm()
        self._host.on_parked(self.parked_s - self._turn_s)

    def _resume(self, resume: Resume) -> None:
        actions = self.core.on_resume(resume)
        self.parked_s = None
        self._turn_s = self._loop.time()
        self._deadline_s = self._turn_s + min(resume.deadline_ms / 1000, MAX_SESSION_S)
        self._host.on_resumed()
        try:
            self._submit(actions)
        except RemoteProtocolError as error:
            self.fail(str(error), self._previous())
        if self._slot is not None:
            self._arm()

    # -- time

    @property
    def _due_s(self) -> float:
        """When the session is over unless something happens before."""
        if self.parked_s is not None:
            return self.parked_s + MAX_PARKED_S
        return min(self._deadline_s, self._used_s + MAX_IDLE_S)

    def _arm(self) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_at(self._due_s, self._on_time)

    def _on_time(self) -> None:
        """One timer that looks again when it fires: re-arming it for every row would cost more than it tells."""
        now = self._loop.time()
        if self.core.is_computing and now < self._deadline_s:
            self._used_s = now
        if now < self._due_s:
            self._arm()
        elif self.parked_s is not None:
            self.offer_receipt()
        elif now >= self._deadline_s:
            self.fail("the session's deadline is over", None)
        else:
            self.fail(f"no row came for {MAX_IDLE_S:.0f} s", None)

    # -- the end

    def offer_receipt(self) -> None:
        """End the session in good order: the head closed it, or its room is needed while it is parked."""
        lasted_s = self._loop.time() - self._opened_s
        self._receipt = self._host.bookkeeper.offer(self.core, self.served.engine.numclass, lasted_s)
        self._release_slot()
        self._timer.cancel()
        self._timer = self._loop.call_later(ACKNOWLEDGE_S, self._end)
        self._host.sent.close(self._sent)
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
        if self._is_over:
            return
        self._tell_head(Failed(message, blamed))
        self._end()

    def _tell_head(self, message: Message) -> None:
        self._head.send(encode(message))

    def _release_slot(self) -> None:
        if self._slot is not None:
            self.served.engine.release_slot(self._slot)
            self._slot = None
            self._host.on_room(None if self.parked_s is not None else self._loop.time() - self._turn_s)

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._timer.cancel()
        self._release_slot()
        if self._receipt is None:
            self._host.sent.wipe(self._sent)
        if self._forget_next is not None:
            self._forget_next()
        for stream in (self._hop_out, self.hop_in):
            if stream is not None:
                stream.finish()
        if self._release_hold is not None:
            self._release_hold()
        self._head.finish()
        self._host.on_end(self.core)
