"""One lookup, driven by hand."""

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.lookup import ALPHA, MAX_QUESTIONS, PATHS, STALL_S, Lookup, next_batch
from meshswarm.identity import PeerId

OWN = PeerId(bytes(32))
TARGET = bytes(20)


def contacts(count: int, first: int = 1) -> list[Contact]:
    """`count` contacts, nearest to the target first."""
    made = [Contact(PeerId(n.to_bytes(32)), (Address("10.0.0.1", n),)) for n in range(first, first + count)]
    return sorted(made, key=lambda contact: distance(contact.node_id, TARGET))


def test_without_anybody_to_ask_it_is_done() -> None:
    lookup = Lookup(TARGET, [], own=OWN)
    assert lookup.done
    assert lookup.next_questions(0.0) == []
    assert lookup.found() == []


def test_the_nearest_are_asked_first_alpha_at_a_time() -> None:
    known = contacts(12)
    lookup = Lookup(TARGET, reversed(known), own=OWN)
    assert lookup.next_questions(0.0) == known[:ALPHA]
    assert lookup.next_questions(0.0) == []
    lookup.answered(known[0], b"t", [])
    assert lookup.next_questions(0.1) == [known[ALPHA]]
    assert not lookup.done


def test_it_goes_on_with_nearer_ones_it_hears_of() -> None:
    everybody = contacts(40)
    lookup = Lookup(TARGET, everybody[-1:], own=OWN)
    assert lookup.next_questions(0.0) == everybody[-1:]
    lookup.answered(everybody[-1], b"t", everybody[:20])
    assert lookup.next_questions(0.0)[:PATHS] == everybody[:PATHS]


def test_it_ends_when_the_k_nearest_have_answered_and_gives_their_tokens() -> None:
    everybody = contacts(40)
    lookup = Lookup(TARGET, everybody, own=OWN, k=4)
    asked = []
    while not lookup.done:
        for contact in lookup.next_questions(0.0):
            asked.append(contact)
            lookup.answered(contact, contact.peer.key[-4:], everybody)
    assert asked == everybody[: len(asked)]
    assert len(asked) <= ALPHA
    assert [(found.contact, found.token) for found in lookup.found()] == [
        (contact, contact.peer.key[-4:]) for contact in everybody[:4]
    ]


def test_those_who_fail_are_replaced_by_the_next_nearest() -> None:
    everybody = contacts(8)
    lookup = Lookup(TARGET, everybody, own=OWN, k=4)
    while not lookup.done:
        for contact in lookup.next_questions(0.0):
            if contact in everybody[:3]:
                lookup.failed(contact)
            else:
                lookup.answered(contact, b"t", everybody)
    assert [found.contact for found in lookup.found()][:4] == everybody[3:7]


def test_a_slow_answer_keeps_nobody_else_from_being_asked() -> None:
    everybody = contacts(20)
    lookup = Lookup(TARGET, everybody, own=OWN)
    slow = lookup.next_questions(0.0)
    assert lookup.next_questions(STALL_S - 0.01) == []
    assert lookup.next_questions(STALL_S) == everybody[ALPHA : 2 * ALPHA]
    for contact in slow:
        lookup.answered(contact, b"late", [])
    assert {found.contact for found in lookup.found()} == set(slow)


def test_this_peer_is_never_asked() -> None:
    own = Contact(OWN, (Address("10.0.0.1", 1),))
    lookup = Lookup(node_id(OWN), [own], own=OWN)
    assert lookup.done
    known = contacts(1)
    lookup = Lookup(node_id(OWN), known, own=OWN)
    lookup.answered(lookup.next_questions(0.0)[0], b"t", [own])
    assert lookup.done


def test_invented_contacts_cannot_make_it_endless() -> None:
    """Each answer names twenty that are nearer still."""
    farthest_first = contacts(3000)[::-1]
    lookup = Lookup(TARGET, farthest_first[:1], own=OWN)
    invented = iter(farthest_first[1:])
    asked = 0
    while not lookup.done:
        questions = lookup.next_questions(0.0)
        for contact in questions:
            asked += 1
            lookup.answered(contact, b"t", [next(invented) for _ in range(20)])
    assert asked <= MAX_QUESTIONS


def test_one_answer_counts_for_no_more_than_k_contacts() -> None:
    everybody = contacts(200)
    lookup = Lookup(TARGET, everybody[-1:], own=OWN)
    lookup.answered(lookup.next_questions(0.0)[0], b"t", everybody[:160])
    assert len(lookup._known) == 21


def test_lookups_share_questions_to_one_peer() -> None:
    known = contacts(3)
    lookups = [Lookup(bytes([n]) * 20, known, own=OWN) for n in range(10)]
    batches = next_batch(lookups, 0.0, 8)
    assert sorted((contact.peer, len(together)) for contact, together in batches) == sorted(
        (contact.peer, size) for contact in known for size in (8, 2)
    )
    assert next_batch(lookups, 0.0, 8) == []


def test_a_lookup_joins_the_question_of_another_to_a_peer_it_would_ask_later() -> None:
    known = contacts(12)
    first, second = Lookup(TARGET, known, own=OWN), Lookup(bytes([255]) * 20, known, own=OWN, k=1)
    batches = {contact.peer: together for contact, together in next_batch([first, second], 0.0, 8)}
    assert all(first in together for together in batches.values())
    wanted = sorted(known, key=lambda contact: distance(contact.node_id, bytes([255]) * 20))[:PATHS]
    assert {peer for peer, together in batches.items() if second in together} == {c.peer for c in wanted}
