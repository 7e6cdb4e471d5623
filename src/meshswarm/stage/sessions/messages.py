"""The messages of a session, OPEN to CLOSE, as values; `stage/sessions/wire.py` turns them into bytes and back.

Rows travel as raw little-endian bytes: hidden states float32 [n_rows, n_embd], token ids int32 [n_rows]. The sequence
number of a STEP orders everything in a session: rows, truncation, replay, results.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from meshswarm.config import Address
from meshswarm.identity import PeerId
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback

SESSION_STREAM = "session"
HOP_STREAM = "hop"

SESSION_ID_BYTES = 16
MAX_ROWS_PER_STEP = 128  # more rows cost every span memory and make the next one wait longer before it can begin
MAX_FRAME_BYTES = 16 << 20  # 128 rows of a model 32768 wide
MAX_TEXT = 500
MAX_TOP_K = 4096
MAX_DRAFT = 15  # tokens a head may guess ahead in one step


class Kind(IntEnum):
    """First element of every frame."""

    OPEN = 1
    OPENED = 2
    REFUSED = 3
    HOP = 4
    STEP = 5
    RESULT = 6
    CREDIT = 7
    FULL_ROW_REQUEST = 8
    FULL_ROW = 9
    CANCEL = 10
    CLOSE = 11
    RECEIPT = 12
    RECEIPT_ACK = 13
    FAILED = 14
    WAITING = 15
    PARK = 16
    RESUME = 17


class Returns(StrEnum):
    """What a span does with the rows it computed: send them to the next span, or top-k logits to the head."""

    NEXT = "next"
    LOGITS = "logits"


class RefusalReason(StrEnum):
    BUSY = "busy"
    UNKNOWN_SPAN = "unknown-span"
    CONTEXT = "context"
    UNSUPPORTED = "unsupported"
    NEXT_UNREACHABLE = "next-unreachable"
    DRAINING = "draining"


class Dtype(StrEnum):
    """Wire type of hidden states (`rows_codec`). F32 is exact; a head asks for another only where it is proved."""

    F32 = "f32"
    F16 = "f16"
    Q8 = "q8"  # blocks of 32 8-bit integers with a scale each


class Flag(IntEnum):
    """Bits of `Step.flags`."""

    EMIT = 1  # the last span returns the logits of the step's last `n_outputs` rows
    REPLAY = 2  # rows computed before by a span that was lost; nothing is emitted
    DRAFT = 8  # the last `n_outputs - 1` rows are guesses: the next step may truncate into them


@dataclass(frozen=True, slots=True)
class Fork:
    """The new session begins with a copy of the first `n_positions` of another session of the same head."""

    session: bytes
    n_positions: int


@dataclass(frozen=True, slots=True)
class Open:
    """The head asks a span to take part in a session. Signed by the head.

    `previous` or `next` None mean the head itself. `max_wait_ms`: how long to wait for room; 0 is a refusal at once.
    """

    session: bytes
    head: PeerId
    head_addresses: tuple[Address, ...]
    model_id: bytes
    span: Span  # layers to compute: from the start of the slice the peer serves, to an exit at or before its end
    n_layers: int
    previous: PeerId | None
    next: PeerId | None
    next_addresses: tuple[Address, ...]
    returns: Returns
    dtype: Dtype
    n_ctx: int  # positions this session may use, on every span alike
    profile: Profile
    temperature: float  # the tail mass of a RESULT is taken at this temperature
    top_k: int
    deadline_ms: int  # how long the session may live, from OPEN
    max_wait_ms: int = 0
    fork: Fork | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    numclass: str
    window: int  # rows the head may have under way before the span credits them back
    slice_root: bytes
    rollback: Rollback = Rollback.KV
    needs_tokens: bool = False  # the token ids travel beside the hidden states
    n_checkpoints: int = 0  # how many positions a session may mark to go back to; with Rollback.KV all are


@dataclass(frozen=True, slots=True)
class Refused:
    reason: RefusalReason
    message: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The session waits for room at this place, 1 is next. Said again whenever the place changes."""

    place: int
    estimate_ms: int


@dataclass(frozen=True, slots=True)
class Park:
    """An answer is complete. The span keeps what the session holds until it needs the room: then it offers its receipt
    unasked, which ends the session."""


