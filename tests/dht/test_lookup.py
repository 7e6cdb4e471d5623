"""One lookup, driven by hand."""

import hashlib
import random
from collections.abc import Callable, Sequence

import pytest

from meshswarm.config import Address
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.lookup import ALPHA, MAX_QUESTIONS, PATH_QUESTIONS, PATHS, STALL_S, Lookup, next_batch
from meshswarm.dht.networks import Networks
from meshswarm.dht.region import SPACE, radius_of, spread
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


def drive(lookup: Lookup, answer: Callable[[Contact], Sequence[Contact] | None]) -> list[Contact]:
    """Asks until it is done; `answer` names contacts, or is None for one who does not answer. Who was asked."""
    asked = []
    now = 0.0
    while not lookup.done:
        now += 1.0
        for contact in lookup.next_questions(now):
            asked.append(contact)
            named = answer(contact)
            if named is None:
                lookup.failed(contact)
            else:
                lookup.answered(contact, b"t", named)
    return asked


def invented(rng: random.Random, bits: int) -> Contact:
    """A contact whose key an attacker has chosen so that the first `bits` bits of its place are the target's: 0."""
    while True:
        key = rng.randbytes(32)
        if int.from_bytes(hashlib.sha256(key).digest()[:4]) >> (32 - bits) == 0:
            return Contact(PeerId(key), (Address(f"{rng.randrange(20, 90)}.{key[0]}.{key[1]}.1", 1),))


def test_nobody_is_asked_twice_whatever_path_names_it() -> None:
    everybody = contacts(300)
    asked = drive(Lookup(TARGET, everybody[280:], own=OWN), lambda _: everybody)
    assert len(asked) == len(set(asked))
    assert set(everybody[:20]) <= set(asked)
    assert len(asked) <= 2 * 20


@pytest.mark.parametrize("bad_paths", [1, 2, 3])
def test_liars_on_some_paths_hide_nothing_that_the_others_find(bad_paths: int) -> None:
    """Each liar names twenty more, all of them nearer than any honest peer, who answer and lie alike."""
    rng = random.Random(bad_paths)
    honest = contacts(300)
    start = honest[280:]
    liars = {start[number].peer for number in range(20) if number % PATHS < bad_paths}
    crowd = [invented(rng, 10) for _ in range(80)]
    liars |= {each.peer for each in crowd}
    lookup = Lookup(TARGET, start, own=OWN)
    asked = drive(lookup, lambda contact: rng.sample(crowd, 20) if contact.peer in liars else honest)
    assert set(honest[:20]) <= {found.contact for found in lookup.found()}
    assert len(asked) <= MAX_QUESTIONS


def test_liars_who_invent_peers_that_never_answer_use_up_their_own_path_only() -> None:
    rng = random.Random(7)
    honest = contacts(300)
    start = honest[280:]
    liars = {start[number].peer for number in range(0, 20, PATHS)}

    def answer(contact: Contact) -> Sequence[Contact] | None:
        if contact.peer in liars:
            return [invented(rng, 6) for _ in range(20)]
        return honest if contact in honest else None

    lookup = Lookup(TARGET, start, own=OWN)
    asked = drive(lookup, answer)
    assert {found.contact for found in lookup.found()} >= set(honest[:20])
    assert sum(contact not in honest for contact in asked) <= PATH_QUESTIONS


def test_contacts_of_one_network_start_on_one_path() -> None:
    """Eighteen of twenty starting contacts are one attacker's; what they name costs two others nothing."""
    rng = random.Random(8)
    honest = contacts(300)
    bad = [Contact(PeerId(bytes([n]) * 32), (Address(f"203.0.113.{n}", 1),)) for n in range(1, 19)]
    crowd = [invented(rng, 10) for _ in range(60)]
    lookup = Lookup(TARGET, [*bad, *honest[200:202]], own=OWN)
    drive(lookup, lambda contact: honest if contact in honest else rng.sample(crowd, 20))
    assert {found.contact for found in lookup.found()} >= set(honest[:20])


def test_the_region_is_asked_too_and_a_crowd_in_it_is_noticed() -> None:
    """Forty-five peers have come between the target and the nearest honest one; every honest peer names them first."""
    rng = random.Random(9)
    honest = contacts(500)
    crowd = [invented(rng, 12) for _ in range(45)]
    ranked = sorted([*honest, *crowd], key=lambda contact: contact.place)
    radius = radius_of(500, 20)

    def answer(contact: Contact) -> Sequence[Contact]:
        if contact in crowd:
            return crowd[:20]
        by_place = {each.place: each for each in ranked}
        return [by_place[place] for place in spread(sorted(by_place), 20, lookup.radius)]

    lookup = Lookup(TARGET, honest[480:], own=OWN, radius=radius, is_sure=True)
    drive(lookup, answer)
    found = {each.contact for each in lookup.found()}
    assert lookup.is_dense
    assert lookup.radius == 2 * radius
    assert len(found & set(honest[:20])) >= 15
    blind = Lookup(TARGET, honest[480:], own=OWN)
    drive(blind, lambda contact: crowd[:20] if contact in crowd else ranked[:20])
    assert not {each.contact for each in blind.found()} & set(honest[:20])


