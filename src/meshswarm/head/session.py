"""The head's side of one session over a route, as a state machine without I/O.

Messages and timer ticks go in with the time, actions come out. The rule this file keeps: one flight per span and
token. A decode step is sent the moment its token is known and waits for nothing but its own result: OPENED comes before
the first step, credit beside the results, receipts after the last one.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.span import Span
from meshswarm.stage.messages import (
    MAX_DRAFT,
    MAX_ROWS_PER_STEP,
    Cancel,
    Close,
    Counters,
    Credit,
    Dtype,
    Failed,
    Flag,
    FullRow,
    FullRowRequest,
    Message,
    Open,
    Opened,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Returns,
    Row,
    RowHash,
    Step,
)
from meshswarm.stage.profile import EXACT_MAX_ROWS, Profile
from meshswarm.stage.session import Work, rows_bytes

OPEN_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60.0  # no result and no credit for so long while rows are under way: somebody is stuck, not dead
CLOSE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Hop:
    """One span of the route: who computes which layers."""

    peer: PeerId
    addresses: tuple[Address, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Terms:
    """What the head asks every span of the route alike."""

    model_id: bytes
    n_layers: int
    n_embd: int
    n_ctx: int
    profile: Profile
    temperature: float
    top_k: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class ToSpan:
    """Send this message to span number `hop` of the route."""

    hop: int
    message: Message


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


Action = ToSpan | Ready | Rows | FullLogits | Receipt | Broken | Done


class State(Enum):
    OPENING = auto()
    READY = auto()
    CLOSING = auto()
    ENDED = auto()


@dataclass(slots=True)
class _HopState:
    opened: Opened | None = None
    credited: int = 0
    receipt_in: bool = False


class HeadSession:
    """One session over `hops`, which must cover `[0, n_layers)` without gap or overlap."""

    def __init__(
        self, session: bytes, head: PeerId, head_addresses: tuple[Address, ...], hops: tuple[Hop, ...], terms: Terms
    ) -> None:
        reached = 0
        for hop in hops:
            if hop.span.start != reached:
                raise ValueError(f"the route does not join at layer {reached}")
            reached = hop.span.stop
        if reached != terms.n_layers:
            raise ValueError(f"the route ends at layer {reached} of {terms.n_layers}")
        self.session = session
        self.hops = hops
        self.terms = terms
        self.state = State.OPENING
        self.length = 0  # positions sent so far
        self.flights = 0  # results that came back
        self._head = head
        self._head_addresses = head_addresses
        self._states = [_HopState() for _ in hops]
        self._queue: deque[Step] = deque()  # rows that wait for credit
        self._next_seq = 0
        self._sent = Work()
        self._result_bytes = 0
        self._awaiting: Step | None = None  # the step whose result is due
        self._last_result: Result | None = None
        self._deadline: float | None = None
        self.step_hash = RowHash(session, "step")
        self.result_hash = RowHash(session, "result")

    @property
    def chunk_rows(self) -> int:
        """Prefill goes in steps of at most so many rows."""
        return EXACT_MAX_ROWS if self.terms.profile is Profile.EXACT else MAX_ROWS_PER_STEP

    @property
    def deadline(self) -> float | None:
        """When `tick` wants to be called next, on the clock that `now` values come from."""
        return self._deadline

    def numclass(self, hop: int) -> str:
        """What span `hop` said it computes with."""
        opened = self._states[hop].opened
        return "" if opened is None else opened.numclass

    def counters(self, hop: int) -> Counters:
        """What the head itself counted as span `hop`'s work, by the same rule as the span, so that receipts agree."""
        hidden_bytes = self._sent.rows * self.terms.n_embd * 4
        is_last = hop == len(self.hops) - 1
        return self._sent.counters(
            bytes_in=self._sent.rows * 4 if hop == 0 else hidden_bytes,
            bytes_out=self._result_bytes if is_last else hidden_bytes,
        )

    # -- opening

    def start(self, now: float) -> list[Action]:
        """OPEN to every span at once."""
        if self.state is not State.OPENING:
            return []
        self._deadline = now + OPEN_TIMEOUT_S
        last = len(self.hops) - 1
        actions: list[Action] = []
        for index, hop in enumerate(self.hops):
            following = None if index == last else self.hops[index + 1]
            actions.append(
                ToSpan(
                    index,
                    Open(
                        session=self.session,
                        head=self._head,
                        head_addresses=self._head_addresses,
                        model_id=self.terms.model_id,
                        span=hop.span,
                        n_layers=self.terms.n_layers,
                        previous=None if index == 0 else self.hops[index - 1].peer,
                        next=None if following is None else following.peer,
                        next_addresses=() if following is None else following.addresses,
                        returns=Returns.LOGITS if following is None else Returns.NEXT,
                        dtype=Dtype.F32,
                        n_ctx=self.terms.n_ctx,
                        profile=self.terms.profile,
                        temperature=self.terms.temperature,
                        top_k=self.terms.top_k,
                        deadline_ms=self.terms.deadline_ms,
                    ),
                )
            )
        return actions

    # -- rows

    def push(self, tokens: list[int], now: float, *, truncate_to: int | None = None, n_draft: int = 0) -> list[Action]:
        """Send `tokens` at the next positions, in chunks; the last row's logits come back as `Rows`.

        `truncate_to` first takes the session back to that position; it travels with the rows and costs no flight.
        The last `n_draft` tokens are guesses, sent in one step with what leads to them: the logits of the row before
        them and of their own come back, and the next push may truncate into them.
        """
        if not 0 <= n_draft <= MAX_DRAFT or (n_draft and not n_draft < len(tokens) <= self.chunk_rows):
            raise ValueError(f"a draft of {n_draft} among {len(tokens)} tokens does not fit one step")
        if self.state is not State.READY or self._awaiting is not None:
            raise ValueError("rows can only be sent while the session is ready and no result is due")
        if truncate_to is not None:
            if not 0 <= truncate_to <= self.length:
                raise ValueError(f"cannot truncate to position {truncate_to}: the session stands at {self.length}")
            self.length = truncate_to
        if not tokens or self.length + len(tokens) > self.terms.n_ctx:
            raise ValueError(f"{len(tokens)} tokens do not fit the {self.terms.n_ctx} positions of the session")
        for start in range(0, len(tokens), self.chunk_rows):
            chunk = tokens[start : start + self.chunk_rows]
            final = start + len(chunk) == len(tokens)
            packed = struct.pack(f"<{len(chunk)}i", *chunk)
            step = Step(
                seq=self._next_seq,
                pos0=self.length,
                n_rows=len(chunk),
                truncate_to=truncate_to if start == 0 else None,
                flags=(Flag.EMIT if final else 0) | (Flag.DRAFT if n_draft else 0),
                tokens=packed,
                dtype=Dtype.F32,
                hidden=None,
                running_hash=self.step_hash.step(self._next_seq, self.length, len(chunk), packed, None),
                n_outputs=1 + n_draft,
            )
            self._queue.append(step)
            if final:
                self._awaiting = step
            self._next_seq += 1
            self.length += len(chunk)
        self._deadline = now + STALL_TIMEOUT_S
        return self._send_allowed()

    def _send_allowed(self) -> list[Action]:
        """As many waiting steps as the smallest window on the route has room for."""
        actions: list[Action] = []
        while self._queue:
            step = self._queue[0]
            room = min(
                state.opened.window - (self._sent.rows - state.credited)
                for state in self._states
                if state.opened is not None
            )
            if step.n_rows > room:
                break
            actions.append(ToSpan(0, self._queue.popleft()))
            self._sent.add(step)
        return actions

    def request_full_row(self, seq: int, row: int, now: float) -> list[Action]:
        """Ask the last span for all logits of the `row`-th row it returned for step `seq`, kept until the next step."""
        self._deadline = now + STALL_TIMEOUT_S
        return [ToSpan(len(self.hops) - 1, FullRowRequest(seq, row))]

    # -- what comes back

    def on_message(self, hop: int, message: Message, now: float) -> list[Action]:
        """A message from span `hop` arrived."""
        if self.state is State.ENDED:
            return []
        match message:
            case Opened():
                return self._on_opened(hop, message)
            case Refused():
                return self._break(self._refusal(hop, message))
            case Result():
                return self._on_result(hop, message, now)
            case Credit():
                state = self._states[hop]
                if not state.credited <= message.rows <= self._sent.rows:
                    return self._break(self._protocol_error(hop, "credited rows that were never sent"))
                state.credited = message.rows
                if self._awaiting is not None:
                    self._deadline = now + STALL_TIMEOUT_S
                return self._send_allowed()
            case FullRow():
                result = self._last_result
                is_of_result = result is not None and message.seq == result.seq and message.row < len(result.rows)
                if hop != len(self.hops) - 1 or not is_of_result:
                    return self._break(self._protocol_error(hop, "sent a full row nobody asked for"))
                return [FullLogits(message.seq, message.row, message.logits)]
            case Failed():
                blamed = self._blamed(hop, message.blamed)
                return self._break(
                    RemoteError(
                        f"peer {self.hops[hop].peer.short} (layers {self.hops[hop].span}) gave up: {message.message}",
                        peer=str(blamed),
                    )
                )
            case ReceiptOffer():
                return self._on_receipt(hop, message)
            case _:
                return self._break(self._protocol_error(hop, f"sent a {type(message).__name__}, which heads never get"))

    def _blamed(self, hop: int, named: PeerId | None) -> PeerId:
        """Whom a failed span may blame: a neighbour on the route. Anybody else is no excuse."""
        neighbours = (self.hops[at].peer for at in (hop - 1, hop + 1) if 0 <= at < len(self.hops))
        return named if named is not None and named in neighbours else self.hops[hop].peer

    def _on_opened(self, hop: int, opened: Opened) -> list[Action]:
        if self.state is not State.OPENING or self._states[hop].opened is not None:
            return self._break(self._protocol_error(hop, "opened the session twice"))
        if opened.window * 3 // 4 < self.chunk_rows:  # a span owes credit for up to a quarter of its window
            return self._break(self._protocol_error(hop, f"granted a window of only {opened.window} rows"))
        self._states[hop].opened = opened
        everyone = tuple(state.opened for state in self._states if state.opened is not None)
        if len(everyone) < len(self.hops):
            return []
        self.state = State.READY
        self._deadline = None
        return [Ready(everyone)]

    def _on_result(self, hop: int, result: Result, now: float) -> list[Action]:
        if hop != len(self.hops) - 1:
            return self._break(self._protocol_error(hop, "returned logits although it is not the last span"))
        due = self._awaiting
        if due is None or result.seq != due.seq or len(result.rows) != due.n_outputs:
            return self._break(self._protocol_error(hop, f"returned logits for step {result.seq}, which is not due"))
        digest = self.result_hash.result(result.seq, result.rows)
        if result.running_hash is not None and result.running_hash != digest:
            return self._break(self._protocol_error(hop, "returned other logits than it hashed"))
        self._result_bytes += rows_bytes(result.rows)
        self._awaiting = None
        self._last_result = result
        self.flights += 1
        self._deadline = None
        return [Rows(result.seq, result.rows)]

    # -- the end

    def close(self, now: float) -> list[Action]:
        """CLOSE to every span; their receipts come back as `Receipt`."""
        if self.state in (State.CLOSING, State.ENDED):
            return []
        if self.state is State.OPENING or self._awaiting is not None or self._queue:
            return self.cancel()
        self.state = State.CLOSING
        self._deadline = now + CLOSE_TIMEOUT_S
        return [ToSpan(index, Close()) for index in range(len(self.hops))]

    def cancel(self) -> list[Action]:
        """CANCEL to every span: work stops where it stands."""
        if self.state is State.ENDED:
            return []
        self.state = State.ENDED
        self._deadline = None
        self._queue.clear()
        return [*(ToSpan(index, Cancel()) for index in range(len(self.hops))), Done()]

    def _on_receipt(self, hop: int, offer: ReceiptOffer) -> list[Action]:
        state = self._states[hop]
        if self.state is not State.CLOSING or state.receipt_in:
            return self._break(self._protocol_error(hop, "sent a receipt that was not due"))
        state.receipt_in = True
        actions: list[Action] = [Receipt(hop, offer.receipt)]
        if all(each.receipt_in for each in self._states):
            self.state = State.ENDED
            self._deadline = None
            actions.append(Done())
        return actions

    def on_lost(self, hop: int, error: MeshswarmError | None) -> list[Action]:
        """The stream to span `hop` ended. `error` says why when it did not end in good order."""
        if self.state is State.ENDED:
            return []
        peer = self.hops[hop].peer
        if self.state is State.CLOSING:
            return self._give_up_receipt(hop)
        why = str(error) if error is not None else "it closed the session"
        return self._break(
            PeerUnreachableError(
                f"peer {peer.short}, which computes layers {self.hops[hop].span}, was lost: {why}", peer=str(peer)
            )
        )

    def _give_up_receipt(self, hop: int) -> list[Action]:
        self._states[hop].receipt_in = True
        if not all(state.receipt_in for state in self._states):
            return []
        self.state = State.ENDED
        self._deadline = None
        return [Done()]

    def tick(self, now: float) -> list[Action]:
        """Time passed. A deadline that is over breaks the session and names whom it waited for."""
        if self._deadline is None or now < self._deadline or self.state is State.ENDED:
            return []
        if self.state is State.CLOSING:
            self.state = State.ENDED
            self._deadline = None
            return [Done()]
        if self.state is State.OPENING:
            silent = next(hop for hop, state in zip(self.hops, self._states, strict=True) if state.opened is None)
            return self._break(
                PeerUnreachableError(
                    f"peer {silent.peer.short} did not open the session for layers {silent.span} within "
                    f"{OPEN_TIMEOUT_S:.0f} s",
                    peer=str(silent.peer),
                )
            )
        route = ", ".join(f"{hop.peer.short} {hop.span}" for hop in self.hops)
        return self._break(
            RemoteError(f"no answer for {STALL_TIMEOUT_S:.0f} s from a route whose peers are alive: {route}")
        )

    def _break(self, error: MeshswarmError) -> list[Action]:
        return [*self.cancel()[:-1], Broken(error), Done()]

    def _refusal(self, hop: int, refused: Refused) -> RemoteError:
        """The error names the peer to go round: the one that refused, or the one it cannot reach."""
        at = self.hops[hop]
        why = f"peer {at.peer.short} will not serve layers {at.span}: {refused.message}"
        if refused.reason is RefusalReason.NEXT_UNREACHABLE and hop + 1 < len(self.hops):
            return RemoteError(why, peer=str(self.hops[hop + 1].peer))
        return RefusedError(why, peer=str(at.peer), retry_after_s=refused.retry_after_ms / 1000)

    def _protocol_error(self, hop: int, what: str) -> RemoteProtocolError:
        peer = self.hops[hop].peer
        return RemoteProtocolError(f"peer {peer.short} (layers {self.hops[hop].span}) {what}", peer=str(peer))
