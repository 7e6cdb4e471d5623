"""A swarm of gossip cores on one virtual clock: links that take time, peers that die, stall or lie, bytes counted.

Every message costs what two real endpoints were seen to send for one (`scripts/bench/gossip.py --calibrate`). The rule
this file keeps: with one seed there is one run.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from meshswarm.config import Address
from meshswarm.dht.wire import WireError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip import messages
from meshswarm.routing.gossip.ask import Ask
from meshswarm.routing.gossip.core import Gossip
from meshswarm.routing.gossip.messages import PUSH, Word
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.words import Accusation
from meshswarm.span import Span

SCOPE = bytes(range(16))
MODEL = bytes(range(32))
START_MS = 1_800_000_000_000
REQUEST_BYTES, REPLY_BYTES = 140, 125  # beyond the payloads, with headers down to IP and the acknowledgements
DIAL_BYTES, DIALLED_BYTES = 4400, 3530


@dataclass(eq=False)
class Node:
    """One peer. `sent`: bytes since the counters were last cleared."""

    identity: Identity
    core: Gossip
    address: Address
    place: float
    is_up: bool = True
    stalled_until: float = 0.0
    sent: int = 0
    linked: set[PeerId] = field(default_factory=set)
    ticket: int = 0

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id


class World:
    """`one_way_s`: the longest way between two peers; `loss`: the share of messages whose first try is lost."""

    def __init__(self, seed: int, *, one_way_s: float = 0.1, loss: float = 0.0) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.one_way_s = one_way_s
        self.loss = loss
        self.nodes: dict[PeerId, Node] = {}
        self.parted: Callable[[Node, Node], bool] = lambda one, other: False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # -- peers

    def add(self, number: int, *, started_ms: int = START_MS, report: LoadReport | None = None) -> Node:
        identity = Identity.from_seed(number.to_bytes(32))
        core = Gossip(
            identity,
            SCOPE,
            rng=random.Random(self.seed * 1_000_003 + number),
            now=self.now,
            started_ms=started_ms + int(self.now * 1000),
            secret=number.to_bytes(16),
        )
        address = Address(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 4000)
        node = Node(identity, core, address, self.rng.random())
        self.nodes[node.peer] = node
        core.publish(report or LoadReport(node.peer))
        self._plan(node)
        return node

    def serve(
        self, node: Node, span: str = "0:10", model_id: bytes = MODEL, n_layers: int = 30, **more: object
    ) -> None:
        fields: dict[str, object] = {
            "peer": node.peer, "model_id": model_id, "span": Span.parse(span), "n_layers": n_layers,
            "free_kv_tokens": 16384, "us_per_layer": 300, "role": "server",
        }  # fmt: skip
        node.core.publish(LoadReport(**(fields | more)))  # type: ignore[arg-type]

    def introduce(self, node: Node, others: list[Node], *, is_kin: bool = False) -> None:
        for other in others:
            if other is not node:
                node.core.met(other.peer, (other.address,), is_kin=is_kin)

    def swarm(self, count: int, *, contacts: int = 20) -> list[Node]:
        """`count` peers that each know some others, as a DHT's table would give them."""
        nodes = [self.add(number) for number in range(1, count + 1)]
        for node in nodes:
            self.introduce(node, self.rng.sample(nodes, min(contacts, count)))
        return nodes

    def kill(self, node: Node) -> None:
        """Without a word."""
        node.is_up = False

    def stall(self, node: Node, seconds: float) -> None:
        """Its process does not run; what comes in waits."""
        node.stalled_until = self.now + seconds
        self._plan(node)

    def leave(self, node: Node) -> None:
        node.core.leave(self.now)
        self._carry(node)
        self.after(0.5, lambda: self.kill(node))

    # -- time

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> float:
        """Until then, or until `until()` holds; how long that took."""
        began, end = self.now, self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if until is not None and until():
                return self.now - began
        self.now = end
        return seconds

    def _plan(self, node: Node) -> None:
        node.ticket += 1
        ticket = node.ticket
        at = max(node.core.next_at, self.now, node.stalled_until)
        self.after(at - self.now, lambda: self._tick(node, ticket))

    def _tick(self, node: Node, ticket: int) -> None:
        if ticket != node.ticket or not node.is_up:
            return None
        if node.stalled_until > self.now:
            return self._plan(node)
        node.core.tick(self.now)
        self._carry(node)
        return None

    # -- messages

    def _flight_s(self, one: Node, other: Node) -> float:
        apart = abs(one.place - other.place)
        flight = 0.002 + self.one_way_s * apart * self.rng.uniform(1.0, 1.1)
        while self.loss and self.rng.random() < self.loss:
            flight += 3 * flight + 0.02
        return flight

    def _carry(self, node: Node) -> None:
        """Sends what its core asks."""
        for ask in node.core.take_asks():
            self._send(node, ask)
        self._plan(node)

    def _send(self, node: Node, ask: Ask) -> None:
        there = self.nodes.get(ask.peer)
        done = [False]

        def expire() -> None:
            if not done[0] and node.is_up:
                done[0] = True
                if node.stalled_until > self.now:
                    self.after(node.stalled_until - self.now, lambda: self._failed(node, ask))
                else:
                    self._failed(node, ask)

        is_linked = ask.peer in node.linked
        if not is_linked and (not ask.dials or there is None or there.address not in ask.addresses):
            self.after(0.0, expire)
            return
        self.after(ask.timeout_s, expire)
        if there is None or not there.is_up or self.parted(node, there):
            node.sent += len(ask.payload) + REQUEST_BYTES if is_linked else DIAL_BYTES // 2
            return
        flight = self._flight_s(node, there)
        if not is_linked:
            node.sent += DIAL_BYTES
            there.sent += DIALLED_BYTES
            flight *= 5  # two round trips before the question
        node.sent += len(ask.payload) + REQUEST_BYTES
        self.after(flight, lambda: self._arrive(node, there, ask, done))

    def _arrive(self, node: Node, there: Node, ask: Ask, done: list[bool]) -> None:
        if not there.is_up:
            return
        if there.stalled_until > self.now:
            self.after(there.stalled_until - self.now, lambda: self._arrive(node, there, ask, done))
            return
        for one, other in ((node, there), (there, node)):
            if other.peer not in one.linked:
                one.linked.add(other.peer)
                one.core.connected(other.peer, other.address, self.now)
        try:
            reply = there.core.answer(ask.kind, node.peer, ask.payload, self.now)
        except WireError:
            self._carry(there)
            self.after(self._flight_s(there, node), lambda: self._refused(node, ask, done))
            return
        there.sent += len(reply) + REPLY_BYTES
        self._carry(there)
        self.after(self._flight_s(there, node), lambda: self._return(node, ask, reply, done))

    def _return(self, node: Node, ask: Ask, reply: bytes, done: list[bool]) -> None:
        if done[0] or not node.is_up:
            return
        if node.stalled_until > self.now:
            self.after(node.stalled_until - self.now, lambda: self._return(node, ask, reply, done))
            return
        done[0] = True
        node.core.took(ask, reply, self.now)
        self._carry(node)

    def _refused(self, node: Node, ask: Ask, done: list[bool]) -> None:
        if not done[0] and node.is_up:
            done[0] = True
            node.core.refused(ask, self.now)
            self._carry(node)

    def _failed(self, node: Node, ask: Ask) -> None:
        node.core.failed(ask, self.now)
        self._carry(node)

    # -- views

    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_up]

    def who_thinks_gone(self, peer: PeerId) -> list[Node]:
        return [node for node in self.up() if node.peer != peer and peer in node.core.gone(self.now)]


