"""Streams that come from other peers, from their first frame until a session takes them.

The rule this file keeps: what comes first says what the stream is for; a stream that begins or goes on otherwise is
refused, and a stranger learns nothing from that about other peers' sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshswarm.errors import MeshswarmError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net.stream import Stream
from meshswarm.stage.sessions.messages import Cancel, Hop, Message, Open, Refused, Step, Waiting
from meshswarm.stage.sessions.served_session import ServedSession
from meshswarm.stage.sessions.waiting_room import Place, Ticket
from meshswarm.stage.sessions.wire import decode, encode


class Door(Protocol):
    """Whoever gives out the engine's slots."""

    def knows(self, head: PeerId, session: bytes) -> bool:
        """Whether a session of this name runs or waits here."""

    def refusal(self, opening: Open, peer: PeerId) -> Refused | None:
        """Why `peer` cannot have this session, or None. Raises RemoteProtocolError for an OPEN that is not its own."""

    def slot_at_once(self, opening: Open) -> int | None:
        """A slot, if there is one that nobody waits for."""

    def wait(self, opening: Opening, max_wait_s: float) -> Ticket | None:
        """A place in line; None when the line is too long already."""

    def leave(self, ticket: Ticket) -> None:
        """Whoever held this place is gone."""

    def busy(self) -> Refused:
        """That there is no room, and when to ask again."""

    def begin(self, opening: Open, head: Stream, slot: int) -> None:
        """Run the session in this slot."""


class Opening:
    """A session stream whose OPEN has not been answered yet."""

    message: Open

    def __init__(self, door: Door, stream: Stream) -> None:
        self._door = door
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
        door, peer = self._door, self._stream.peer_id
        if door.knows(message.head, message.session):
            raise RemoteProtocolError("a session was opened twice", peer=str(peer))
        refused = door.refusal(message, peer)
        if refused is not None:
            self.refuse(refused)
            return
        self.message = message
        slot = door.slot_at_once(message)
        if slot is not None:
            self.start(slot)
            return
        if message.max_wait_ms and message.fork is None:
            self._ticket = door.wait(self, message.max_wait_ms / 1000)
        if self._ticket is None:
            self.refuse(door.busy())

    def _on_frame_in_line(self, message: Message) -> None:
        self._leave()
        if not isinstance(message, Cancel):
            raise RemoteProtocolError(f"a head that waits for room sent a {type(message).__name__}")
        self._stream.finish()

    def _on_end(self, error: MeshswarmError | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._ticket is not None:
            self._door.leave(self._ticket)
            self._ticket = None

    def tell(self, place: Place) -> None:
        """The session's place in line; said when it changes."""
        if place.number != self._told:
            self._told = place.number
            self._stream.send(encode(Waiting(place.number, int(place.estimate_s * 1000))))

    def start(self, slot: int) -> None:
        """There is room: the session begins, and the stream is its own from now on."""
        self._ticket = None
        self._door.begin(self.message, self._stream, slot)

    def refuse(self, refused: Refused) -> None:
        self._leave()
        self._is_refused = True
        self._stream.send(encode(refused))
        self._stream.finish()


class HopIn:
    """The stream on which the previous span sends its steps. `find` gives the session of a head and an id."""

    def __init__(self, find: Callable[[PeerId, bytes], ServedSession | None], stream: Stream) -> None:
        self._find = find
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
        session = self._find(message.head, message.session)
        if session is None or session.core.opening.previous != self._stream.peer_id or session.hop_in is not None:
            # The same answer for all three: a stranger learns nothing about other peers' sessions.
            raise RemoteProtocolError("a hop stream named a session that it has no part in")
        session.hop_in = self._stream
        self._session = session

    def _on_end(self, error: MeshswarmError | None) -> None:
        if self._session is not None:
            self._session.on_hop_in_end(error)
