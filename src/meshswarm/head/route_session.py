"""Runs a `HeadSession` over real streams: dials every span, carries messages, keeps the timer.

Results are handed to the listener synchronously, straight from the datagram that brought them, so that the next token
leaves without waiting for a task to wake up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from meshswarm.errors import MeshswarmError, RemoteProtocolError
from meshswarm.head.history import History
from meshswarm.head.session import HeadSession, State
from meshswarm.head.session_actions import (
    Action,
    Broken,
    Done,
    FullLogits,
    InLine,
    Ready,
    Receipt,
    Rows,
    ToSpan,
)
from meshswarm.head.step_times import ENOUGH
from meshswarm.identity import Identity
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import MAX_FRAME_BYTES, SESSION_STREAM, Opened, ReceiptAck, Row
from meshswarm.stage.sessions.wire import decode, encode


class Listener(Protocol):
    """Who is told what comes back over the route."""

    def on_rows(self, seq: int, rows: tuple[Row, ...]) -> None: ...
    def on_full_row(self, seq: int, row: int, logits: bytes) -> None: ...
    def on_broken(self, error: MeshswarmError) -> None: ...


OnInLine = Callable[[InLine], None]
OnSteps = Callable[["RouteSession"], None]
"""Hears now and then that a session has seen more steps (`HeadSession.step_times`), and when it ends or is parked."""


class RouteSession:
    """One open route. `open` first; then `push` rows; `park`, `close` or `cancel` at the end, whatever happened."""

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        core: HeadSession,
        bookkeeper: Bookkeeper,
        on_steps: OnSteps = lambda session: None,
    ) -> None:
        self.core = core
        self.opened: tuple[Opened, ...] = ()
        """What the spans said when they opened."""
        self._endpoint = endpoint
        self._identity = identity
        self._bookkeeper = bookkeeper
        self._on_steps = on_steps
        self._loop = asyncio.get_running_loop()
        # The loop's clock may count whole milliseconds, too coarse for steps: this one agrees with it, and is finer.
        self._ahead = self._loop.time() - time.perf_counter()
        self._listener: Listener | None = None
        self._on_in_line: OnInLine = lambda where: None
        self._broken: MeshswarmError | None = None
        self._streams: list[Stream] = []
        self._release: list[Callable[[], None]] = []
        self._ready: asyncio.Future[tuple[Opened, ...]] = self._loop.create_future()
        self._done = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def open(self, on_in_line: OnInLine = lambda where: None) -> None:
        """Dial every span and open the session on all of them; `on_in_line` hears of waiting for room. Raises what
        `HeadSession` breaks with, or the dial's PeerUnreachableError; nothing is left open then."""
        self._on_in_line = on_in_line
        try:
            for connection in await self._dial():
                if self._done.is_set():  # a span was lost while another was dialled
                    break
                self._release.append(connection.hold().release)
                stream = connection.open_stream(SESSION_STREAM, max_frame_bytes=MAX_FRAME_BYTES)
                index = len(self._streams)
                self._streams.append(stream)
                stream.receive_with(partial(self._on_frame, index), partial(self._on_end, index))
            self._apply(self.core.start(self._now()))
            self.opened = await self._ready
        except BaseException:
            self.cancel()
            raise

    def _now(self) -> float:
        return time.perf_counter() + self._ahead

    async def _dial(self) -> list[Connection]:
        dials = [self._endpoint.dial(hop.peer, hop.addresses) for hop in self.core.hops]
        outcomes = await asyncio.gather(*dials, return_exceptions=True)
        connections = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            connections.append(outcome)
        return connections

    def listen(self, listener: Listener) -> None:
        """Results go to `listener` from now on; it hears at once of a route that has broken already."""
        self._listener = listener
        if self._broken is not None:
            listener.on_broken(self._broken)

    @property
    def length(self) -> int:
        """Positions sent so far."""
        return self.core.length

    @property
    def history(self) -> History:
        """What the session holds."""
        return self.core.history

    @property
    def rollback(self) -> Rollback:
        """How the weakest span of the route takes rows back."""
        return self.core.rollback

    @property
    def is_parked(self) -> bool:
        return self.core.state is State.PARKED

    @property
    def is_at_work(self) -> bool:
        """It opens, or rows may go through it."""
        return self.core.state in (State.OPENING, State.READY)

    @property
    def flights(self) -> int:
        """How often rows went through the route and logits came back."""
        return self.core.flights

    def push(self, tokens: list[int], *, truncate_to: int | None = None, n_draft: int = 0) -> None:
        """See `HeadSession.push`."""
        self._apply(self.core.push(tokens, self._now(), truncate_to=truncate_to, n_draft=n_draft))

    def request_full_row(self, seq: int, row: int) -> None:
        self._apply(self.core.request_full_row(seq, row, self._now()))

    def park(self) -> None:
        """The answer is complete and read: the spans keep the session until they need the room. What happens to it
        from here on is nobody's error; `is_parked` tells whether it is still there."""
        self._listener = None
        self._on_steps(self)
        self._apply(self.core.park())

    def resume(self, temperature: float, top_k: int, deadline_ms: int) -> None:
        """The next turn of a parked session begins."""
        self._apply(self.core.resume(temperature, top_k, deadline_ms))

    def cancel(self) -> None:
        """Stop all work on every span at once."""
        self._apply(self.core.cancel())
        self._end()

    def close(self) -> None:
        """Begin to end in good order: counters and receipts are exchanged, within a short deadline."""
        self._apply(self.core.close(self._now()))

    async def ended(self) -> None:
        """Returns when nothing more comes from any span, whatever ended the session."""
        await self._done.wait()

    # -- what arrives

    def _on_frame(self, hop: int, frame: bytes) -> None:
        if self._done.is_set():
            return
        try:
            message = decode(frame)
        except RemoteProtocolError as error:
            self._apply(self.core.on_lost(hop, error, self._now()))
            return
        self._apply(self.core.on_message(hop, message, self._now()))

    def _on_end(self, hop: int, error: MeshswarmError | None) -> None:
        self._apply(self.core.on_lost(hop, error, self._now()))

    def _on_timer(self) -> None:
        self._timer = None
        self._apply(self.core.tick(self._now()))

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToSpan(hop, message):
                    if hop < len(self._streams):
                        self._streams[hop].send(encode(message, self._identity))
                case Rows(seq, rows):
                    if self._listener is not None:
                        self._listener.on_rows(seq, rows)
                    if self.core.step_times.n >= ENOUGH:
                        self._on_steps(self)
                case FullLogits(seq, row, logits):
                    if self._listener is not None:
                        self._listener.on_full_row(seq, row, logits)
                case InLine():
                    self._on_in_line(action)
                case Ready(opened):
                    if not self._ready.done():  # whoever waited may have given up in this very turn of the loop
                        self._ready.set_result(opened)
                case Receipt(hop, receipt):
                    self._countersign(hop, receipt)
                case Broken(error):
                    self._on_broken(error)
                case Done():
                    self._end()
        self._arm()

    def _countersign(self, hop: int, receipt: bytes) -> None:
        core, at = self.core, self.core.hops[hop]
        engagement = self._bookkeeper.engagement(
            core.session, core.terms.model_id, at.span, core.numclass(hop), at.peer, self._identity.peer_id
        )
        acknowledgement = self._bookkeeper.countersign(receipt, engagement, core.counters(hop))
        if acknowledgement is not None:
            self._streams[hop].send(encode(ReceiptAck(acknowledgement)))

    def _on_broken(self, error: MeshswarmError) -> None:
        self._broken = error
        if not self._ready.done():
            self._ready.set_exception(error)
        elif self._listener is not None:
            self._listener.on_broken(error)

    def _arm(self) -> None:
        """One timer that may fire early and look again: re-arming it for every token would cost more than it tells."""
        deadline = self.core.deadline
        if deadline is None or self._done.is_set():
            return
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _end(self) -> None:
        if self._done.is_set():
            return
        self._done.set()
        self._on_steps(self)
        if self._timer is not None:
            self._timer.cancel()
        if not self._ready.done():
            self._ready.cancel()
        for stream in self._streams:
            stream.finish()
        for release in self._release:
            release()