# -- what tests look at


def gone_times(world: World, dead: PeerId, seconds: float) -> dict[PeerId, float]:
    """When each other peer began to think that it is gone, in seconds from now."""
    began, seen = world.now, {}

    def look() -> bool:
        for node in world.up():
            if node.peer not in seen and node.peer != dead and dead in node.core.gone(world.now):
                seen[node.peer] = world.now - began
        return len(seen) == len(world.up()) - (dead in {node.peer for node in world.up()})

    while world.now < began + seconds and not look():
        world.run(0.2)
    return seen


def neighbours_of(world: World, node: Node) -> list[Node]:
    return [each for each in world.up() if node.peer in each.core.neighbours.active]


def watchers_of(world: World, node: Node) -> list[Node]:
    return [world.nodes[peer] for peer in node.core.vigil.watchers.chosen]


def push(world: World, sender: Node, to: Iterable[Node], *words: Word) -> None:
    """A peer says what it likes to others, who answer for themselves."""
    for node in to:
        node.core.answer(PUSH, sender.peer, messages.encode_push(words), world.now)
        world._carry(node)


def accusation(world: World, about: Node, by: Iterable[Node], at: float | None = None) -> Accusation:
    """Of the newest appointment of `about`; `at`: when they state it, on the world's clock."""
    appointment = about.core.words.appointment
    assert appointment is not None
    at_s = START_MS // 1000 + int(world.now if at is None else at)
    states = [Accusation.state(node.identity, appointment, at_s) for node in by]
    merged = states[0]
    for each in states[1:]:
        merged = merged.merged(each)
    return merged
