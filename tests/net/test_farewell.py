"""A closed connection repeats its last word, for a while and not for ever."""

from __future__ import annotations

from meshswarm.net.farewell import LINGER_S, MAX_REMEMBERED_IDS, MAX_REPEATS, Farewells

WHERE = ("192.0.2.1", 1)


def test_whoever_goes_on_talking_is_told_again_a_few_times() -> None:
    farewells = Farewells()
    farewells.add([b"one", b"two"], b"bye", WHERE, 0.0)
    answers = [farewells.answer(name, 0.1) for name in (b"one", b"two") * MAX_REPEATS]
    assert answers == [(b"bye", WHERE)] * MAX_REPEATS + [None] * MAX_REPEATS
    assert farewells.answer(b"three", 0.1) is None


def test_it_is_forgotten_after_a_moment() -> None:
    farewells = Farewells()
    farewells.add([b"one"], b"bye", WHERE, 0.0)
    assert farewells.answer(b"one", LINGER_S + 0.1) is None
    farewells.add([b"two"], b"bye", WHERE, LINGER_S + 0.1)
    assert list(vars(farewells)["_by_id"]) == [b"two"]


def test_a_crowd_of_closed_connections_takes_bounded_room() -> None:
    farewells = Farewells()
    for number in range(2 * MAX_REMEMBERED_IDS):
        farewells.add([number.to_bytes(4, "big")], b"bye", WHERE, 0.0)
    assert len(vars(farewells)["_by_id"]) == MAX_REMEMBERED_IDS
