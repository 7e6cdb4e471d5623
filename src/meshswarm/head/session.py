"""The head's side of one session over a route, as a state machine without I/O.

Messages and timer ticks go in with the time, actions come out. The rule this file keeps: one flight per span and
token. A decode step is sent the moment its token is known and waits for nothing but its own result: OPENED comes before
the first step, credit beside the results, receipts after the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from meshswarm.config import Address
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteError, RemoteProtocolError
from meshswarm.head.history import History
from meshswarm.head.link_speed import LinkSpeed
from meshswarm.head.outbox import Outbox
from meshswarm.head.session_actions import (
    Action,
    Broken,
    Done,
    FullLogits,
    Hop,
    InLine,
    Origin,
    Ready,
    Receipt,
    Rows,
    Terms,
    ToSpan,
)
from meshswarm.head.step_times import StepTimes
from meshswarm.identity import PeerId
from meshswarm.routing.prompt_time import MIN_CHUNK_ROWS, Pace, max_chunk_rows
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import (
    Cancel,
    Close,
    Counters,
    Credit,
    Failed,
    Fork,
    FullRow,
    FullRowRequest,
    Message,
    Open,
    Opened,
    Park,
    ReceiptOffer,
    RefusalReason,
    Refused,
    Result,
    Resume,
    Returns,
    RowHash,
    Step,
    Waiting,
)
from meshswarm.stage.sessions.rows_codec import row_bytes
from meshswarm.stage.sessions.session import rows_bytes

OPEN_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 60.0  # no result and no credit for so long while rows are under way: somebody is stuck, not dead
CLOSE_TIMEOUT_S = 3.0


class State(Enum):
    OPENING = auto()
    READY = auto()
    PARKED = auto()
    CLOSING = auto()
    ENDED = auto()


@dataclass(slots=True)
class _HopState:
    is_asked: bool = False
    opened: Opened | None = None
    credited: int = 0
    receipt_in: bool = False
    parked: Counters | None = None  # its work when it was parked, where it will not tell of more


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt under way, in steps of `size`."""

    n_rows: int
    size: int
    began: float


