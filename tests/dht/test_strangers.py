"""A swarm of strangers: crowds, liars, partitions, churn, wrong clocks and doubled keys, by cores without sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.messages import FIND, STORE, FindAnswer, Sender, StoreAnswer, StoreQuestion, StoreStatus
from meshswarm.dht.signed import MAX_RECORD_BYTES, RecordKind, SignedRecord
from meshswarm.dht.storage import MAX_PER_NETWORK_AND_KEY
from meshswarm.dht.table import BACK_OFF_S
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.swarm import Swarm

MODEL = bytes(range(32))
Make = Callable[..., Any]


def crowd_around(network: Any, key: bytes, count: int, drawn: int) -> list[Any]:
    """`count` nodes whose keys were chosen among `drawn` for being nearest to `key`, each in a network of its own.

    They answer every question with each other, say that they stored what they were given, and show nothing.
    """
    drawn_keys = [Identity.from_seed(network.rng.randbytes(32)) for _ in range(drawn)]
    drawn_keys.sort(key=lambda who: distance(node_id(who.peer_id), key))
    crowd = [network.add(identity=who) for who in drawn_keys[:count]]
    contacts = tuple(node.contact for node in crowd)

    def lie(node: Any) -> None:
        honest = node.core.answer

        def answer(kind: str, peer: PeerId, came_from: Address, data: bytes, now: float) -> tuple[bytes, None]:
            reply, _ = honest(kind, peer, came_from, data, now)
            if kind == FIND:
                reply = messages.encode_found(FindAnswer(node.core.sender, b"t" * 16, contacts, ()))
            if kind == STORE:
                items = messages.decode_store(data).items
                said = tuple((StoreStatus.STORED,) * len(keys) for _, keys in items)
                reply = messages.encode_stored(StoreAnswer(node.core.sender, said))
            return reply, None

        node.core.answer = answer

    for node in crowd:
        node.join(network.rng.choice(list(network.nodes.values())[:50]))
        lie(node)
    return crowd


def settle(network: Any, nodes: list[Any]) -> None:
    """`nodes` have looked for some things, and know how large the swarm is."""
    for node in nodes:
        node.look_up(*(network.rng.randbytes(20) for _ in range(4)))


def test_a_record_is_found_although_strangers_crowd_around_its_key(make_network: Make) -> None:
    """The nearest 20 of 105 nodes are one attacker's. The control shows that they would have hidden it."""
    network = make_network(seed=3)
    nodes = network.grow(80)
    author, readers = nodes[0], nodes[1:9]
    settle(network, nodes[:9])
    places = [author.core.topics.block(MODEL, block) for block in range(20)]
    nearest_to = {key: min(distance(node_id(node.core.own), key) for node in nodes) for key in places}
    key = max(places, key=lambda key: nearest_to[key])
    layers = (4 * places.index(key), 4 * places.index(key) + 4)
    crowd = {node.core.own for node in crowd_around(network, key, 25, drawn=3000)}
    nearest = sorted(network.nodes.values(), key=lambda node: distance(node_id(node.core.own), key))[:20]
    assert {node.core.own for node in nearest} <= crowd, "the attack is what it says"
    [lookup] = author.publish(author.say(layers))
    assert lookup.is_dense
    assert any("crowd" in sentence for sentence in author.core.notices.sentences)
    assert sum(found.contact.peer not in crowd for found in lookup.found()) >= 15
    found = 0
    for reader in readers:
        [lookup], records = reader.look_up(key)
        found += author.core.own in {record.author for record in records}
        assert lookup.is_dense
    assert found == len(readers)

    for node in network.nodes.values():
        node.core.radius = lambda now: 0  # as if nobody knew how large the swarm is
    network.now += 1.0
    [newer] = author.say(layers)
    [lookup] = author.publish([newer])
    assert {found.contact.peer for found in lookup.found()} <= crowd
    hidden = [newer not in reader.look_up(key)[1] for reader in readers]
    assert all(hidden)


