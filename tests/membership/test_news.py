"""Question and answer between members: what is told to whom, and how far it is believed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.handover import Receiver, parcel_of
from meshswarm.membership.member_list import MAX_EXPELLED, MAX_HOLDERS
from meshswarm.membership.news import (
    MAX_ANSWER_BYTES,
    MAX_NAMED,
    MAX_QUESTION_BYTES,
    Answer,
    Question,
    answer_to,
    learned,
)
from meshswarm.membership.standing import Standing

OWNER, MALLORY = (Identity.from_seed(letter * 32) for letter in (b"o", b"m"))
ALICE, BOB, CAROL = (Identity.from_seed(letter * 32).peer_id for letter in (b"a", b"b", b"c"))
KEY, SECOND, FORGED = b"1" * 32, b"2" * 32, b"f" * 32
NOW = 10**12
OLD = Standing("office", OWNER.peer_id, KEY, (KEY,))
NEW = OLD.rotated(OWNER, SECOND, NOW)
STRICT = OLD.expelling(OWNER, [CAROL], NOW).rotated(OWNER, SECOND, NOW, only=[ALICE, BOB])


def ask(
    asker: Standing, answerer: Standing, *, peer: PeerId = BOB, wants_members: bool = False
) -> tuple[Answer, Standing]:
    """What ALICE, who stands as `answerer`, tells `peer`, and where that leaves it."""
    receiver = Receiver(peer, ALICE)
    question = Question.about(asker, receiver, wants_members=wants_members).pack()
    assert len(question) <= MAX_QUESTION_BYTES
    answer = answer_to(Question.unpack(question), peer, ALICE, answerer, [BOB, CAROL], NOW).pack()
    assert len(answer) <= MAX_ANSWER_BYTES
    read = Answer.unpack(answer)
    return read, learned(read, asker, receiver)


@pytest.mark.parametrize("answerer", [NEW, STRICT])
def test_a_member_that_was_away_gets_list_and_key(answerer: Standing) -> None:
    _, after = ask(OLD, answerer)
    assert after == answerer and after.current_keys(NOW) == (SECOND, KEY)


@pytest.mark.parametrize(("asker", "answerer"), [(OLD, OLD), (NEW, NEW), (NEW, OLD), (STRICT, NEW)])
def test_who_knows_as_much_or_more_is_told_nothing(asker: Standing, answerer: Standing) -> None:
    answer, after = ask(asker, answerer)
    assert answer == Answer(answerer.number) and after == asker


def test_the_key_goes_to_nobody_whom_the_list_does_not_name() -> None:
    for stranger in (CAROL, MALLORY.peer_id):
        answer, after = ask(OLD, STRICT, peer=stranger)
        assert not answer.parcel and after.is_behind and after.current_keys(NOW) == (KEY,)


def test_who_has_not_the_new_key_itself_passes_the_list_on() -> None:
    assert NEW.members is not None
    behind = OLD.with_list(NEW.members)
    answer, after = ask(OLD, behind)
    assert answer.listed and not answer.parcel and after.is_behind


def test_two_lists_of_one_number_end_in_one() -> None:
    other = OLD.rotated(OWNER, b"3" * 32, NOW)
    _, one = ask(NEW, other)
    _, two = ask(other, NEW)
    assert one.members == two.members and one.members is not None


def test_a_key_or_list_that_the_owner_did_not_sign_is_not_believed() -> None:
    forged = OLD.rotated(MALLORY, FORGED, NOW)
    receiver = Receiver(BOB, ALICE)
    parcel = parcel_of([FORGED], ALICE, BOB, receiver.half)
    assert learned(Answer(9, b"", parcel), OLD, receiver) == OLD
    assert learned(Answer(9, b"", parcel), NEW, receiver) == NEW
    for listed in (forged.members.wire if forged.members else b"", b"nonsense"):
        with pytest.raises(WireError):
            learned(Answer(9, listed, parcel), OLD, receiver)
    with pytest.raises(WireError, match="cannot be opened"):
        learned(Answer(9, b"", parcel), OLD, Receiver(BOB, ALICE))


def test_members_are_named_on_request_only_and_never_the_asker() -> None:
    assert ask(OLD, OLD)[0].named == ()
    assert ask(OLD, OLD, wants_members=True)[0].named == (CAROL,)


def test_the_largest_answer_fits() -> None:
    many = [PeerId(n.to_bytes(32)) for n in range(MAX_HOLDERS)]
    large = OLD.expelling(OWNER, many[:MAX_EXPELLED], NOW).rotated(OWNER, SECOND, NOW, only=[BOB, *many[MAX_EXPELLED:]])
    question = Question.about(OLD, Receiver(BOB, ALICE), wants_members=True)
    answer = answer_to(question, BOB, ALICE, large, many, NOW)
    assert answer.parcel and len(answer.named) == MAX_NAMED and len(answer.pack()) <= MAX_ANSWER_BYTES
    assert Answer.unpack(answer.pack()) == answer


@settings(deadline=None)
@given(data=st.binary(max_size=300))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    for read in (Question.unpack, Answer.unpack):
        with pytest.raises(WireError):
            read(data)


def test_a_half_of_low_order_is_refused() -> None:
    question = Question(0, bytes(16), bytes(16), bytes(32), False)
    with pytest.raises(WireError, match="half"):
        answer_to(question, BOB, ALICE, NEW, [], NOW)
