"""A span's side of one session, as a state machine without I/O.

Events go in (a step arrived, the engine finished one), actions come out (compute, forward, reply). The rule this file
keeps: the sequence number decides. A step older than the last one handled is dropped, a gap waits, and rows are only
ever accepted at the position where the session stands, so a span never computes on a KV cache that differs from what
the head believes. A step of a later turn than the one that has begun here waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshswarm.errors import RemoteProtocolError
from meshswarm.stage.sessions.messages import (
    Counters,
    Credit,
    Flag,
    Message,
    Open,
    Result,
    Resume,
    Returns,
    Row,
    RowHash,
    Step,
)
from meshswarm.stage.sessions.rows_codec import row_bytes

MAX_WAITING_STEPS = 64  # steps held back because an earlier one has not arrived


@dataclass(frozen=True, slots=True)
class Compute:
    """Have the engine compute this step's rows; `output_rows` are the rows whose logits are wanted (last span only)."""

    step: Step
    output_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """Send this step to the next span."""

    step: Step


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this message to the head."""

    message: Message


Answer = Forward | Reply


@dataclass(slots=True)
class Work:
    """Rows of a session so far. Both ends of a receipt count by this, from the steps alone: a step of one row, or one
    with a draft, is decode work, any other prefill. A draft's rows are accepted as far as the next step keeps them;
    what no later step settles counts as not accepted.
    """

    prefill_rows: int = 0
    decode_rows: int = 0
    drafted_rows: int = 0
    accepted_rows: int = 0
    _draft: range = range(0)  # positions of the latest step's guesses

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows

    def add(self, step: Step) -> None:
        """One more step."""
        kept_to = self._draft.stop if step.truncate_to is None else step.truncate_to
        self.accepted_rows += max(0, min(kept_to, self._draft.stop) - self._draft.start)
        end = step.pos0 + step.n_rows
        self._draft = range(end - step.n_draft, end)
        self.drafted_rows += step.n_draft
        if step.n_rows == 1 or step.n_draft:
            self.decode_rows += step.n_rows
        else:
            self.prefill_rows += step.n_rows

    def counters(self, bytes_in: int, bytes_out: int) -> Counters:
        return Counters(self.prefill_rows, self.decode_rows, self.drafted_rows, self.accepted_rows, bytes_in, bytes_out)


def rows_bytes(rows: tuple[Row, ...]) -> int:
    """Bytes of a result, as both ends count them."""
    return sum(len(row.ids) + len(row.logits) for row in rows)


@dataclass(slots=True)
class SpanSession:
    """State of one session on one span.

    `row_width`: floats of one position between two spans. `window`: rows the head may have under way before credit
    comes back. `needs_tokens`: every span of the model's family looks at the token ids, which travel beside the rows.
    `n_checkpoints`: so many positions may be marked to go back to.
    """

    opening: Open
    row_width: int
    window: int
    needs_tokens: bool = False
    n_checkpoints: int = 0
    is_parked: bool = False
    turn: int = 0
    length: int = field(init=False)  # positions accepted so far
    temperature: float = field(init=False)
    top_k: int = field(init=False)
    work: Work = field(default_factory=Work)
    _bytes_in: int = 0
    _bytes_out: int = 0
    _next_seq: int = 0
    _waiting: dict[int, Step] = field(default_factory=dict)
    _computing: dict[int, Step] = field(default_factory=dict)
    _rows_computed: int = 0
    _rows_credited: int = 0
    _last_result: tuple[int, int] | None = None  # its step and how many rows it has
    input_hash: RowHash = field(init=False)
    output_hash: RowHash = field(init=False)

    def __post_init__(self) -> None:
        self.length = 0 if self.opening.fork is None else self.opening.fork.n_positions
        self.temperature, self.top_k = self.opening.temperature, self.opening.top_k
        self.input_hash = RowHash(self.opening.session, "step")
        self.output_hash = RowHash(self.opening.session, "result" if self.opening.returns is Returns.LOGITS else "step")

    @property
    def counters(self) -> Counters:
        """What this span has done so far, for its receipt."""
        return self.work.counters(self._bytes_in, self._bytes_out)

    @property
    def takes_tokens(self) -> bool:
        """The first span embeds token ids; every other one takes hidden states."""
        return self.opening.span.start == 0

    def on_step(self, step: Step) -> list[Compute]:
        """A STEP arrived from the previous peer. Raises RemoteProtocolError when it breaks the session's rules."""
        if step.seq < self._next_seq or step.seq in self._waiting:
            return []
        if step.seq > self._next_seq or step.turn > self.turn:
            self._check_rows(step)
            self._check_window(step)
            if len(self._waiting) >= MAX_WAITING_STEPS:
                raise RemoteProtocolError(
                    f"step {self._next_seq} never came, and {MAX_WAITING_STEPS} later ones are already waiting for it"
                )
            self._waiting[step.seq] = step
            return []
        return [self._accept(step), *self._accept_waiting()]

    def _accept_waiting(self) -> list[Compute]:
        actions: list[Compute] = []
        while (ready := self._waiting.get(self._next_seq)) is not None and ready.turn <= self.turn:
            del self._waiting[ready.seq]
            actions.append(self._accept(ready))
        return actions

    def on_park(self) -> None:
        """The head's answer is complete. Raises RemoteProtocolError when rows are still under way."""
        if self.is_parked or self._computing or any(step.turn <= self.turn for step in self._waiting.values()):
            raise RemoteProtocolError("the head parked a session that was parked already, or had rows under way")
        self.is_parked = True

    def on_resume(self, resume: Resume) -> list[Compute]:
        """The head's next turn begins. Steps of it that came before are taken up."""
        if not self.is_parked:
            raise RemoteProtocolError("the head resumed a session that was not parked")
        if not resume.top_k:
            raise RemoteProtocolError("the head resumed a session and wants no logits")
        self.is_parked = False
        self.turn += 1
        self.temperature, self.top_k = resume.temperature, resume.top_k
        return self._accept_waiting()

    @property
    def is_computing(self) -> bool:
        """Whether rows are under way here, other than those that wait for a step or a turn before theirs."""
        return bool(self._computing)

    def _accept(self, step: Step) -> Compute:
        if step.turn < self.turn or self.is_parked:
            raise RemoteProtocolError(f"step {step.seq} belongs to a turn that is over")
        if step.truncate_to is not None:
            if step.truncate_to > self.length:
                raise RemoteProtocolError(
                    f"step {step.seq} truncates to position {step.truncate_to}, but only {self.length} exist"
                )
            self.length = step.truncate_to
        if step.pos0 != self.length:
            raise RemoteProtocolError(
                f"step {step.seq} starts at position {step.pos0}, but the session stands at {self.length}"
            )
        if step.pos0 + step.n_rows > self.opening.n_ctx:
            raise RemoteProtocolError(
                f"step {step.seq} ends at position {step.pos0 + step.n_rows}, beyond the {self.opening.n_ctx} reserved"
            )
        self._check_rows(step)
        self._check_window(step)
        if len(step.checkpoints or ()) > self.n_checkpoints:
            raise RemoteProtocolError(f"step {step.seq} marks more than the {self.n_checkpoints} checkpoints granted")
        digest = self.input_hash.step(step.seq, step.pos0, step.n_rows, step.tokens, step.hidden)
        if step.running_hash is not None and step.running_hash != digest:
            raise RemoteProtocolError(f"the rows up to step {step.seq} are not the ones their sender hashed")
        self._next_seq = step.seq + 1
        self.length += step.n_rows
        self._computing[step.seq] = step
        self.work.add(step)
        self._bytes_in += len(step.tokens or b"") + len(step.hidden or b"")
        emits = step.flags & (Flag.EMIT | Flag.REPLAY) == Flag.EMIT and self.opening.returns is Returns.LOGITS
        return Compute(step, tuple(range(step.n_rows - step.n_outputs, step.n_rows)) if emits else ())

    def _check_window(self, step: Step) -> None:
        """What is kept of a session, computing or waiting for an earlier step, is at most its window."""
        under_way = sum(kept.n_rows for kept in (*self._computing.values(), *self._waiting.values()))
        if under_way + step.n_rows > self.window:
            raise RemoteProtocolError(f"step {step.seq} exceeds the window of {self.window} rows under way")

    def _check_rows(self, step: Step) -> None:
        if step.tokens is None and (self.takes_tokens or self.needs_tokens):
            raise RemoteProtocolError(f"step {step.seq} has no token ids, which this span needs")
        if self.takes_tokens:
            if step.hidden is not None:
                raise RemoteProtocolError(f"step {step.seq} has hidden states, which nothing comes before")
            return
        if step.hidden is None:
            raise RemoteProtocolError(f"step {step.seq} has no hidden states")
        if step.tokens is not None and not self.needs_tokens:
            raise RemoteProtocolError(f"step {step.seq} has token ids, which this span does not take")
        expected = step.n_rows * row_bytes(self.opening.dtype, self.row_width)
        if step.dtype is not self.opening.dtype or len(step.hidden) != expected:
            raise RemoteProtocolError(
                f"step {step.seq} carries {len(step.hidden)} bytes of {step.dtype}, but {step.n_rows} rows of width "
                f"{self.row_width} in {self.opening.dtype} were expected"
            )

    def on_computed(self, seq: int, hidden: bytes | None, rows: tuple[Row, ...]) -> list[Answer]:
        """The engine finished step `seq`: `hidden`, in the session's dtype, for the next span, or `rows` (top-k) for
        the head."""
        step = self._computing.pop(seq, None)
        if step is None:
            return []
        actions: list[Answer] = []
        if self.opening.returns is Returns.NEXT:
            assert hidden is not None
            tokens = step.tokens if self.needs_tokens else None
            digest = self.output_hash.step(seq, step.pos0, step.n_rows, tokens, hidden)
            dtype = self.opening.dtype
            actions.append(Forward(replace(step, tokens=tokens, dtype=dtype, hidden=hidden, running_hash=digest)))
            self._bytes_out += len(tokens or b"") + len(hidden)
        elif rows:
            self._last_result = (seq, len(rows))
            digest = self.output_hash.result(seq, rows)
            actions.append(Reply(Result(seq, rows, digest)))
            self._bytes_out += rows_bytes(rows)
        self._rows_computed += step.n_rows
        # Credit comes back in quarters of the window: beside the work, never once per token.
        if self._rows_computed - self._rows_credited >= max(1, self.window // 4):
            self._rows_credited = self._rows_computed
            actions.append(Reply(Credit(self._rows_computed)))
        return actions

    def check_full_row(self, seq: int, row: int) -> None:
        """Raises RemoteProtocolError unless step `seq` gave the latest result, it has such a row, and none is newer."""
        last_seq, n_rows = self._last_result or (None, 0)
        if seq != last_seq or row >= n_rows or self._computing:
            raise RemoteProtocolError(f"all logits of row {row} of step {seq} were asked for, which are not kept")
