"""Which model a name means, by arithmetic alone: networks count, signatures do not."""

from collections.abc import Iterable
from fractions import Fraction

from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.head.naming import covering, in_turn, is_whole, likeliest, shares, tiers
from meshswarm.identity import PeerId
from meshswarm.span import Span

ONE, TWO, THREE = b"1" * 32, b"2" * 32, b"3" * 32


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def serves(number: int, span: str = "0:4", *, host: str = "127.0.0.1", loaded: bool = True) -> CoverageRecord:
    return CoverageRecord(
        peer(number), (Address(host, 4000),), ONE, Span.parse(span), loaded, "cpu", 4096, 1, 1, 9
    )  # fmt: skip


def test_a_network_counts_once_and_in_parts_where_it_speaks_for_several() -> None:
    """One attacker's network speaks for thirty models by the name: together they have the weight of one network."""
    fakes = {bytes([number]) * 32: frozenset({b"evil"}) for number in range(100, 130)}
    weight = shares({ONE: frozenset({b"home"}), **fakes})
    assert weight[ONE] == 1
    assert sum(weight[fake] for fake in fakes) == 1
    assert tiers(weight)[0] == [ONE]


def test_what_nobody_reached_speaks_for_is_in_no_tier_and_equals_share_one() -> None:
    weight = shares({ONE: frozenset(), TWO: frozenset({b"a"}), THREE: frozenset({b"b"})})
    assert weight[ONE] == Fraction(0)
    assert tiers(weight) == [[TWO, THREE]]


def test_of_many_lists_each_gets_its_turn() -> None:
    flood = [serves(number) for number in range(100)]
    assert in_turn([flood, [serves(500)], []], 4) == [flood[0], serves(500), flood[1], flood[2]]


def test_who_was_met_is_dialled_first_and_then_one_of_every_network_that_is_claimed() -> None:
    strangers = [serves(number, host="203.0.113.7") for number in range(50)]
    elsewhere, met = serves(60, host="198.51.100.1"), serves(61, host="203.0.113.9")
    chosen = likeliest(
        [*strangers, elsewhere, met], lambda who: b"here" if who == met.peer else None, lambda who: who.key[-1], 3
    )
    assert chosen == [met, strangers[0], elsewhere]


def peers(records: Iterable[CoverageRecord]) -> set[PeerId]:
    return {record.peer for record in records}


def test_a_few_of_each_layer_are_dialled_those_met_first_and_none_that_is_away() -> None:
    first, second = [serves(n, "0:10") for n in range(10)], [serves(20 + n, "10:30") for n in range(10)]
    met = {peer(9): b"a", peer(25): b"b"}
    chosen = covering([*first, *second], 30, met.get, lambda who: who.key[-1], frozenset({peer(0)}))
    assert peers(chosen) == {peer(9), peer(1), peer(2), peer(25), peer(20), peer(21)}
    assert covering([serves(1, "0:10", loaded=False)], 30, met.get, lambda who: 0.0, frozenset()) == []


def test_a_model_is_whole_on_peers_that_were_reached_and_have_its_layers_loaded() -> None:
    records = [serves(1, "0:10"), serves(2, "10:30"), serves(3, "10:30", loaded=False)]
    assert is_whole(records, 30, frozenset({peer(1), peer(2)}))
    assert not is_whole(records, 30, frozenset({peer(1), peer(3)}))
    assert not is_whole(records, 31, frozenset({peer(1), peer(2)}))
