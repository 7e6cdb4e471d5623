"""One QUIC connection to one peer, from its first packet to its end: the thin shell around `quic`, `greeting`, `lanes`
and `upkeep`, which decide.

Datagrams come in from the endpoint and leave through it; one timer wakes the link when something is due. The rule this
file keeps: no stream exists before HELLO is over, and one small frame leaves in the call that sends it.
The clock is `time.monotonic`, not the loop's: uvloop's moves in whole milliseconds, too coarse for round-trip times.
"""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import replace
from enum import Enum
from time import monotonic
from typing import Any, Protocol

from aioquic.quic import events

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.codes import CloseCode, close_error
from meshswarm.net.connection import Connection, Hold
from meshswarm.net.express import ExpressConnection
from meshswarm.net.frames import FrameDecoder, frame_header
from meshswarm.net.greeting import Greeting
from meshswarm.net.handshake import MAX_HELLO_BYTES, Action, Established, Failed, Self, Send
from meshswarm.net.lanes import Kinds, Lanes
from meshswarm.net.liveness import Verdict
from meshswarm.net.stream import Stream
from meshswarm.net.upkeep import Upkeep

HELLO_STREAM = 0
MIN_TIMER_S = 0.0005  # whatever is overdue and cannot be done now must not spin the loop
Datagrams = list[tuple[bytes, Any]]


class Phase(Enum):
    """How far a connection is; the value ends the sentence "was lost while ..."."""

    TLS = "connecting"
    HELLO = "saying HELLO"
    OPEN = "connected"
    OVER = "closing"


class LinkOwner(Protocol):
    """The endpoint, as its links see it."""

    loop: asyncio.AbstractEventLoop
    kinds: Kinds
    loopback_window_bytes: int

    def send(self, link: Link, datagrams: Datagrams) -> bool:
        """False when this machine refused one of them for its size."""

    def established(self, link: Link) -> None: ...
    def ended(self, link: Link, error: MeshswarmError, last: Datagrams) -> None: ...
    def id_issued(self, link: Link, connection_id: bytes) -> None: ...
    def id_retired(self, link: Link, connection_id: bytes) -> None: ...
    def n_connections(self) -> int: ...