def test_no_crowd_is_seen_in_an_ordinary_region_nor_without_an_estimate_to_rely_on() -> None:
    honest = contacts(500)
    for radius, is_sure in ((radius_of(500, 20), True), (radius_of(100, 20), False)):
        lookup = Lookup(TARGET, honest[480:], own=OWN, radius=radius, is_sure=is_sure)
        drive(lookup, lambda _: honest)
        assert not lookup.is_dense
    certain = Lookup(TARGET, honest[480:], own=OWN, radius=radius_of(100, 20), is_sure=True)
    drive(certain, lambda _: honest)
    assert certain.is_dense


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_a_small_swarm_is_asked_once_each(count: int) -> None:
    everybody = contacts(count)
    lookup = Lookup(TARGET, everybody, own=OWN, radius=SPACE)
    assert sorted(c.place for c in drive(lookup, lambda _: everybody)) == [c.place for c in everybody]
    assert lookup.covers() == SPACE
    assert lookup.rounds == 1
    alone = Lookup(TARGET, everybody[:1], own=OWN)
    assert len(drive(alone, lambda _: everybody)) == count


def test_a_peer_named_at_a_wrong_address_is_tried_once_more_at_another() -> None:
    honest = contacts(3)
    wrong = Contact(honest[0].peer, (Address("203.0.113.9", 9),))
    lookup = Lookup(TARGET, [wrong, honest[1]], own=OWN)
    tried = []

    def answer(contact: Contact) -> Sequence[Contact] | None:
        tried.append(contact)
        return None if contact == wrong else honest

    drive(lookup, answer)
    again = Contact(honest[0].peer, (*honest[0].addresses, *wrong.addresses))
    assert tried.count(wrong) == 1
    assert again in [found.contact for found in lookup.found()]
    others = [Contact(honest[0].peer, (Address("203.0.113.9", port),)) for port in range(10, 30)]
    stubborn = Lookup(TARGET, [wrong, *honest[1:]], own=OWN)
    asked = drive(stubborn, lambda contact: None if contact.peer == wrong.peer else [others.pop()])
    assert sum(contact.peer == wrong.peer for contact in asked) <= 2


def test_rounds_are_the_questions_that_had_to_follow_one_another() -> None:
    everybody = contacts(60)
    lookup = Lookup(TARGET, everybody[-1:], own=OWN)
    drive(lookup, lambda contact: everybody[20:40] if contact == everybody[-1] else everybody[:20])
    assert lookup.rounds == 3


def test_one_network_that_names_itself_fills_no_path() -> None:
    """An attacker with one /24 has 250 addresses and as many ports as he likes."""
    rng = random.Random(10)
    honest = contacts(300)
    crowd = [Contact(invented(rng, 12).peer, (Address(f"203.0.113.{number}", number),)) for number in range(1, 61)]
    start = [*honest[280:297], *crowd[:3]]

    def answer(contact: Contact) -> Sequence[Contact]:
        return rng.sample(crowd, 20) if contact in crowd else [*crowd[:10], *honest[:10]]

    lookup = Lookup(TARGET, start, own=OWN)
    drive(lookup, answer)
    found = {each.contact for each in lookup.found()}
    assert len(found & set(crowd)) <= 3 * PATHS
    assert set(honest[:10]) <= found
    members = Lookup(TARGET, start, own=OWN, per_network=2**30)
    drive(members, answer)
    assert len({each.contact for each in members.found()} & set(crowd)) > 3 * PATHS


def test_the_network_that_counts_is_the_one_a_peer_answers_from() -> None:
    """The crowd is named at addresses all over the world, and answers from its own."""
    rng = random.Random(11)
    honest = contacts(300)
    crowd = [invented(rng, 12) for _ in range(60)]
    lookup = Lookup(TARGET, [*honest[283:], *crowd[:3]], own=OWN)
    now = 0.0
    while not lookup.done:
        now += 1.0
        for contact in lookup.next_questions(now):
            if contact in crowd:
                really = Contact(contact.peer, (Address("203.0.113.1", 1), *contact.addresses))
                lookup.answered(really, b"t", rng.sample(crowd, 20))
            else:
                lookup.answered(contact, b"t", honest[:20])
    found = {each.contact.peer for each in lookup.found()}
    assert len(found & {each.peer for each in crowd}) <= 3 * PATHS
    assert {each.peer for each in honest[:20]} <= found


def test_a_network_that_this_machine_is_in_is_not_counted() -> None:
    campus = [Contact(each.peer, (Address("203.0.113.7", n + 1),)) for n, each in enumerate(contacts(20))]
    lookup = Lookup(TARGET, campus, own=OWN, networks=Networks([Address("203.0.113.200", 1)]))
    assert len(drive(lookup, lambda _: campus)) == 20
    elsewhere = Lookup(TARGET, campus, own=OWN)
    assert len(drive(elsewhere, lambda _: campus)) < 20
