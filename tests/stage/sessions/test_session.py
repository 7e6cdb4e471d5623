"""The span's session state machine: what it accepts, what it refuses, when it credits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.errors import RemoteProtocolError
from meshswarm.identity import Identity
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import Credit, Dtype, Flag, Open, Returns, Row, RowHash, Step
from meshswarm.stage.sessions.session import Compute, Forward, Reply, SpanSession

HEAD = Identity.from_seed(bytes(32)).peer_id
N_EMBD = 4


def opening(span: Span = Span(0, 10), returns: Returns = Returns.NEXT, n_ctx: int = 64) -> Open:
    return Open(
        session=bytes(16), head=HEAD, head_addresses=(), model_id=bytes(32), span=span, n_layers=30,
        previous=None, next=None, next_addresses=(), returns=returns, dtype=Dtype.F32, n_ctx=n_ctx,
        profile=Profile.FAST, temperature=0.0, top_k=1, deadline_ms=60_000,
    )  # fmt: skip


def token_step(seq: int, pos0: int, n_rows: int = 1, truncate_to: int | None = None, flags: int = 0) -> Step:
    return Step(seq, pos0, n_rows, truncate_to, flags, bytes(4 * n_rows), Dtype.F32, None, None)


def hidden_step(seq: int, pos0: int, n_rows: int, n_bytes: int | None = None) -> Step:
    rows = bytes(n_rows * N_EMBD * 4 if n_bytes is None else n_bytes)
    return Step(seq, pos0, n_rows, None, 0, None, Dtype.F32, rows, None)


def first_span() -> SpanSession:
    return SpanSession(opening(), N_EMBD, window=32)


def test_rows_in_order_are_computed_and_forwarded_with_the_same_sequence_number() -> None:
    session = first_span()
    assert session.on_step(token_step(0, 0, 3)) == [Compute(token_step(0, 0, 3), ())]
    (forward,) = session.on_computed(0, bytes(3 * N_EMBD * 4), ())
    assert isinstance(forward, Forward)
    assert (forward.step.seq, forward.step.pos0, forward.step.n_rows) == (0, 0, 3)


def test_no_more_positions_can_be_marked_than_were_granted() -> None:
    session = SpanSession(opening(), N_EMBD, window=32, n_checkpoints=2)
    session.on_step(replace(token_step(0, 0, 3), checkpoints=(3,)))
    session.on_step(replace(token_step(1, 3, 3), checkpoints=(3, 6)))
    with pytest.raises(RemoteProtocolError, match="more than the 2 checkpoints granted"):
        session.on_step(replace(token_step(2, 6, 3), checkpoints=(3, 6, 9)))


def test_an_older_step_is_dropped_and_a_gap_waits() -> None:
    session = first_span()
    assert session.on_step(token_step(1, 2, 1)) == []
    computes = session.on_step(token_step(0, 0, 2))
    assert [action.step.seq for action in computes if isinstance(action, Compute)] == [0, 1]
    assert session.on_step(token_step(0, 0, 2)) == []
    assert session.length == 3


def test_a_gap_that_never_closes_is_refused() -> None:
    session = SpanSession(opening(), N_EMBD, window=128)
    with pytest.raises(RemoteProtocolError, match="step 0 never came"):
        for seq in range(1, 100):
            session.on_step(token_step(seq, seq))


def test_steps_that_wait_for_an_earlier_one_take_no_more_room_than_the_window() -> None:
    session = first_span()
    session.on_step(token_step(1, 16, 32))
    with pytest.raises(RemoteProtocolError, match="window of 32"):
        session.on_step(token_step(2, 48, 1))


def test_a_step_that_waits_is_looked_at_when_it_comes() -> None:
    session = SpanSession(opening(Span(10, 20)), N_EMBD, window=32)
    with pytest.raises(RemoteProtocolError, match="carries 1000000 bytes"):
        session.on_step(hidden_step(1, 0, 1, n_bytes=1_000_000))


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (token_step(0, 5), "starts at position 5"),
        (token_step(0, 0, truncate_to=1), "truncates to position 1"),
        (token_step(0, 0, 65), "beyond the 64 reserved"),
        (token_step(0, 0, 33), "exceeds the window"),
        (hidden_step(0, 0, 1), "no token ids"),
    ],
)
def test_steps_that_break_the_rules_are_refused(step: Step, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        first_span().on_step(step)


def test_hidden_states_of_another_width_are_refused() -> None:
    session = SpanSession(opening(Span(10, 20)), N_EMBD, window=32)
    with pytest.raises(RemoteProtocolError, match="carries 12 bytes"):
        session.on_step(hidden_step(0, 0, 1, n_bytes=12))
    with pytest.raises(RemoteProtocolError, match="no hidden states"):
        session.on_step(token_step(0, 0, 1))


def test_truncation_moves_the_session_back() -> None:
    session = first_span()
    session.on_step(token_step(0, 0, 8))
    session.on_computed(0, bytes(8 * N_EMBD * 4), ())
    session.on_step(token_step(1, 5, 1, truncate_to=5))
    assert session.length == 6


def test_rows_that_differ_from_their_running_hash_are_refused() -> None:
    honest = RowHash(bytes(16), "step").step(0, 0, 1, bytes(4), None)
    first_span().on_step(Step(0, 0, 1, None, 0, bytes(4), Dtype.F32, None, honest))
    with pytest.raises(RemoteProtocolError, match="not the ones their sender hashed"):
        first_span().on_step(Step(0, 0, 1, None, 0, b"\1\0\0\0", Dtype.F32, None, honest))


def test_the_last_span_returns_logits_of_the_emitting_row_only() -> None:
    session = SpanSession(opening(Span(0, 30), Returns.LOGITS), N_EMBD, window=32)
    (compute,) = session.on_step(token_step(0, 0, 3, flags=Flag.EMIT))
    assert isinstance(compute, Compute)
    assert compute.output_rows == (2,)
    row = Row(np.array([7], "<i4").tobytes(), np.array([1.5], "<f4").tobytes(), -2.0)
    (reply,) = session.on_computed(0, None, (row,))
    assert isinstance(reply, Reply)
    (quiet,) = session.on_step(token_step(1, 3, 2))
    assert isinstance(quiet, Compute)
    assert quiet.output_rows == ()
    assert session.on_computed(1, None, ()) == []


def test_a_draft_returns_the_logits_of_its_rows_and_of_the_one_that_leads_to_it() -> None:
    session = SpanSession(opening(Span(0, 30), Returns.LOGITS), N_EMBD, window=32)
    (compute,) = session.on_step(replace(token_step(0, 0, 5, flags=Flag.EMIT | Flag.DRAFT), n_outputs=4))
    assert isinstance(compute, Compute)
    assert compute.output_rows == (1, 2, 3, 4)
    row = Row(bytes(4), bytes(4), 0.0)
    session.on_computed(0, None, (row,) * 4)
    session.check_full_row(0, 3)
    with pytest.raises(RemoteProtocolError, match="row 4 of step 0"):
        session.check_full_row(0, 4)


def test_how_much_of_a_draft_was_accepted_is_told_by_the_next_step_alone() -> None:
    session = SpanSession(opening(), N_EMBD, window=64)
    draft = Flag.EMIT | Flag.DRAFT
    session.on_step(token_step(0, 0, 10))
    session.on_step(replace(token_step(1, 10, 4, flags=draft), n_outputs=4))  # guesses at 11, 12, 13
    session.on_step(replace(token_step(2, 12, 3, truncate_to=12, flags=draft), n_outputs=3))  # one was right; 13, 14
    session.on_step(replace(token_step(3, 2, 3, truncate_to=2, flags=draft), n_outputs=3))  # none was
    session.on_step(replace(token_step(4, 5, 2, flags=draft), n_outputs=2))  # both were, and the last stays open
    counters = session.counters
    assert (counters.prefill_rows, counters.decode_rows) == (10, 12)
    assert (counters.drafted_rows, counters.accepted_rows) == (3 + 2 + 2 + 1, 1 + 0 + 2)


def test_a_span_in_the_middle_hands_a_draft_on_as_it_came() -> None:
    session = first_span()
    step = replace(token_step(0, 0, 3, flags=Flag.EMIT | Flag.DRAFT), n_outputs=3)
    assert session.on_step(step) == [Compute(step, ())]
    (forward,) = session.on_computed(0, bytes(3 * N_EMBD * 4), ())
    assert isinstance(forward, Forward)
    assert (forward.step.flags, forward.step.n_outputs, forward.step.tokens) == (step.flags, 3, None)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40))
def test_credit_accounts_for_every_row_and_never_comes_per_token(sizes: list[int]) -> None:
    session = SpanSession(opening(n_ctx=10_000), N_EMBD, window=32)
    position, credits = 0, []
    for seq, size in enumerate(sizes):
        session.on_step(token_step(seq, position, size))
        position += size
        for action in session.on_computed(seq, bytes(size * N_EMBD * 4), ()):
            if isinstance(action, Reply) and isinstance(action.message, Credit):
                credits.append(action.message.rows)
    assert credits == sorted(credits)
    assert position - (credits[-1] if credits else 0) < 32 // 4 + 8
    assert len(credits) <= position // 8
    assert session.counters.prefill_rows + session.counters.decode_rows == position


def test_a_full_row_is_given_for_the_latest_result_only() -> None:
    session = SpanSession(opening(Span(0, 30), Returns.LOGITS), N_EMBD, window=32)
    with pytest.raises(RemoteProtocolError, match="not kept"):
        session.check_full_row(0, 0)
    session.on_step(token_step(0, 0, 1, flags=Flag.EMIT))
    session.on_computed(0, None, (Row(bytes(4), bytes(4), 0.0),))
    session.check_full_row(0, 0)
    session.on_step(token_step(1, 1, 1))
    with pytest.raises(RemoteProtocolError, match="not kept"):
        session.check_full_row(0, 0)


def test_replayed_rows_are_computed_but_emit_nothing() -> None:
    session = SpanSession(opening(Span(0, 30), Returns.LOGITS), N_EMBD, window=32)
    (compute,) = session.on_step(token_step(0, 0, 3, flags=Flag.EMIT | Flag.REPLAY))
    assert isinstance(compute, Compute)
    assert compute.output_rows == ()