def test_nobody_cries_crowd_in_an_honest_swarm_and_a_lookup_asks_few(make_network: Make) -> None:
    network = make_network(seed=4)
    nodes = network.grow(80)
    settle(network, nodes[:10])
    before, hits = network.questions, 0
    for node in nodes[:10]:
        target = network.rng.randbytes(20)
        [lookup], _ = node.look_up(target)
        assert not lookup.is_dense
        others = sorted(
            (other.core.own for other in nodes if other is not node), key=lambda p: distance(node_id(p), target)
        )
        hits += len(set(others[:20]) & {found.contact.peer for found in lookup.found()})
    assert hits >= 0.99 * 200
    assert (network.questions - before) / 10 <= 32
    assert not any("crowd" in sentence for node in nodes for sentence in node.core.notices.sentences)
    sizes = sorted(node.core.swarm_size(network.now) for node in nodes[:10])
    assert 50 < sizes[5] < 120


def test_one_network_cannot_fill_a_key_nor_a_table(make_network: Make) -> None:
    network = make_network(seed=5)
    nodes = network.grow(12)
    flood = [network.add(f"203.0.113.{number + 1}") for number in range(40)]
    for node in flood:
        node.join(network.rng.choice(nodes))
        node.publish(node.say((0, 4)))
    key = nodes[0].core.topics.block(MODEL, 0)
    mine = {node.core.own for node in flood}
    for node in nodes:
        assert sum(record.author in mine for record in node.core.store.get(key, network.now)) <= MAX_PER_NETWORK_AND_KEY
        assert sum(near.contact.peer in mine for near in node.core.table.neighbours()) <= 10
    nodes[3].publish(nodes[3].say((0, 4)))
    assert nodes[9].sees()[nodes[3].core.own] == (0, 4)


def test_a_lan_swarm_of_more_peers_than_a_network_may_have_knows_itself_whole(make_network: Make) -> None:
    network = make_network(seed=6)
    nodes = [network.add(f"192.168.1.{number + 1}") for number in range(18)]
    for node in nodes[1:]:
        node.join(nodes[0])
    for node in nodes:
        node.publish(node.say((0, 4)))
    assert all(len(node.sees()) == 18 for node in nodes)
    assert all(len(node.core.table) == 17 for node in nodes)


def test_partition_and_heal_lose_nothing_and_double_nothing(make_network: Make) -> None:
    """Two halves go on by themselves for longer than a record lives; then they meet again."""
    network = make_network(seed=7)
    nodes = network.grow(20)
    left, right = nodes[:10], nodes[10:]
    sides = {node.core.own: node in left for node in nodes}
    mover, leaver, stayer = left[0], left[1], right[0]
    newcomer = right[1]
    for node in (mover, leaver, stayer):
        node.publish(node.say((0, 8)))
    everybody = {mover.core.own: (0, 8), leaver.core.own: (0, 8), stayer.core.own: (0, 8)}
    assert all(node.sees() == everybody for node in nodes)

    network.is_cut = lambda one, other: sides[one.core.own] != sides[other.core.own]
    for minute in range(40):
        network.now += 60.0
        if minute == 5:
            mover.publish(mover.say((16, 24)))
            leaver.publish(leaver.core.publications.withdraw(RecordKind.COVERAGE, MODEL, network.now))
            newcomer.publish(newcomer.say((8, 12)))
        if minute % 10 == 9:
            for node in (mover, stayer, newcomer):
                layers = {mover: (16, 24), stayer: (0, 8), newcomer: (8, 12)}[node]
                node.publish(node.say(layers))
            for node in nodes:
                node.core.store.expire(network.now)
    assert all(node.sees() == {mover.core.own: (16, 24)} for node in left)
    assert all(node.sees() == {stayer.core.own: (0, 8), newcomer.core.own: (8, 12)} for node in right)

    network.is_cut = lambda one, other: False
    network.now += BACK_OFF_S[-1] + 1.0
    left[7].join(right[7])  # one of each side still remembers the other
    for node in (left[7], right[7], *nodes):
        node.look_up(node_id(node.core.own))
    truth = {mover.core.own: (16, 24), stayer.core.own: (0, 8), newcomer.core.own: (8, 12)}
    for node in (mover, stayer, newcomer):
        node.publish(node.say(truth[node.core.own]))
    for node in nodes:
        assert node.sees() == truth
        for block in range(6):
            kept = [
                (r.author, r.subject) for r in node.core.store.get(node.core.topics.block(MODEL, block), network.now)
            ]
            assert len(kept) == len(set(kept))


