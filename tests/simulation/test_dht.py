"""Hundreds of nodes of the table in one process: real cores, a virtual clock, a seeded network that loses and delays.

Every failure message carries the seed; `MESHSWARM_SEED=N pytest tests/simulation` replays it.
"""

import heapq
import itertools
import os
import random
from collections.abc import Callable

import pytest

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact
from meshswarm.dht.core import Core
from meshswarm.dht.keys import Topics, distance, node_id
from meshswarm.dht.lookup import Lookup, next_batch
from meshswarm.dht.messages import FIND, PING, STORE, Sender
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, RecordSet, SignedRecord
from meshswarm.errors import RefusedError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

SEED = int(os.environ.get("MESHSWARM_SEED", "20261130"))
MODEL = bytes(range(32))
N_LAYERS = 24
START_S = 1_800_000_000.0
TIMEOUT_S = 2.0


class Network:
    """The events of all nodes in the order of their virtual time."""

    def __init__(self, seed: int, *, loss: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.now = START_S
        self.nodes: dict[PeerId, Node] = {}
        self.questions = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def add(self) -> "Node":
        node = Node(self, len(self.nodes))
        self.nodes[node.core.own] = node
        return node

    def ask(
        self, asker: "Node", peer: PeerId, kind: str, data: bytes, done: Callable[[bytes | None, bool], None]
    ) -> None:
        """`done(answer, False)`, or `done(None, unreachable)` when none comes."""
        self.questions += 1
        there = self.nodes.get(peer)

        def arrive() -> None:
            if there is None or not there.alive or self.rng.random() < self.loss:
                self.after(TIMEOUT_S, lambda: done(None, True))
                return
            try:
                answer, _ = there.core.answer(kind, asker.core.own, asker.address, data, self.now)
            except RefusedError:
                self.after(self._flight_s(), lambda: done(None, False))
                return
            self.after(self._flight_s(), lambda: done(answer, False))

        self.after(self._flight_s(), arrive)

    def _flight_s(self) -> float:
        return self.rng.uniform(0.005, 0.15)


class Node:
    """What the shell does, over the virtual network."""

    def __init__(self, network: Network, number: int) -> None:
        self.network = network
        self.identity = Identity.from_seed(network.rng.randbytes(32))
        self.address = Address(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 4000)
        self.core = Core(
            self.identity,
            Topics(Swarm("simulation")),
            secret=network.rng.randbytes(32),
            sender=Sender(True, (self.address,)),
        )
        self.alive = True

    @property
    def contact(self) -> Contact:
        return Contact(self.core.own, (self.address,))

    def ping(self, contact: Contact, then: Callable[[], None]) -> None:
        def done(answer: bytes | None, unreachable: bool) -> None:
            if answer is None:
                self.core.failed(contact, (), self.network.now, unreachable=unreachable)
            else:
                self.core.take_pong(contact, answer, self.network.now, None)
            then()

        self.network.ask(self, contact.peer, PING, messages.encode_ping(self.core.sender), done)

    def find(self, targets: list[bytes], then: Callable[[list[Lookup], RecordSet], None]) -> None:
        """All lookups together, as the shell drives them."""
        lookups = [self.core.lookup(target, self.network.now) for target in targets]
        records = RecordSet()
        finished = False

        def step() -> None:
            nonlocal finished
            for contact, together in next_batch(lookups, self.network.now, messages.MAX_FIND_KEYS):
                question = self.core.find_question(together, wants_records=True)
                self.network.ask(self, contact.peer, FIND, question, answered(contact, together))
                self.network.after(0.6, step)  # by then it counts as slow
            if not finished and all(lookup.done for lookup in lookups):
                finished = True
                then(lookups, records)

        def answered(contact: Contact, together: list[Lookup]) -> Callable[[bytes | None, bool], None]:
            def done(answer: bytes | None, unreachable: bool) -> None:
                now = self.network.now
                if answer is None:
                    self.core.failed(contact, together, now, unreachable=unreachable)
                else:
                    found = messages.decode_found(answer)
                    self.core.take_found(contact, found, together, now, None)
                    keys = [lookup.target for lookup in together]
                    read = (self.core.read_record(data, now, keys) for data in found.records)
                    records.update(record for record in read if record is not None)
                step()

            return done

        step()

    def join(self, seed: Contact) -> None:
        """Until it has worked, as the shell does it."""

        def again_when_alone(lookups: list[Lookup], _records: RecordSet) -> None:
            if not lookups[0].found():
                self.network.after(1.0, lambda: self.join(seed))

        self.ping(seed, lambda: self.find([node_id(self.core.own)], again_when_alone))

    def nearest(self, target: bytes) -> list[PeerId]:
        """The nearest peers that a lookup from here finds; runs the network until it is done."""
        found: list[PeerId] = []
        self.find([target], lambda lookups, _records: found.extend(f.contact.peer for f in lookups[0].found()))
        self.network.run()
        return found

    def publish(self, records: list[SignedRecord]) -> None:
        keys = sorted({key for record in records for key in self.core.topics.of_record(record)})

        def store(lookups: list[Lookup], _records: RecordSet) -> None:
            for delivery in self.core.deliveries(records, lookups, self.network.now):
                self.network.ask(self, delivery.contact.peer, STORE, delivery.question, lambda _a, _u: None)

        self.find(keys, store)

    def serve(self, span: Span) -> None:
        self.publish(self.say(span))

    def say(self, span: Span) -> list[SignedRecord]:
        record = CoverageRecord(
            peer=self.core.own,
            addresses=(self.address,),
            model_id=MODEL,
            span=span,
            loaded=True,
            numclass="cpu",
            n_ctx=2048,
            us_per_layer=300,
            prefill_us_per_row_layer=100,
            free_kv_tokens=8192,
        )
        layers = (span.start, span.stop)
        return self.core.publications.say(RecordKind.COVERAGE, MODEL, record.body(), self.network.now, layers=layers)

    def coverage(self) -> dict[PeerId, Span]:
        """Who serves what, as seen from here; runs the network until the answer is there."""
        seen: dict[PeerId, Span] = {}

        def done(_lookups: list[Lookup], records: RecordSet) -> None:
            local = (r for key in keys for r in self.core.store.get(key, self.network.now))
            records.update(local)
            for record in records.live(self.network.now):
                said = CoverageRecord.from_record(record)
                seen[said.peer] = said.span

        keys = self.core.topics.span(MODEL, 0, N_LAYERS)
        self.find(keys, done)
        self.network.run()
        return seen


def grow(network: Network, count: int) -> list[Node]:
    """`count` nodes, each joining through one other."""
    nodes = [network.add()]
    for _ in range(count - 1):
        node = network.add()
        node.join(network.rng.choice(nodes).contact)
        network.run()
        nodes.append(node)
    return nodes


def random_span(rng: random.Random) -> Span:
    start = rng.randrange(N_LAYERS)
    return Span(start, rng.randint(start + 1, N_LAYERS))


@pytest.fixture(scope="module")
def swarm() -> tuple[Network, list[Node]]:
    """250 nodes that joined one after another."""
    network = Network(SEED)
    return network, grow(network, 250)


def test_every_node_is_found_by_every_other(swarm: tuple[Network, list[Node]]) -> None:
    network, nodes = swarm
    for _ in range(30):
        seeker, sought = network.rng.sample(nodes, 2)
        found = seeker.nearest(node_id(sought.core.own))
        assert found[0] == sought.core.own, f"seed {SEED}"


def test_a_lookup_ends_at_the_nearest_nodes_there_are(swarm: tuple[Network, list[Node]]) -> None:
    network, nodes = swarm
    hits = 0
    for _ in range(20):
        target = network.rng.randbytes(20)
        found = network.rng.choice(nodes).nearest(target)
        nearest = sorted(nodes, key=lambda node: distance(node_id(node.core.own), target))[:20]
        hits += len({node.core.own for node in nearest} & set(found))
    assert hits >= 0.97 * 400, f"seed {SEED}: {hits} of 400"


def test_a_lookup_asks_far_fewer_than_everybody(swarm: tuple[Network, list[Node]]) -> None:
    network, nodes = swarm
    before = network.questions
    network.rng.choice(nodes).nearest(network.rng.randbytes(20))
    assert network.questions - before <= 60, f"seed {SEED}"


def test_coverage_is_complete_for_everybody_and_survives_a_quarter_leaving_without_a_word() -> None:
    network = Network(SEED + 1, loss=0.01)
    nodes = grow(network, 120)
    servers = network.rng.sample(nodes, 30)
    spans = {node.core.own: random_span(network.rng) for node in servers}
    for node in servers:
        node.serve(spans[node.core.own])
    network.run()
    for node in network.rng.sample(nodes, 5):
        assert node.coverage() == spans, f"seed {SEED + 1}"

    for node in network.rng.sample(nodes, len(nodes) // 4):
        node.alive = False
    living = [node for node in nodes if node.alive]
    found = [len(node.coverage()) for node in network.rng.sample(living, 5)]
    assert min(found) >= 0.95 * len(spans), f"seed {SEED + 1}: {found} of {len(spans)}"

    network.now += 600
    standing = {node.core.own: spans[node.core.own] for node in servers if node.alive}
    for node in servers:
        if node.alive:
            node.serve(spans[node.core.own])
    network.run()
    network.now += 1300  # what the dead said has ended, what was said again has not
    for node in network.rng.sample(living, 5):
        assert node.coverage() == standing, f"seed {SEED + 1}"


def test_a_peer_that_moves_or_leaves_is_seen_so_at_once() -> None:
    network = Network(SEED + 2)
    nodes = grow(network, 40)
    mover, leaver = nodes[7], nodes[11]
    mover.serve(Span(0, 4))
    leaver.serve(Span(4, 24))
    network.run()
    network.now += 1
    mover.serve(Span(12, 24))
    leaver.publish(leaver.core.publications.withdraw(RecordKind.COVERAGE, MODEL, network.now))
    network.run()
    for node in network.rng.sample(nodes, 5):
        assert node.coverage() == {mover.core.own: Span(12, 24)}, f"seed {SEED + 2}"


def test_a_swarm_of_newcomers_at_once_ends_up_whole() -> None:
    """Thirty peers start in the same second, each knowing one that may itself have only just started."""
    network = Network(SEED + 3)
    nodes = [network.add() for _ in range(30)]
    for number, node in enumerate(nodes[1:], start=1):
        network.after(network.rng.random(), lambda n=node, s=nodes[number // 2]: n.join(s.contact))
    network.run()
    for node in nodes:
        node.find([node_id(node.core.own)], lambda _l, _r: None)
    network.run()
    for node in nodes:
        node.serve(Span(0, 24))
    network.run()
    for node in network.rng.sample(nodes, 8):
        assert len(node.coverage()) == 30, f"seed {SEED + 3}"


@pytest.mark.parametrize("liars", [10, 30])
def test_liars_hide_and_invent_nothing(liars: int) -> None:
    """Some nodes answer with invented contacts and garbage instead of records."""
    network = Network(SEED + 4)
    nodes = grow(network, 80)
    for node in nodes[10 : 10 + liars]:
        lie(node)
    nodes[0].serve(Span(0, 24))
    nodes[1].serve(Span(0, 12))
    network.run()
    truth = {nodes[0].core.own: Span(0, 24), nodes[1].core.own: Span(0, 12)}
    for node in nodes[50:55]:
        assert node.coverage() == truth, f"seed {SEED + 4}"


def lie(node: Node) -> None:
    honest = node.core.answer
    rng = node.network.rng

    def answer(
        kind: str, peer: PeerId, came_from: Address | None, data: bytes, now: float
    ) -> tuple[bytes, Contact | None]:
        if kind != FIND:
            return honest(kind, peer, came_from, data, now)
        invented = tuple(Contact(PeerId(rng.randbytes(32)), (node.address,)) for _ in range(20))
        garbage = tuple(rng.randbytes(rng.randrange(1024)) for _ in range(20))
        found = messages.FindAnswer(node.core.sender, b"t" * 16, invented, garbage)
        return messages.encode_found(found), None

    node.core.answer = answer  # type: ignore[method-assign]