class Link(Connection):
    """A connection that we dialled to `server`, or that a stranger dialled when `server` is None.

    `takes_anybody`: we dialled it without knowing whom; `peer_id` is there from the end of HELLO on.
    """

    def __init__(
        self,
        owner: LinkOwner,
        quic: ExpressConnection,
        me: Self,
        address: Address,
        sockaddr: Any,
        server: PeerId | None,
        *,
        takes_anybody: bool = False,
    ) -> None:
        super().__init__()
        self.remote_address = address
        self.sockaddr = sockaddr
        self.agent = ""
        self.instance = b""
        self.observed = ""
        """Our own address as the peer sees it, or "" when it did not say."""
        self.is_dialled_here = server is not None or takes_anybody
        self.phase = Phase.TLS
        self.connection_ids: set[bytes] = set()
        """Ids under which the endpoint knows this link."""
        self.has_heard = False
        """Anything at all came back."""
        self.is_deferred = False
        """The endpoint is handing in datagrams and calls `end_turn` afterwards."""
        self._owner = owner
        self._quic = quic
        quic.emit = self._emit
        self._who = f"whoever is at {address}" if takes_anybody else f"a client at {address}"
        if server is not None:
            self._who = f"peer {server.short} at {address}"
            self.peer_id = server
        self._greeting = Greeting(
            replace(me, observed=str(address)),
            server,
            self._who,
            os.urandom,
            monotonic(),
            takes_anybody=takes_anybody,
        )
        self._control = FrameDecoder(MAX_HELLO_BYTES)
        self._upkeep: Upkeep | None = None
        self._lanes = Lanes(self, quic, owner.kinds, self._flush, self._send_at_once)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._is_dirty = False  # something waits to be sent
        self._is_turn_used = False  # something was sent in this turn of the loop: what follows goes together

    def __repr__(self) -> str:
        return f"<Link with {self._who}>"

    # -- what the program sees

    @property
    def rtt_s(self) -> float | None:
        return None if self._upkeep is None else self._upkeep.rtt.smoothed_s

    @property
    def datagram_bytes(self) -> int:
        """The size of datagrams that the path was seen to carry."""
        return self._quic.datagram_bytes

    @property
    def was_open(self) -> bool:
        """HELLO was over at some time."""
        return self._upkeep is not None

    @property
    def is_shown(self) -> bool:
        """The other side may count on this link."""
        return self._greeting.is_shown

    @property
    def is_used(self) -> bool:
        """Streams are open, or somebody here holds it."""
        return len(self._lanes) > 0 or (self._upkeep is not None and self._upkeep.liveness.is_held)

    def open_stream(self, kind: str, *, max_frame_bytes: int) -> Stream:
        if self._lost is not None:
            return self._lanes.ended(kind, self._lost)
        assert self._upkeep is not None
        self._upkeep.used(monotonic())
        stream = self._lanes.open(kind, max_frame_bytes)
        self._flush_later()
        return stream

    async def measure_rtt(self) -> float:
        if self._lost is not None or self._upkeep is None:
            raise self._lost or PeerUnreachableError(f"{self._who} is not connected yet", peer=self._peer_text)
        answer: asyncio.Future[float] = self._owner.loop.create_future()
        self._upkeep.ping(monotonic(), answer)
        return await answer

    def hold(self) -> Hold:
        if self._lost is not None or self._upkeep is None:
            return Hold(lambda: None)
        now = monotonic()
        self._upkeep.liveness.hold(now)
        self._upkeep.sent(self._quic.bytes_sent, now)
        self._arm(now)
        return Hold(self._release)

    def _release(self) -> None:
        if self._upkeep is not None:
            self._upkeep.liveness.release()
            self._upkeep.used(monotonic())

    def close(self, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        error = PeerUnreachableError(f"the connection to {self._who} was closed here{because}", peer=self._peer_text)
        self.end_turn()  # what was sent before this call goes out before the close
        self.end(CloseCode.DONE, error)

    @property
    def _peer_text(self) -> str | None:
        return str(self.peer_id) if hasattr(self, "peer_id") else None

    # -- for the endpoint

    def dial(self) -> None:
        """Send the first packet."""
        now = monotonic()
        self._quic.connect(self.sockaddr, now)
        self.transmit(now)

    def receive(self, data: bytes, sockaddr: Any, now: float) -> None:
        """Handle one datagram; `end_turn` follows after the last of a batch."""
        self.has_heard = True
        self._quic.receive_datagram(data, sockaddr, now)
        self._handle_events(now)

    def transmit(self, now: float) -> None:
        """Send whatever is due, and set the timer for the rest."""
        if self.phase is Phase.OVER:
            return
        self._is_dirty = False
        datagrams = self._quic.datagrams_to_send(now)
        if datagrams:
            self._send(datagrams)
        self._handle_events(now)
        if self._upkeep is not None:
            self._upkeep.sent(self._quic.bytes_sent, now)
        self._arm(now)

    def suspect(self) -> None:
        """The network says that nobody is at the other end; perhaps so, perhaps forged."""
        if self.phase is Phase.OPEN and self._upkeep is not None:
            now = monotonic()
            self._upkeep.liveness.suspect(now)
            self._arm(now)

    def end(self, code: CloseCode, error: MeshswarmError) -> None:
        """End the connection from here: `code` goes to the other side, `error` to everybody here."""
        if self.phase is not Phase.OVER:
            self._quic.close(error_code=code, frame_type=None)
            self._over(error, self._quic.datagrams_to_send(monotonic()))

    def _over(self, error: MeshswarmError, last: Datagrams) -> None:
        self.phase = Phase.OVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.ended(self, error, last)
        self._lanes.end_all(error)
        if self._upkeep is not None:
            self._upkeep.end(error)
        self._say_lost(error)

    # -- sending: at once when the loop's turn has sent nothing yet, together otherwise

    def _send_at_once(self, stream_id: int, data: bytes, finish: bool) -> bool:
        """The short way for the first piece of a turn; what it leaves undone follows at the turn's end."""
        if self._is_dirty or self._is_turn_used:
            return False
        if not self._quic.send_at_once(stream_id, data, finish, monotonic()):
            return False
        self._use_turn()
        return True

    def _flush(self) -> None:
        at_once = not self._is_turn_used and not self.is_deferred
        self._flush_later()
        if at_once:
            self.transmit(monotonic())

    def _flush_later(self) -> None:
        self._is_dirty = True
        self._use_turn()

    def _use_turn(self) -> None:
        if not self._is_turn_used and not self.is_deferred:
            self._owner.loop.call_soon(self.end_turn)
        self._is_turn_used = True

    def end_turn(self) -> None:
        """The loop's turn is over, or the batch of datagrams: whatever waits leaves."""
        self._is_turn_used = self.is_deferred = False
        self.transmit(monotonic())

    def _emit(self, datagram: bytes, sockaddr: Any) -> None:
        self._send([(datagram, sockaddr)])

    def _send(self, datagrams: Datagrams) -> None:
        if not self._owner.send(self, datagrams) and self._upkeep is not None:
            self._upkeep.too_large(self._quic.datagram_bytes)

    # -- the timer: it may fire early and is then set again, so that moving a deadline back costs nothing

    def _arm(self, now: float) -> None:
        if self.phase is Phase.OVER:
            return
        at = self._greeting.deadline if self._upkeep is None else self._upkeep.next_at
        quic_at = self._quic.get_timer()
        if quic_at is not None and quic_at < at:
            at = quic_at
        at = max(at, now + MIN_TIMER_S)
        if self._timer is not None:
            if at >= self._timer_at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._owner.loop.call_later(at - now, self._on_timer)

    def _on_timer(self) -> None:
        now = monotonic()
        self._timer = None
        quic_at = self._quic.get_timer()
        if quic_at is not None and quic_at <= now:
            self._quic.handle_timer(now)
        if self._upkeep is None:
            self._act(self._greeting.expire(now), now)
        elif self._upkeep.check(now) is Verdict.LOST:
            silent, gone = f"was silent for {self._upkeep.liveness.pace.lost_s:g} s", "is gone: nothing listens there"
            why = gone if self._upkeep.liveness.is_suspect else silent
            self.end(CloseCode.DONE, PeerUnreachableError(f"{self._who} {why}", peer=self._peer_text))
        elif not self._lanes and self._upkeep.is_idle(now, n_connections=self._owner.n_connections()):
            self.end(CloseCode.IDLE, PeerUnreachableError(f"nobody used {self._who}", peer=self._peer_text))
        self.transmit(now)

    # -- events

    def _handle_events(self, now: float) -> None:
        while self.phase is not Phase.OVER and (event := self._quic.next_event()) is not None:
            if isinstance(event, events.StreamDataReceived):
                self._receive_stream_data(event.stream_id, event.data, event.end_stream, now)
            else:
                self._handle_rare_event(event, now)
        if self.phase is not Phase.OVER and (close := self._quic.close_event) is not None:
            last = self._quic.datagrams_to_send(now)  # aioquic itself may have closed it, over something it received
            self._over(self._close_error(close, ours=bool(last)), last)

    def _handle_rare_event(self, event: events.QuicEvent, now: float) -> None:
        match event:
            case events.StreamReset() if event.stream_id == HELLO_STREAM:
                self._receive_on_hello_stream(b"", True, now)
            case events.StreamReset():
                self._lanes.reset(event.stream_id, event.error_code)
            case events.StopSendingReceived() if event.stream_id == HELLO_STREAM:
                self._receive_on_hello_stream(b"", True, now)
            case events.StopSendingReceived():
                self._lanes.stop(event.stream_id, event.error_code)
            case events.ConnectionIdIssued():
                self._owner.id_issued(self, event.connection_id)
            case events.ConnectionIdRetired():
                self._owner.id_retired(self, event.connection_id)
            case events.HandshakeCompleted():
                self.phase = Phase.HELLO
                theirs, chain = self._quic.peer_certificates
                mine = self._quic.configuration.certificate
                self._act(self._greeting.tls_done(mine, theirs, chain, now), now)

    def _receive_stream_data(self, stream_id: int, data: bytes, end: bool, now: float) -> None:
        if stream_id == HELLO_STREAM:
            self._quic.delivered(len(data))
            self._receive_on_hello_stream(data, end, now)
        elif self.phase is Phase.OPEN:
            self._lanes.receive(stream_id, data, end)
        else:
            self._act(self._greeting.receive_early(stream_id, data, end), now)

    def _receive_on_hello_stream(self, data: bytes, end: bool, now: float) -> None:
        for frame in self._control.feed(data):
            if self.phase is Phase.OPEN and self._upkeep is not None:
                self._upkeep.receive(frame, now)
            else:
                self._act(self._greeting.receive(frame, now), now)
        if end or self._control.error is not None:
            code = CloseCode.PROTOCOL if self.phase is Phase.OPEN else CloseCode.HELLO_FAILED
            self.end(code, RemoteProtocolError(f"{self._who} broke off its HELLO stream", peer=self._peer_text))

    def _close_error(self, event: events.ConnectionTerminated, *, ours: bool) -> MeshswarmError:
        reason = event.reason_phrase or f"code {event.error_code:#x}"
        if ours:
            return RemoteProtocolError(
                f"{self._who} broke QUIC while {self.phase.value}: {reason}", peer=self._peer_text
            )
        if event.frame_type is None:
            return close_error(event.error_code, self._who, self._peer_text)
        return PeerUnreachableError(f"{self._who} was lost while {self.phase.value}: {reason}", peer=self._peer_text)

    # -- HELLO

    def _act(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Send(frame):
                    self._say(frame)
                case Failed(code, error):
                    self.end(code, error)
                case Established():
                    self._open(action, now)

    def _say(self, frame: bytes) -> None:
        self._quic.send_stream_data(HELLO_STREAM, frame_header(len(frame)) + frame)
        self._flush()

    def _open(self, established: Established, now: float) -> None:
        self.phase = Phase.OPEN
        self.peer_id = established.peer
        self.agent, self.observed, self.instance = established.agent, established.observed, established.instance
        self._who = f"peer {self.peer_id.short} at {self.remote_address}"
        self._quic.open_window()
        self._upkeep = Upkeep(
            self._quic, self.sockaddr[0], self._say, self._send_probe, self._owner.loopback_window_bytes, now
        )
        self._upkeep.ping(now)
        self._arm(now)
        self._owner.established(self)
        early, self._greeting.early = self._greeting.early, []
        for stream_id, data, end in early:
            if self.phase is Phase.OPEN:
                self._lanes.receive(stream_id, data, end)

    def _send_probe(self, size: int) -> bool:
        def on_result(arrived: bool) -> None:
            if self._upkeep is not None and self.phase is Phase.OPEN:
                self._upkeep.probe_result(size, arrived, monotonic())

        return self._owner.send(self, self._quic.path_probe(size, monotonic(), on_result))
