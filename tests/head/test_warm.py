"""Which kept session a prompt goes on from: the one that saves the most, whole, copied or cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshswarm.head.history import History
from meshswarm.head.warm import MAX_CUT_OFF, MAX_WARM, MAX_WARM_S, MIN_TAKEN_OVER, Likeness, WarmSessions
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import Dtype

LIKE = Likeness(bytes(32), Profile.FAST, Dtype.F32)
SYSTEM = list(range(1000, 1200))


@dataclass
class Session:
    """A session that holds `steps`."""

    steps: tuple[list[int], ...]
    rollback: Rollback = Rollback.KV
    is_parked: bool = True
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        for tokens in self.steps:
            self.history.add(tokens)


def pool(*sessions: Session) -> WarmSessions[Session]:
    warm: WarmSessions[Session] = WarmSessions()
    for session in sessions:
        assert warm.keep(session, LIKE, 4096, 0.0) == []
    return warm


def test_the_next_turn_goes_on_from_its_own_conversation_and_takes_it() -> None:
    other, own = Session((SYSTEM, [1, 2, 3])), Session((SYSTEM, [4, 5, 6]))
    warm = pool(own, other)
    found = warm.take({LIKE}, [*SYSTEM, 4, 5, 6, 7], 100)
    assert found is not None
    assert (found.session, found.n_positions, found.n_cut_off) == (own, 203, 0)
    assert not found.wants_copy
    assert warm.take({LIKE}, [*SYSTEM, 4, 5, 6, 7], 100).session is other  # type: ignore[union-attr]
    assert warm.take({LIKE}, [*SYSTEM, 4, 5, 6, 7], 100) is None


def test_of_two_that_save_as_much_the_one_that_loses_less_is_taken() -> None:
    long, short = Session((SYSTEM, [1] * 60)), Session((SYSTEM, [2] * 5))
    found = pool(long, short).take({LIKE}, [*SYSTEM, 3], 100)
    assert found is not None
    assert found.session is short


def test_a_conversation_that_would_lose_much_is_copied_and_cut_only_for_more_than_it_loses() -> None:
    answer = [7] * (MAX_CUT_OFF + 1)
    found = pool(Session((SYSTEM, answer))).take({LIKE}, [*SYSTEM, 3], 100)
    assert found is not None
    assert found.wants_copy
    assert found.may_be_cut, "200 positions saved, 65 lost"
    found = pool(Session((SYSTEM, [7] * 300))).take({LIKE}, [*SYSTEM, 3], 100)
    assert found is not None
    assert found.wants_copy
    assert not found.may_be_cut


def test_unlike_sessions_short_ones_and_those_that_share_too_little_are_left_alone() -> None:
    warm = pool(Session((SYSTEM,)))
    assert warm.take({Likeness(b"\1" * 32, Profile.FAST, Dtype.F32)}, [*SYSTEM, 1], 100) is None
    assert warm.take({Likeness(bytes(32), Profile.EXACT, Dtype.F32)}, [*SYSTEM, 1], 100) is None
    assert warm.take({Likeness(bytes(32), Profile.FAST, Dtype.F16)}, [*SYSTEM, 1], 100) is None
    assert warm.take({LIKE}, [*SYSTEM, 1], 4097) is None
    assert warm.take({LIKE, Likeness(bytes(32), Profile.FAST, Dtype.F16)}, [*SYSTEM, 1], 4096) is not None
    few = SYSTEM[: MIN_TAKEN_OVER - 1]
    assert pool(Session((few, [5]))).take({LIKE}, [*few, 6], 100) is None


def test_what_spans_have_let_go_is_not_offered() -> None:
    session = Session((SYSTEM,))
    warm = pool(session)
    assert len(warm) == 1
    session.is_parked = False
    assert len(warm) == 0
    assert warm.take({LIKE}, [*SYSTEM, 1], 100) is None
    assert not warm.remove(session)


def test_a_running_state_is_gone_on_from_at_its_very_end_only() -> None:
    session = Session((SYSTEM, [1, 2]), rollback=Rollback.STATE)
    assert pool(session).take({LIKE}, [*SYSTEM, 1, 3], 100) is None
    assert pool(session).take({LIKE}, [*SYSTEM, 1, 2, 3], 100) is not None


def test_too_many_and_too_old_sessions_are_handed_back_to_be_closed() -> None:
    sessions = [Session((SYSTEM, [number])) for number in range(MAX_WARM + 1)]
    warm: WarmSessions[Session] = WarmSessions()
    closed = [warm.keep(session, LIKE, 4096, float(number)) for number, session in enumerate(sessions)]
    assert closed == [[]] * MAX_WARM + [[sessions[0]]]
    assert warm.next_expiry == 1.0 + MAX_WARM_S
    assert warm.expire(1.5 + MAX_WARM_S) == [sessions[1]]
    assert warm.drop_all() == sessions[2:]
    assert warm.next_expiry is None
