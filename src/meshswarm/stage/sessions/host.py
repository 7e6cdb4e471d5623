"""What a session uses of the peer it runs on, and what it tells it.

The rule this file keeps: a session knows no more of its server than this.
"""

from __future__ import annotations

from typing import Protocol

from meshswarm.net.endpoint import Endpoint
from meshswarm.stage.sessions.sent_rows import SentRows
from meshswarm.stage.sessions.session import SpanSession
from meshswarm.tasks import Tasks


class Bookkeeper(Protocol):
    """What the ledger does for a provider at the end of a session."""

    def offer(self, session: SpanSession, numclass: str, lasted_s: float) -> bytes:
        """The provider's signed receipt."""

    def acknowledged(self, receipt: bytes, acknowledgement: bytes) -> None:
        """The consumer countersigned. Raises RemoteProtocolError when it signed something else."""


class Host(Protocol):
    """Whoever keeps the sessions: what a session uses of it, and what it is told."""

    endpoint: Endpoint
    tasks: Tasks
    bookkeeper: Bookkeeper
    sent: SentRows

    def on_parked(self, turn_s: float) -> None:
        """A session was parked after being at work for `turn_s`: its room can be had."""

    def on_resumed(self) -> None:
        """A parked session is at work again."""

    def on_room(self, turn_s: float | None) -> None:
        """A session gave its slot back; `turn_s` is how long it was at work, None when it was parked."""

    def on_end(self, session: SpanSession) -> None:
        """The session is over. Called once."""
