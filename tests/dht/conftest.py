"""Peers, records, cores and whole networks of cores for the tests of the table."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact
from meshswarm.dht.core import Core, Delivery
from meshswarm.dht.keys import Topics, node_id
from meshswarm.dht.lookup import Lookup, next_batch
from meshswarm.dht.messages import FIND, PING, STORE, Sender, StoreStatus
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, RecordSet, SignedRecord
from meshswarm.errors import RefusedError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

MODEL = bytes(range(32))
NOW = 1_800_000_000.0


@pytest.fixture
def now() -> float:
    return NOW


@pytest.fixture(scope="session")
def topics() -> Topics:
    return Topics(Swarm("tests"))


@pytest.fixture(scope="session")
def identity() -> Callable[[int], Identity]:
    """The key pair of peer number n."""
    return lambda number: Identity.from_seed(number.to_bytes(32))


@pytest.fixture(scope="session")
def make_coverage(identity: Callable[[int], Identity]) -> Callable[..., CoverageRecord]:
    """A coverage record of peer number n, some fields replaced."""

    def make(number: int = 1, span: str = "0:10", **changes: object) -> CoverageRecord:
        fields: dict[str, object] = {
            "peer": identity(number).peer_id,
            "addresses": (Address("127.0.0.1", 4000 + number),),
            "model_id": bytes(range(32)),
            "span": Span.parse(span),
            "loaded": True,
            "numclass": "llama.cpp b1 cpu avx2",
            "n_ctx": 4096,
            "us_per_layer": 300,
            "prefill_us_per_row_layer": 90,
            "free_kv_tokens": 16384,
            "roles": ("server",),
            "rtts": ((b"12345678", 1500),),
        }
        return CoverageRecord(**(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_record(
    identity: Callable[[int], Identity], make_coverage: Callable[..., CoverageRecord], topics: Topics
) -> Callable[..., SignedRecord]:
    """A signed record of peer number n, some fields replaced."""

    def make(number: int = 1, span: str = "0:10", *, life_s: float = 600, **changes: object) -> SignedRecord:
        said = make_coverage(number, span)
        fields: dict[str, object] = {
            "kind": RecordKind.COVERAGE,
            "scope": topics.scope,
            "subject": said.model_id,
            "layers": (said.span.start, said.span.stop),
            "seq": 1,
            "expires_ms": int((NOW + life_s) * 1000),
            "body": said.body(),
        }
        return SignedRecord.sign(identity(number), **(fields | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture
def make_core(identity: Callable[[int], Identity], topics: Topics) -> Callable[[int], Core]:
    """The node of peer number n, at 127.0.0.1:4000+n."""

    def make(number: int) -> Core:
        sender = Sender(True, (Address("127.0.0.1", 4000 + number),))
        return Core(identity(number), topics, secret=bytes(32), sender=sender)

    return make


class Node:
    """What the shell does, over a network that answers at once."""

    def __init__(self, network: Network, identity: Identity, address: Address, *, server: bool = True) -> None:
        self.network = network
        self.identity = identity
        self.address = address
        secret = bytes(31) + bytes([len(network.nodes) % 256])
        self.core = Core(identity, Topics(network.swarm), secret=secret, sender=Sender(server, (address,)))
        self.ahead_s = 0.0
        self.is_alive = True
        self.asked: list[PeerId] = []

    @property
    def contact(self) -> Contact:
        return Contact(self.core.own, (self.address,))

    @property
    def now(self) -> float:
        return self.network.now + self.ahead_s

    def ping(self, contact: Contact) -> bool:
        answer = self.network.ask(self, contact, PING, self.core.ping_question(self.now))
        if answer is None:
            self.core.failed(contact, (), self.now, unreachable=True)
            return False
        if self.core.take_pong(contact, answer, self.now, None, is_outbound=True):
            self.introduce(contact)
        return True

    def look_up(self, *targets: bytes) -> tuple[list[Lookup], RecordSet]:
        """All lookups together, as the shell drives them."""
        return self.drive([self.core.lookup(target, self.now) for target in targets])

    def drive(self, lookups: list[Lookup]) -> tuple[list[Lookup], RecordSet]:
        records = RecordSet()
        while not all(lookup.done for lookup in lookups):
            for contact, together in next_batch(lookups, self.now, messages.MAX_FIND_KEYS):
                question = self.core.find_question(together, wants_records=True)
                answer = self.network.ask(self, contact, FIND, question)
                if answer is None:
                    self.core.failed(contact, together, self.now, unreachable=True)
                    continue
                found = messages.decode_found(answer)
                is_new = self.core.take_found(contact, found, together, self.now, None, is_outbound=True)
                keys = [lookup.target for lookup in together]
                read = [self.core.read_record(data, self.now, keys) for data in found.records]
                records.update(record for record in read if record is not None)
                if is_new:
                    self.introduce(contact)
        return lookups, records

    def join(self, other: Node) -> None:
        self.ping(other.contact)
        self.look_up(node_id(self.core.own))

    def publish(self, records: list[SignedRecord]) -> list[Lookup]:
        keys = dict.fromkeys(key for record in records for key in self.core.topics.of_record(record))
        lookups, _ = self.look_up(*keys)
        self.store(self.core.deliveries(records, lookups, self.now))
        return lookups

    def store(self, deliveries: list[Delivery]) -> list[StoreStatus]:
        statuses = []
        for delivery in deliveries:
            answer = self.network.ask(self, delivery.contact, STORE, delivery.question)
            if answer is None:
                self.core.failed(delivery.contact, (), self.now, unreachable=True)
                continue
            stored = self.core.take_stored(delivery.contact, answer, self.now)
            self.core.delivered(delivery, stored)
            statuses += [status for row in stored.statuses for status in row]
        return statuses

    def introduce(self, contact: Contact) -> None:
        if self.core.owed_to(contact, self.now):
            lookup = self.core.lookup(contact.node_id, self.now)
            answer = self.network.ask(self, contact, FIND, self.core.find_question([lookup], wants_records=False))
            if answer is not None:
                token = messages.decode_found(answer).token
                self.store(self.core.owed_deliveries(contact, token, self.now))

    def say(self, layers: tuple[int, int], body: bytes = b"said") -> list[SignedRecord]:
        return self.core.publications.say(RecordKind.COVERAGE, MODEL, body, self.now, layers=layers)

    def sees(self, n_layers: int = 24) -> dict[PeerId, tuple[int, int]]:
        """Who serves which layers, as found from here."""
        keys = self.core.topics.span(MODEL, 0, n_layers)
        _, records = self.look_up(*keys)
        records.update(record for key in keys for record in self.core.store.get(key, self.now))
        return {record.author: (record.start, record.stop) for record in records.live(self.now)}


class Network:
    """Cores that reach each other at once, where nothing is `cut`; the time moves when a test says so.

    A question arrives only where it is sent: at the node that owns the key and has one of the contact's addresses.
    """

    def __init__(self, swarm: Swarm, seed: int) -> None:
        self.swarm = swarm
        self.rng = random.Random(seed)
        self.now = NOW
        self.nodes: dict[PeerId, Node] = {}
        self.is_cut: Callable[[Node, Node], bool] = lambda one, other: False
        self.questions = 0

    def add(self, address: str | None = None, *, identity: Identity | None = None, server: bool = True) -> Node:
        """A node at `address`, or somewhere on the internet, in a network of its own."""
        if address is None:
            address = f"{self.rng.randrange(11, 100)}.{self.rng.randrange(256)}.{self.rng.randrange(256)}.1"
        who = identity or Identity.from_seed(self.rng.randbytes(32))
        node = Node(self, who, Address(address, 4000), server=server)
        self.nodes[who.peer_id] = node
        return node

    def grow(self, count: int) -> list[Node]:
        """`count` nodes, each joining through another."""
        nodes = [self.add()]
        for _ in range(count - 1):
            nodes.append(self.add())
            nodes[-1].join(self.rng.choice(nodes[:-1]))
        for node in nodes:
            node.look_up(node_id(node.core.own))
        return nodes

    def ask(self, asker: Node, contact: Contact, kind: str, data: bytes) -> bytes | None:
        self.questions += 1
        asker.asked.append(contact.peer)
        node = self.nodes.get(contact.peer)
        if node is None or not node.is_alive or node.address not in contact.addresses or self.is_cut(asker, node):
            return None
        try:
            answer, newcomer = node.core.answer(kind, asker.core.own, asker.address, data, node.now)
        except RefusedError:
            return None
        if newcomer is not None:
            node.introduce(newcomer)
        return answer


@pytest.fixture
def make_network() -> Callable[..., Network]:
    return lambda seed=1, swarm=None: Network(swarm or Swarm("strangers"), seed)