@dataclass(frozen=True, slots=True)
class Resume:
    """A parked session goes on: its next turn. `deadline_ms` counts from here."""

    temperature: float
    top_k: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Hop:
    """First frame on the stream from one span to the next."""

    head: PeerId
    session: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """Rows for positions `pos0 ... pos0 + n_rows - 1`: `tokens` for the first span, `hidden` for every other one, and
    both where every span of the family looks at the token ids.

    `truncate_to`: positions from there on are removed before the rows are computed. `running_hash` covers all rows sent
    in this direction of the session so far (see `RowHash`). `n_outputs`: logits of so many of the last rows are wanted.
    `turn`: how many RESUMEs came before it. It reaches a span by another way than they do, and waits there for them.
    `checkpoints`: the positions that a later step may truncate to whatever comes between, behind this step's rows or
    said before; all others are given up. None: as they were.
    """

    seq: int
    pos0: int
    n_rows: int
    truncate_to: int | None
    flags: int
    tokens: bytes | None
    dtype: Dtype
    hidden: bytes | None
    running_hash: bytes | None
    n_outputs: int = 1
    turn: int = 0
    checkpoints: tuple[int, ...] | None = None

    @property
    def n_draft(self) -> int:
        """How many of the rows, the last ones, are guesses."""
        return self.n_outputs - 1 if self.flags & Flag.DRAFT else 0


@dataclass(frozen=True, slots=True)
class Row:
    """Top-k of one row's logits: ids int32 and logits float32 as bytes, descending; the tail's log-mass at the
    session's temperature (-inf when nothing is left out; meaningless at temperature 0)."""

    ids: bytes
    logits: bytes
    tail_log_mass: float


@dataclass(frozen=True, slots=True)
class Result:
    seq: int
    rows: tuple[Row, ...]
    running_hash: bytes | None


@dataclass(frozen=True, slots=True)
class Credit:
    """`rows`: all rows of the session this span has computed so far."""

    rows: int


@dataclass(frozen=True, slots=True)
class FullRowRequest:
    """All logits of the `row`-th row of a result."""

    seq: int
    row: int = 0


@dataclass(frozen=True, slots=True)
class FullRow:
    seq: int
    logits: bytes  # float32 [n_vocab]
    row: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The head gives up; the span stops where it stands."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What one side counted over a session and span. All are totals; bytes are those of rows, without framing.

    Drafted rows are among the decode rows, accepted ones among the drafted.
    """

    prefill_rows: int = 0
    decode_rows: int = 0
    drafted_rows: int = 0
    accepted_rows: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """The head is done; the span answers with its receipt."""


@dataclass(frozen=True, slots=True)
class ReceiptOffer:
    """The provider's signed receipt (the ledger's bytes); ends the session on the provider's side."""

    receipt: bytes


@dataclass(frozen=True, slots=True)
class ReceiptAck:
    """The consumer's counter-signature."""

    acknowledgement: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A span gives the session up. `blamed` names the peer whose input caused it, when it was not the sender's own."""

    message: str
    blamed: PeerId | None


Message = (
    Open | Opened | Refused | Waiting | Park | Resume | Hop | Step | Result | Credit | FullRowRequest | FullRow | Cancel
    | Close | ReceiptOffer | ReceiptAck | Failed
)  # fmt: skip


class RowHash:
    """Running BLAKE2b-256 over the rows of one direction of a session; both ends compute it, receipts carry it."""

    def __init__(self, session: bytes, direction: str) -> None:
        self._hash = hashlib.blake2b(session + direction.encode(), digest_size=32)

    def step(self, seq: int, pos0: int, n_rows: int, tokens: bytes | None, hidden: bytes | None) -> bytes:
        """Adds a step's rows and returns the digest so far."""
        self._hash.update(struct.pack(">QII", seq, pos0, n_rows))
        self._hash.update(tokens if tokens is not None else b"")
        self._hash.update(hidden if hidden is not None else b"")
        return self._hash.copy().digest()

    def result(self, seq: int, rows: tuple[Row, ...]) -> bytes:
        """Adds a result's rows and returns the digest so far."""
        self._hash.update(struct.pack(">QI", seq, len(rows)))
        for row in rows:
            self._hash.update(row.ids + row.logits + struct.pack(">d", row.tail_log_mass))
        return self._hash.copy().digest()

    def digest(self) -> bytes:
        return self._hash.copy().digest()
