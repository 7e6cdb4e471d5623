"""Which of several links is used: both ends must come to the same answer on their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.config import Address
from meshswarm.identity import PeerId
from meshswarm.net.roster import MAX_LAST_SEEN, Roster

SMALL, LARGE = PeerId(b"a" * 32), PeerId(b"b" * 32)


@dataclass(eq=False)
class End:
    """One end of a link, as far as a roster looks at it."""

    number: int
    peer_id: PeerId
    is_dialled_here: bool
    instance: bytes = b"1"
    is_used: bool = False
    sockaddr: Any = ("192.0.2.1", 1)
    remote_address: Address = Address("192.0.2.1", 1)
    ended: bool = False

    def end(self, _code: object, _error: object) -> None:
        self.ended = True


def roster(me: PeerId) -> Any:
    loop = asyncio.new_event_loop()
    loop.close()
    made: Any = Roster(loop, me)
    made._retire_later = lambda: None  # the timer is the endpoint's affair
    return made


@given(st.lists(st.booleans(), min_size=2, max_size=2, unique=True), st.permutations([0, 1]))
def test_of_two_dials_across_both_ends_keep_the_one_of_the_smaller_id(dialled: list[bool], order: list[int]) -> None:
    at_small, at_large = roster(SMALL), roster(LARGE)
    for number, by_small in enumerate(dialled):
        at_small.add(End(number, LARGE, by_small))
    for number in order:
        at_large.add(End(number, SMALL, not dialled[number]))
    kept = dialled.index(True)
    assert at_small.get(LARGE).number == at_large.get(SMALL).number == kept


def test_a_dialler_keeps_its_first_and_the_dialled_takes_the_newest() -> None:
    for me, other in ((SMALL, LARGE), (LARGE, SMALL)):
        dialler, dialled = roster(me), roster(other)
        for number in range(3):
            dialler.add(End(number, other, True))
            dialled.add(End(number, me, False))
        assert dialler.get(other).number == 0 and dialled.get(me).number == 2


def test_surplus_links_are_closed_by_their_dialler_once_they_are_unused() -> None:
    here = roster(LARGE)
    mine, theirs = End(0, SMALL, True, is_used=True), End(1, SMALL, False)
    here.add(mine)
    here.add(theirs)
    assert here.preferred() == [theirs]
    here._retire()
    assert not mine.ended and not theirs.ended
    mine.is_used = False
    here._retire()
    assert mine.ended and not theirs.ended
    here.remove(mine)
    assert here.get(SMALL) is theirs
    here.remove(theirs)
    assert here.get(SMALL) is None and here.preferred() == []


def test_a_new_instance_ends_the_links_of_the_old_one() -> None:
    here = roster(SMALL)
    old, new = End(0, LARGE, True, b"1"), End(1, LARGE, False, b"2")
    here.add(old)
    here.add(new)
    assert old.ended and not new.ended


def test_where_peers_were_last_seen_is_remembered_up_to_a_number() -> None:
    here = roster(SMALL)
    for number in range(MAX_LAST_SEEN + 10):
        peer = PeerId(number.to_bytes(32, "big"))
        here.add(End(number, peer, True, remote_address=Address("192.0.2.1", number)))
        here.add(End(number, PeerId(b"x" * 32), False))
    assert here.last_seen(PeerId(bytes(32))) == []
    last = MAX_LAST_SEEN + 9
    assert here.last_seen(PeerId(last.to_bytes(32, "big"))) == [Address("192.0.2.1", last)]
    assert here.last_seen(PeerId(b"x" * 32)) == []  # it dialled us: that address need not be one to dial
