"""Whom to ask alone, and who is a liar."""

from __future__ import annotations

import itertools

from meshswarm.artifacts.torrent.blame import ASK_AT_ONCE, SILENT_FOR_S, Blame, Question, hosts_to_refuse

A, B, C = ("10.0.0.1", 1), ("10.0.0.1", 2), ("10.0.0.2", 1)


def blame_of(*members: tuple[str, int]) -> Blame:
    blame = Blame()
    for member in members:
        assert blame.add(member)
    return blame


def test_one_member_is_asked_at_a_time_and_a_liar_never_again() -> None:
    blame = blame_of(A, B)
    first = blame.next_question({5, 3}, 0.0)
    assert first == Question(A, (3, 5), is_brief=True)
    blame.lied(A, 3)
    assert blame.liars == {A} and blame.trusted == [B]
    assert not blame.add(A)
    assert blame.next_question({3}, 1.0) == Question(B, (3,))
    blame.lied(B, 3)
    assert blame.next_question({3}, 1.0) is None


def test_who_gave_right_pieces_is_asked_last() -> None:
    blame = blame_of(A, B)
    blame.gave(A)
    question = blame.next_question({1}, 0.0)
    assert question is not None and question.member == B


def test_who_is_silent_is_asked_again_later() -> None:
    blame = blame_of(A, B)
    blame.silent(A, "does not answer", 0.0)
    question = blame.next_question({1}, 1.0)
    assert question is not None and question.member == B
    blame.silent(B, "does not answer", 1.0)
    assert blame.next_question({1}, 2.0) is None
    question = blame.next_question({1}, SILENT_FOR_S)
    assert question is not None and question.member == A


def test_many_that_say_nothing_keep_nobody_from_those_who_give() -> None:
    """Twenty that accept connections and send nothing, each question to one of which takes 8 s."""
    silent = [("10.0.0.1", port) for port in range(1, 21)]
    blame = blame_of(*silent, B)
    blame.gave(B)
    now, given_at = 0.0, [0.0]
    while now < 600.0:
        question = blame.next_question({1}, now)
        assert question is not None
        if question.member == B:
            blame.gave(B)
            now += 0.5
            given_at.append(now)
        else:
            now += 8.0
            blame.silent(question.member, "does not answer", now)
    assert max(later - earlier for earlier, later in itertools.pairwise(given_at)) < 10.0
    assert len(given_at) > 300, "who is silent again and again is asked less and less"


def test_who_is_silent_is_asked_anew_where_nobody_else_is_left() -> None:
    blame, now = blame_of(A), 0.0
    for _ in range(4):
        blame.silent(A, "does not answer", now)
        assert blame.next_question({1}, now + SILENT_FOR_S - 1.0) is None
        now += SILENT_FOR_S
        assert blame.next_question({1}, now) == Question(A, (1,))


def test_nothing_in_doubt_is_no_question_and_many_doubts_are_several() -> None:
    blame = blame_of(A)
    assert blame.next_question(set(), 0.0) is None
    question = blame.next_question(set(range(100)), 0.0)
    assert question is not None and question.pieces == tuple(range(ASK_AT_ONCE))


def test_an_address_is_refused_only_where_all_known_there_lied() -> None:
    one, other = blame_of(A, B, C), blame_of(B)
    one.lied(A, 0)
    one.lied(C, 0)
    assert hosts_to_refuse([one, other]) == {C[0]}
    other.lied(B, 0)
    one.lied(B, 0)
    assert hosts_to_refuse([one, other]) == {A[0], C[0]}
    assert hosts_to_refuse([]) == set()


def test_the_account_says_what_came_of_each() -> None:
    blame = blame_of(A, B, ("::1", 9))
    assert Blame().account() == "no peer that has it is known"
    blame.joined(A)
    blame.left(B, "connection refused")
    blame.lied(("::1", 9), 4)
    words = blame.account()
    assert "10.0.0.1:1: connected, sends nothing" in words
    assert "10.0.0.1:2: connection refused" in words
    assert "[::1]:9: sent wrong bytes for piece 4" in words
    blame.left(("::1", 9), "connection reset")
    assert "sent wrong bytes" in blame.account(), "what it did is not forgotten when it leaves"
    for port in range(20):
        blame.add(("10.0.0.3", port))
    assert "more" in blame.account() and len(blame.account()) < 1000


def test_strangers_who_dial_in_are_nobodys_standing() -> None:
    blame = Blame()
    blame.joined(A)
    blame.left(A, "gone")
    assert not blame.members