def test_after_a_partition_records_are_handed_over_before_they_are_said_again(make_network: Make) -> None:
    network = make_network(seed=8)
    nodes = network.grow(12)
    left = {node.core.own for node in nodes[:6]}
    network.is_cut = lambda one, other: (one.core.own in left) != (other.core.own in left)
    for node in nodes:
        for other in nodes:
            for _ in range(2):
                if network.is_cut(node, other):
                    node.core.failed(other.contact, (), network.now, unreachable=True)
    nodes[0].publish(nodes[0].say((0, 4)))
    assert all(node.sees() == ({nodes[0].core.own: (0, 4)} if node.core.own in left else {}) for node in nodes)
    network.is_cut = lambda one, other: False
    network.now += 1000.0
    for node in nodes[6:]:
        node.ping(nodes[0].contact)
    key = nodes[0].core.topics.block(MODEL, 0)
    assert all(node.core.store.get(key, network.now) for node in nodes)


def test_when_keepers_go_those_who_move_up_are_owed_and_a_thin_record_is_published_again(make_network: Make) -> None:
    network = make_network(seed=9)
    nodes = network.grow(60)
    author = nodes[0]
    [record] = author.say((0, 4))
    [lookup] = author.publish([record])
    keepers = {found.contact.peer for found in lookup.found()}
    assert author.core.creditors(network.now) == []
    assert author.core.thin(network.now) == []
    for peer in list(keepers)[: len(keepers) * 2 // 3]:
        network.nodes[peer].is_alive = False
        for _ in range(2):
            author.core.failed(network.nodes[peer].contact, (), network.now, unreachable=True)
    assert author.core.thin(network.now) == [record]
    author.publish(author.say((0, 4)))
    living = [node for node in nodes if node.is_alive]
    key = author.core.topics.block(MODEL, 0)
    nearest = sorted(living, key=lambda node: distance(node_id(node.core.own), key))[:20]
    assert sum(bool(node.core.store.get(key, network.now)) for node in nearest) >= 18
    assert author.core.thin(network.now) == []


def test_a_peer_that_comes_near_a_key_is_handed_the_record_once(make_network: Make) -> None:
    network = make_network(seed=10)
    nodes = network.grow(8)
    author = nodes[0]
    author.publish(author.say((0, 4)))
    newcomer = network.add()
    newcomer.join(author)
    key = author.core.topics.block(MODEL, 0)
    assert [record.author for record in newcomer.core.store.get(key, network.now)] == [author.core.own]
    assert author.core.owed_to(newcomer.contact, network.now) == []


def test_a_client_is_in_no_table_and_finds_and_publishes_like_everybody(make_network: Make) -> None:
    network = make_network(seed=11)
    nodes = network.grow(25)
    client = network.add(server=False)
    client.join(nodes[3])
    client.publish(client.say((4, 12)))
    nodes[0].publish(nodes[0].say((0, 4)))
    assert client.sees() == {client.core.own: (4, 12), nodes[0].core.own: (0, 4)}
    assert all(node.sees() == client.sees() for node in nodes)
    assert not any(client.core.own in node.core.table for node in nodes)
    assert not any(client.core.own in node.asked for node in nodes)


def test_ipv4_and_ipv6_peers_find_each_other(make_network: Make) -> None:
    network = make_network(seed=12)
    nodes = [network.add(f"2001:db8:{n:x}::1" if n % 2 else f"{20 + n}.7.7.7") for n in range(16)]
    for node in nodes[1:]:
        node.join(nodes[0])
    for node in nodes:
        node.publish(node.say((0, 4)))
    assert all(len(node.sees()) == 16 for node in nodes)


# -- bad input


class Asker:
    """A stranger who knows the protocol."""

    def __init__(self, network: Any, node: Any) -> None:
        self.network, self.node = network, node
        self.who = network.add()
        question = messages.encode_find(messages.FindQuestion(self.who.core.sender, (bytes(20),), False))
        self.token = messages.decode_found(self._ask(FIND, question)).token

    def _ask(self, kind: str, data: bytes) -> bytes:
        answer: bytes = self.node.core.answer(kind, self.who.core.own, self.who.address, data, self.network.now)[0]
        return answer

    def store(self, record: bytes, *keys: bytes) -> tuple[StoreStatus, ...]:
        question = StoreQuestion(self.who.core.sender, self.token, ((record, keys),))
        return messages.decode_stored(self._ask(STORE, messages.encode_store(question))).statuses[0]


def test_forged_stale_replayed_foreign_and_misplaced_records_are_refused_and_change_nothing(
    make_network: Make, make_record: Callable[..., SignedRecord]
) -> None:
    network = make_network(seed=13)
    node = network.add()
    scope, key = node.core.topics.scope, node.core.topics.block(MODEL, 0)
    asker = Asker(network, node)
    good = make_record(1, span="0:4", scope=scope, seq=5)
    assert asker.store(good.wire, key) == (StoreStatus.STORED,)
    place = good.wire.index(good.body)
    forged = good.wire[: place + 20] + bytes([good.wire[place + 20] ^ 1]) + good.wire[place + 21 :]
    old = make_record(1, span="0:4", scope=scope, seq=4)
    for record, where, status in (
        (forged, key, StoreStatus.INVALID),
        (old.wire, key, StoreStatus.STALE),
        (make_record(1, span="0:4", scope=bytes(16), seq=6).wire, key, StoreStatus.INVALID),
        (make_record(1, span="0:4", scope=scope, seq=6, life_s=-1).wire, key, StoreStatus.EXPIRED),
        (make_record(1, span="0:4", scope=scope, seq=6, life_s=9 * 3600).wire, key, StoreStatus.TOO_LONG),
        (good.wire, bytes(20), StoreStatus.INVALID),
        (bytes(MAX_RECORD_BYTES), key, StoreStatus.INVALID),
        (b"", key, StoreStatus.INVALID),
    ):
        assert asker.store(record, where) == (status,)
        assert node.core.store.get(key, network.now) == [good]
    assert asker.store(good.wire, key) == (StoreStatus.STORED,)  # a replay of what is there is no news
    with pytest.raises(WireError):
        asker.store(bytes(messages.MAX_SEALED_BYTES + 1), key)
    reader = network.add()
    for bad in (forged, make_record(1, scope=bytes(16)).wire, make_record(1, scope=scope, life_s=-1).wire, b"x"):
        assert reader.core.read_record(bad, network.now, [key]) is None


def test_a_withdrawn_record_cannot_be_brought_back(make_network: Make) -> None:
    network = make_network(seed=14)
    nodes = network.grow(6)
    author = nodes[0]
    [record] = author.say((0, 4))
    author.publish([record])
    network.now += 5.0
    author.publish(author.core.publications.withdraw(RecordKind.COVERAGE, MODEL, network.now))
    asker = Asker(network, nodes[2])
    assert asker.store(record.wire, author.core.topics.block(MODEL, 0)) == (StoreStatus.STALE,)
    assert nodes[4].sees() == {}


def test_a_wrong_address_of_a_peer_keeps_nobody_away_from_it(make_network: Make) -> None:
    """A liar names every other peer at an address where somebody else is. Dials prove keys, so they fail; the peers
    are found all the same, and neither they nor the one who lives there are left alone."""
    network = make_network(seed=15)
    nodes = network.grow(12)
    liar, victim = nodes[1], nodes[2]
    elsewhere = Address("198.51.100.9", 9)
    others = [node.core.own for node in nodes if node is not liar]
    honest = liar.core.answer

    def answer(kind: str, peer: PeerId, came_from: Address, data: bytes, now: float) -> tuple[bytes, Any]:
        if kind != FIND:
            return honest(kind, peer, came_from, data, now)
        named = tuple(Contact(other, (elsewhere,)) for other in others if other != peer)
        return messages.encode_found(FindAnswer(liar.core.sender, b"t" * 16, named, ())), None

    liar.core.answer = answer
    victim.publish(victim.say((0, 4)))
    newcomer = network.add()
    newcomer.core.table.saw(liar.contact, network.now)
    newcomer.core.table.saw(nodes[3].contact, network.now)
    assert newcomer.sees() == {victim.core.own: (0, 4)}
    for _ in range(3):
        network.now += 30.0
        newcomer.look_up(node_id(newcomer.core.own))
    assert newcomer.core.table.back_off.held(network.now) == frozenset()
    known = newcomer.core.table.get(victim.core.own)
    assert known is not None and known.contact.addresses[0] == victim.address


def test_clocks_hours_apart_are_said_in_sentences_by_both_sides(make_network: Make) -> None:
    network = make_network(seed=16)
    nodes = network.grow(5)
    late = network.add()
    late.ahead_s = -3 * 3600.0
    late.join(nodes[0])
    [lookup] = late.look_up(late.core.topics.block(MODEL, 0))[0]
    assert set(late.store(late.core.deliveries(late.say((0, 4)), [lookup], late.now))) == {StoreStatus.EXPIRED}
    assert any("this machine's clock is about 3 h behind" in said for said in late.core.notices.sentences)
    for node in nodes:
        node.ping(late.contact)
        assert any(
            f"clock of peer {late.core.own.short} is about 3 h behind" in said for said in node.core.notices.sentences
        )
        assert not any("this machine's clock is" in said for said in node.core.notices.sentences)


def test_a_peer_is_told_that_its_key_is_used_twice(make_network: Make) -> None:
    network = make_network(seed=17)
    nodes = network.grow(5)
    one = network.add()
    one.join(nodes[0])
    one.publish(one.say((0, 4)))
    network.now += 10.0
    twin = network.add("198.51.100.77", identity=one.identity)
    twin.join(nodes[1])
    twin.publish(twin.say((4, 8), b"another"))
    network.nodes[one.core.own] = one
    one.sees()
    [said] = one.core.notices.sentences
    assert "this very peer" in said and "a key of its own" in said
    started_again = network.add("198.51.100.78", identity=one.identity)
    network.now += 10.0
    started_again.join(nodes[1])
    started_again.publish(started_again.say((0, 4)))
    started_again.sees()
    assert started_again.core.notices.sentences == [], "its own records of an earlier start are no twin's"


def test_others_notice_when_connections_to_a_peer_change_hands(make_network: Make) -> None:
    network = make_network(seed=18)
    node = network.add()
    peer = network.add().core.own
    for instance in (b"one", b"one", b"two", b"two"):
        node.core.saw_instance(peer, instance)
    assert node.core.notices.sentences == []
    for instance in (b"one", b"two", b"one"):
        node.core.saw_instance(peer, instance)
    [said] = node.core.notices.sentences
    assert peer.short in said


# -- private swarms


def test_records_of_a_private_swarm_travel_and_lie_sealed(make_network: Make) -> None:
    """An outsider who reads every byte that members send finds no record in them, nor the name of any peer's model."""
    swarm = Swarm("ours", b"k" * 32)
    network = make_network(seed=19, swarm=swarm)
    seen: list[bytes] = []
    ask = network.ask

    def overheard(asker: Any, contact: Contact, kind: str, data: bytes) -> bytes | None:
        answer: bytes | None = ask(asker, contact, kind, data)
        seen.extend([data, answer or b""])
        return answer

    network.ask = overheard
    nodes = [network.add("203.0.113.5") for _ in range(9)]  # all behind one address: members are not counted
    for node in nodes[1:]:
        node.join(nodes[0])
    for node in nodes:
        node.publish(node.say((0, 10), b"body of a record"))
    assert all(len(node.sees()) == 9 for node in nodes)
    assert not any(MODEL in data or b"body of a record" in data for data in seen)
    sealed = {each for node in nodes for each in node.core.store.sealed(node.core.topics.block(MODEL, 0), network.now)}
    assert len(sealed) == 9
    outsider = make_network(seed=20, swarm=Swarm("ours", b"x" * 32)).add()
    for each in sealed:
        for key in (bytes(20), nodes[0].core.topics.block(MODEL, 0)):
            assert outsider.core.read_record(each, network.now, [key]) is None
    assert outsider.core.topics.block(MODEL, 0) != nodes[0].core.topics.block(MODEL, 0)


def test_what_is_sealed_for_another_key_or_not_at_all_is_refused(make_network: Make) -> None:
    network = make_network(seed=21, swarm=Swarm("ours", b"k" * 32))
    author, node = network.add(), network.add()
    [record] = author.say((0, 8))
    one, two = author.core.topics.of_record(record)
    asker = Asker(network, node)
    sealed = author.core.topics.seal(one, record.wire)
    assert asker.store(record.wire, one) == (StoreStatus.INVALID,)
    assert asker.store(sealed, two) == (StoreStatus.INVALID,)
    assert asker.store(sealed, one, two) == (StoreStatus.STORED, StoreStatus.INVALID)
    assert node.core.read_record(sealed, network.now, [two]) is None
    assert node.core.read_record(sealed, network.now, [two, one]) == record


def test_only_some_dials_may_be_caused_and_only_by_peers_elsewhere(make_network: Make) -> None:
    network = make_network(seed=22)
    nodes = network.grow(6)
    asker = network.add("203.0.113.5")
    neighbour_of_asker = network.add("203.0.113.6")
    neighbour_of_asker.join(nodes[0])
    for _ in range(20):
        chosen = nodes[0].core.diallers_for(asker.core.own, asker.address, network.rng)
        assert len(chosen) == 3
        assert not {asker.core.own, neighbour_of_asker.core.own} & {contact.peer for contact in chosen}
    lan = network.add("10.0.0.1")
    lan.core.table.saw(Contact(nodes[1].core.own, (Address("10.0.0.2", 1),)), network.now)
    assert lan.core.diallers_for(asker.core.own, asker.address, network.rng) == []
    for _ in range(5):
        nodes[0].core.spend_dial(asker.core.own, network.now)
    with pytest.raises(Exception, match="too many dials"):
        nodes[0].core.spend_dial(asker.core.own, network.now)
    nodes[0].core.spend_dial(asker.core.own, network.now + 60.0)


def test_sender_without_a_clock_is_an_older_peer_and_is_understood() -> None:
    sender = Sender(True, (Address("203.0.113.5", 1),))
    assert messages.decode_ping(messages.encode_ping(sender)).clock_ms == 0


def test_what_an_expelled_member_said_counts_for_nothing_at_once(make_network: Make) -> None:
    swarm = Swarm("ours", b"k" * 32)
    network = make_network(seed=23, swarm=swarm)
    nodes = network.grow(6)
    expelled, other = nodes[2], nodes[3]
    for node in (expelled, other):
        node.publish(node.say((0, 4)))
    assert len(nodes[0].sees()) == 2
    swarm.renew([b"n" * 32, b"k" * 32], expelled=[expelled.core.own])
    for node in nodes:
        node.core.swarm_changed()
    assert nodes[0].sees() == {other.core.own: (0, 4)}
    assert not any(expelled.core.own in node.core.table for node in nodes)
