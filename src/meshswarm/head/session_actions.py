"""What a `HeadSession` is made for, and what it wants done or known: values, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError
from meshswarm.head.history import History
from meshswarm.identity import PeerId
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import Dtype, Message, Opened, Row


@dataclass(frozen=True, slots=True)
class Hop:
    """One span of the route: who computes which layers."""

    peer: PeerId
    addresses: tuple[Address, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Terms:
    """What the head asks every span of the route alike. `row_width`: floats of one position between two spans.
    `max_wait_ms`: how long the session may stand in line, all spans together; 0 is not at all."""

    model_id: bytes
    n_layers: int
    row_width: int
    n_ctx: int
    profile: Profile
    temperature: float
    top_k: int
    deadline_ms: int
    dtype: Dtype = Dtype.F32
    max_wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """The session that a new one begins as a copy of, and what it takes over from it."""

    session: bytes
    history: History


@dataclass(frozen=True, slots=True)
class ToSpan:
    """Send this message to span number `hop` of the route."""

    hop: int
    message: Message


@dataclass(frozen=True, slots=True)
class InLine:
    """Span `hop` has no room yet: the session waits at this place, 1 is next."""

    hop: int
    place: int
    estimate_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """Every span has opened: rows may flow."""

    opened: tuple[Opened, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The last span returned top-k logits: of the last row sent, and of the ones before it that led to a draft."""

    seq: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class FullLogits:
    """A full row that was asked for: float32 [n_vocab] as bytes."""

    seq: int
    row: int
    logits: bytes


@dataclass(frozen=True, slots=True)
class Receipt:
    """Span `hop` handed in its signed receipt, to be answered with what the head itself counted (`counters`)."""

    hop: int
    receipt: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The session cannot go on. `error` names the peer."""

    error: MeshswarmError


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more will come from this session."""


Action = ToSpan | InLine | Ready | Rows | FullLogits | Receipt | Broken | Done