class HeadSession:
    """One session over `hops`, which must cover `[0, n_layers)` without gap or overlap.

    `route`: how fast each span works on a prompt, empty when nobody knows; `link`: how fast rows travel between them,
    as far as this route's prompts have told. `origin`: begin as a copy of that session.
    """

    def __init__(
        self,
        session: bytes,
        head: PeerId,
        head_addresses: tuple[Address, ...],
        hops: tuple[Hop, ...],
        terms: Terms,
        *,
        route: Sequence[Pace] = (),
        link: LinkSpeed | None = None,
        origin: Origin | None = None,
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
        self.route = route
        self.link = link or LinkSpeed()
        self.state = State.OPENING
        self.flights = 0  # results that came back
        self.step_times = StepTimes()
        self._head = head
        self._head_addresses = head_addresses
        self._origin = origin
        self._states = [_HopState() for _ in hops]
        self._to_ask: deque[int] = deque()
        self._wait_until = 0.0
        history = History() if origin is None else origin.history
        self._outbox = Outbox(session, terms.n_ctx, terms.profile, route, history)
        self._row_bytes = row_bytes(terms.dtype, terms.row_width)
        self._prompt: _Prompt | None = None
        self._decoding: tuple[int, float] | None = None  # rows of the decode step under way, and when it was sent
        self._result_bytes = 0
        self._awaiting: Step | None = None  # the step whose result is due
        self._last_result: Result | None = None
        self._deadline: float | None = None
        self._result_hash = RowHash(session, "result")

    @property
    def length(self) -> int:
        """Positions sent so far."""
        return self._outbox.length

    @property
    def history(self) -> History:
        """What the session holds."""
        return self._outbox.history

    @property
    def rollback(self) -> Rollback:
        """How the weakest span of the route takes rows back."""
        rollbacks = [state.opened.rollback for state in self._states if state.opened is not None]
        return Rollback.STATE if Rollback.STATE in rollbacks else Rollback.KV

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
        parked = self._states[hop].parked
        if parked is not None:
            return parked
        work, is_last = self._outbox.sent, hop == len(self.hops) - 1
        with_tokens = any(state.opened is not None and state.opened.needs_tokens for state in self._states)
        hidden_bytes = work.rows * (self._row_bytes + (4 if with_tokens else 0))
        return work.counters(
            bytes_in=work.rows * 4 if hop == 0 else hidden_bytes,
            bytes_out=self._result_bytes if is_last else hidden_bytes,
        )

    # -- opening

    def start(self, now: float) -> list[Action]:
        """OPEN to every span at once. A session that may stand in line asks one after another, everywhere in the order
        of the peers' keys: two heads that hold what the other one waits for would wait for ever."""
        if self.state is not State.OPENING:
            return []
        if not self.terms.max_wait_ms:
            self._deadline = now + OPEN_TIMEOUT_S
            return [self._ask(hop, 0) for hop in range(len(self.hops))]
        self._wait_until = now + self.terms.max_wait_ms / 1000
        self._to_ask.extend(sorted(range(len(self.hops)), key=lambda hop: self.hops[hop].peer.key))
        return self._ask_next(now)

    def _ask_next(self, now: float) -> list[Action]:
        if not self._to_ask:
            return []
        left_s = max(0.0, self._wait_until - now)
        self._deadline = now + left_s + OPEN_TIMEOUT_S
        return [self._ask(self._to_ask.popleft(), int(left_s * 1000))]

    def _ask(self, index: int, max_wait_ms: int) -> ToSpan:
        self._states[index].is_asked = True
        is_last = index == len(self.hops) - 1
        following = None if is_last else self.hops[index + 1]
        origin = self._origin
        return ToSpan(
            index,
            Open(
                session=self.session,
                head=self._head,
                head_addresses=self._head_addresses,
                model_id=self.terms.model_id,
                span=self.hops[index].span,
                n_layers=self.terms.n_layers,
                previous=None if index == 0 else self.hops[index - 1].peer,
                next=None if following is None else following.peer,
                next_addresses=() if following is None else following.addresses,
                returns=Returns.LOGITS if following is None else Returns.NEXT,
                dtype=self.terms.dtype,
                n_ctx=self.terms.n_ctx,
                profile=self.terms.profile,
                temperature=self.terms.temperature,
                top_k=self.terms.top_k,
                deadline_ms=self.terms.deadline_ms,
                max_wait_ms=max_wait_ms,
                fork=None if origin is None else Fork(origin.session, len(origin.history.tokens)),
            ),
        )

    # -- rows

    def push(self, tokens: list[int], now: float, *, truncate_to: int | None = None, n_draft: int = 0) -> list[Action]:
        """Send `tokens` at the next positions, in chunks; the last row's logits come back as `Rows`.

        `truncate_to` first takes the session back to that position; it travels with the rows and costs no flight.
        The last `n_draft` tokens are guesses, sent in one step with what leads to them: the logits of the row before
        them and of their own come back, and the next push may truncate into them.
        """
        if self.state is not State.READY or self._awaiting is not None:
            raise ValueError("rows can only be sent while the session is ready and no result is due")
        size = self._outbox.chunk_rows(len(tokens), self.link.byte_s * self._row_bytes)
        self._awaiting = self._outbox.push(tokens, truncate_to, n_draft, size)
        is_prompt = len(tokens) > MIN_CHUNK_ROWS and not n_draft
        self._prompt = _Prompt(len(tokens), size, now) if is_prompt else None
        is_plain = truncate_to is None or self.rollback is not Rollback.STATE  # going back may mean to compute again
        is_decode = is_plain and len(tokens) == 1 + n_draft and self._last_result is not None
        self._decoding = (len(tokens), now) if is_decode else None
        self._deadline = now + STALL_TIMEOUT_S
        return self._send_allowed()

    def _send_allowed(self) -> list[Action]:
        """As many waiting steps as the smallest window on the route has room for."""
        if not self._outbox:
            return []
        windows = (
            state.opened.window - (self._outbox.sent.rows - state.credited)
            for state in self._states
            if state.opened is not None
        )
        return [ToSpan(0, step) for step in self._outbox.allowed(min(windows))]

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
                return self._on_opened(hop, message, now)
            case Waiting():
                return self._on_waiting(hop, message)
            case Refused():
                return self._break(self._refusal(hop, message))
            case Result():
                return self._on_result(hop, message, now)
            case Credit():
                state = self._states[hop]
                if not state.credited <= message.rows <= self._outbox.sent.rows:
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
            case Failed() if self.state in (State.PARKED, State.CLOSING):
                return self._on_gone(hop, None, now)
            case Failed():
                blamed = self._blamed(hop, message.blamed)
                return self._break(
                    RemoteError(
                        f"peer {self.hops[hop].peer.short} (layers {self.hops[hop].span}) gave up: {message.message}",
                        peer=str(blamed),
                    )
                )
            case ReceiptOffer():
                return self._on_receipt(hop, message, now)
            case _:
                return self._break(self._protocol_error(hop, f"sent a {type(message).__name__}, which heads never get"))

    def _blamed(self, hop: int, named: PeerId | None) -> PeerId:
        """Whom a failed span may blame: a neighbour on the route. Anybody else is no excuse."""
        neighbours = (self.hops[at].peer for at in (hop - 1, hop + 1) if 0 <= at < len(self.hops))
        return named if named is not None and named in neighbours else self.hops[hop].peer

    def _on_opened(self, hop: int, opened: Opened, now: float) -> list[Action]:
        state = self._states[hop]
        if self.state is not State.OPENING or state.opened is not None or not state.is_asked:
            return self._break(self._protocol_error(hop, "opened the session twice"))
        if opened.window * 3 // 4 < max_chunk_rows(self.terms.profile):  # up to a quarter of it may be owed in credit
            return self._break(self._protocol_error(hop, f"granted a window of only {opened.window} rows"))
        state.opened = opened
        everyone = tuple(state.opened for state in self._states if state.opened is not None)
        if len(everyone) < len(self.hops):
            return self._ask_next(now)
        self.state = State.READY
        self._deadline = None
        if self.rollback is Rollback.STATE:
            self._outbox.n_checkpoints = min(span.n_checkpoints for span in everyone)
        return [Ready(everyone)]

    def _on_waiting(self, hop: int, waiting: Waiting) -> list[Action]:
        is_due = self.state is State.OPENING and self._states[hop].opened is None and self.terms.max_wait_ms > 0
        if not is_due:
            return self._break(self._protocol_error(hop, "let the session wait, which it was not asked to"))
        return [InLine(hop, waiting.place, waiting.estimate_ms / 1000)]

    def _on_result(self, hop: int, result: Result, now: float) -> list[Action]:
        if hop != len(self.hops) - 1:
            return self._break(self._protocol_error(hop, "returned logits although it is not the last span"))
        due = self._awaiting
        if due is None or result.seq != due.seq or len(result.rows) != due.n_outputs:
            return self._break(self._protocol_error(hop, f"returned logits for step {result.seq}, which is not due"))
        digest = self._result_hash.result(result.seq, result.rows)
        if result.running_hash is not None and result.running_hash != digest:
            return self._break(self._protocol_error(hop, "returned other logits than it hashed"))
        self._result_bytes += rows_bytes(result.rows)
        self._awaiting = None
        if self._prompt is not None:
            sent, self._prompt = self._prompt, None
            self.link.note(now - sent.began, sent.n_rows, sent.size, self.route, self._row_bytes)
        if self._decoding is not None:
            (n_rows, sent_at), self._decoding = self._decoding, None
            self.step_times.note(n_rows, now - sent_at)
        self._last_result = result
        for state in self._states:
            state.parked = None
        self.flights += 1
        self._deadline = None
        return [Rows(result.seq, result.rows)]

    # -- between two turns

    def park(self) -> list[Action]:
        """The answer is complete: every span keeps the session until it needs the room, or until the next turn."""
        if self.state is not State.READY or self._awaiting is not None:
            raise ValueError("only a session that is ready and waits for nothing can be parked")
        self.state = State.PARKED
        self._deadline = None
        return [ToSpan(index, Park()) for index in range(len(self.hops))]

    def resume(self, temperature: float, top_k: int, deadline_ms: int) -> list[Action]:
        """The next turn begins, with its own terms. Rows may follow at once."""
        if self.state is not State.PARKED:
            raise ValueError("only a parked session can be resumed")
        for hop, state in enumerate(self._states):
            state.parked = self.counters(hop)
        self.state = State.READY
        self._outbox.turn += 1
        return [ToSpan(index, Resume(temperature, top_k, deadline_ms)) for index in range(len(self.hops))]

    # -- the end

    def close(self, now: float) -> list[Action]:
        """CLOSE to every span; their receipts come back as `Receipt`."""
        if self.state in (State.CLOSING, State.ENDED):
            return []
        if self.state is State.OPENING or self._awaiting is not None:
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
        self._outbox.clear()
        asked = [index for index, state in enumerate(self._states) if state.is_asked]
        return [*(ToSpan(index, Cancel()) for index in asked), Done()]

    def _on_receipt(self, hop: int, offer: ReceiptOffer, now: float) -> list[Action]:
        if self.state is State.PARKED or self._is_turn_unheard:
            return self._on_gone(hop, offer, now)
        if self.state is not State.CLOSING or self._states[hop].receipt_in:
            return self._break(self._protocol_error(hop, "sent a receipt that was not due"))
        return self._on_gone(hop, offer, now)

    @property
    def _is_turn_unheard(self) -> bool:
        """A parked session was resumed, and nothing shows yet that every span still has it."""
        return self.state is State.READY and self._outbox.turn > 0 and self._states[0].parked is not None

    def _on_gone(self, hop: int, offer: ReceiptOffer | None, now: float) -> list[Action]:
        """A span ended its part, with a receipt or (`offer` None) without. When it did so unasked, because it needed
        the room of a parked session or was lost, the others are closed too, for their receipts."""
        actions: list[Action] = [] if offer is None else [Receipt(hop, offer.receipt)]
        if self.state is not State.CLOSING:
            is_broken = self.state is State.READY
            self.state = State.CLOSING
            self._deadline = now + CLOSE_TIMEOUT_S
            self._awaiting = None
            self._outbox.clear()
            actions += [ToSpan(other, Close()) for other in range(len(self.hops)) if other != hop]
            if is_broken:
                for heard in self._states[:hop]:  # the others' work ends before the turn that was resumed in vain
                    heard.parked = None
                peer = self.hops[hop].peer
                actions.append(
                    Broken(RemoteError(f"peer {peer.short} needed the room of a parked session", peer=str(peer)))
                )
        self._states[hop].receipt_in = True
        if all(state.receipt_in for state in self._states):
            self.state = State.ENDED
            self._deadline = None
            actions.append(Done())
        return actions

    def on_lost(self, hop: int, error: MeshswarmError | None, now: float) -> list[Action]:
        """The stream to span `hop` ended. `error` says why when it did not end in good order."""
        if self.state is State.ENDED:
            return []
        if self.state in (State.PARKED, State.CLOSING):
            return self._on_gone(hop, None, now)
        peer = self.hops[hop].peer
        why = str(error) if error is not None else "it closed the session"
        return self._break(
            PeerUnreachableError(
                f"peer {peer.short}, which computes layers {self.hops[hop].span}, was lost: {why}", peer=str(peer)
            )
        )

    def tick(self, now: float) -> list[Action]:
        """Time passed. A deadline that is over breaks the session and names whom it waited for."""
        if self._deadline is None or now < self._deadline or self.state is State.ENDED:
            return []
        if self.state is State.CLOSING:
            self.state = State.ENDED
            self._deadline = None
            return [Done()]
        if self.state is State.OPENING:
            silent = next(
                hop
                for hop, state in zip(self.hops, self._states, strict=True)
                if state.is_asked and state.opened is None
            )
            waited_s = OPEN_TIMEOUT_S + self.terms.max_wait_ms / 1000
            return self._break(
                PeerUnreachableError(
                    f"peer {silent.peer.short} did not open the session for layers {silent.span} within "
                    f"{waited_s:.0f} s",
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
