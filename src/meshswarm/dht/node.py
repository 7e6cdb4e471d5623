"""This peer's place in the distributed hash table: joining, saying what it serves, asking who serves what.

The rule this file keeps: a question costs at most one short time-out, whoever is gone; what was learned is remembered
for seconds and refreshed behind the answer; what this peer says is said again before it expires, to newcomers as soon
as they appear, and taken back when it leaves. At rest, next to nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from meshswarm.artifacts.manifests.card import ModelCard, SignedCard
from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.announcer import Announcer
from meshswarm.dht.answers import Answers
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.core import Core
from meshswarm.dht.holders import HolderRecord, read_holders
from meshswarm.dht.keys import Topics
from meshswarm.dht.known_peers import MAX_KNOWN_PEERS, KnownPeer, SeenPeer
from meshswarm.dht.limits import RateLimit
from meshswarm.dht.listing import PeerEntry, count_cards, read_coverage, read_signed_cards
from meshswarm.dht.messages import Sender, Verdict
from meshswarm.dht.networks import is_local
from meshswarm.dht.questions import QUESTION_TIMEOUT_S, Questions
from meshswarm.dht.reachability import Reachability
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import RecordKind, SignedRecord
from meshswarm.dht.table import Neighbour
from meshswarm.dht.upkeep import Periods, Upkeep
from meshswarm.identity import Identity, PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

LEAVE_TIMEOUT_S = 3.0
DIALS_FOR_OTHERS_PER_S, DIALS_FOR_OTHERS_BURST = 0.5, 4.0  # whoever asks, and wherever to
_MAX_READ_OF = 4096
_FIRST_CONNECTIONS = 8  # each of them may show at once where this peer is; later ones are looked at every round


class Dht:
    """One peer's node of the table. Usable at once; `run` it for what has to happen in the background.

    `clock`: Unix time in seconds. `server` False: this peer cannot be dialled, so it enters nobody's table; None: that
    is found out (`reachability`).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        swarm: Swarm,
        *,
        clock: Callable[[], float] = time.time,
        periods: Periods | None = None,
        rng: random.Random | None = None,
        server: bool | None = None,
        question_timeout_s: float = QUESTION_TIMEOUT_S,
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._rng = rng or random.Random()
        self._reachability = Reachability(server)
        self._n_connected = 0
        self._topics = Topics(swarm)
        self._core = Core(identity, self._topics, secret=os.urandom(32), sender=self._sender())
        self._dials = RateLimit(per_s=DIALS_FOR_OTHERS_PER_S, burst=DIALS_FOR_OTHERS_BURST)
        self._questions = Questions(endpoint, self._core, clock, self._met, question_timeout_s)
        self._announcer = Announcer(self._core, self._questions, clock)
        self._upkeep = Upkeep(
            self._core,
            self._questions,
            self._announcer,
            periods or Periods(),
            clock,
            self._rng,
            self._renew_sender,
        )
        self._answers = Answers(self._core, self._questions, self._upkeep, clock)
        self._read_of: OrderedDict[PeerId, None] = OrderedDict()  # who was read to serve something, longest ago first
        for kind in (messages.PING, messages.FIND, messages.STORE):
            endpoint.handle_request(
                kind,
                self._answerer(kind),
                max_request_bytes=messages.MAX_QUESTION_BYTES,
                max_reply_bytes=messages.MAX_ANSWER_BYTES,
            )
        for kind, answer in ((messages.DIAL_BACK, self._answer_dial_back), (messages.DIAL, self._answer_dial)):
            endpoint.handle_request(kind, answer, max_request_bytes=4096, max_reply_bytes=4096)
        endpoint.on_connection(self._connected)
        swarm.on_change(self._swarm_changed)

    # -- membership

    async def join(self, peers: Iterable[tuple[PeerId, tuple[Address, ...]]]) -> int:
        """Finds the swarm through any of `peers`; how many peers are known then, 0 when none of them answered.

        `run` goes on trying as long as nobody is known.
        """
        self._renew_sender()
        return await self._upkeep.join(Contact(peer, addresses) for peer, addresses in peers)

    async def run(self) -> None:
        """The background work, until cancelled."""
        await self._upkeep.run()

    def known_peers(self) -> list[KnownPeer]:
        """Whom to ask first at the next start: `join` takes them as they are."""
        held = self.unreachable()
        near = sorted(self._core.table.neighbours(), key=lambda neighbour: -neighbour.last_seen)
        contacts = [n.contact for n in near if n.contact.peer not in held] + self._upkeep.remembered()
        known: dict[PeerId, tuple[Address, ...]] = {}
        for contact in contacts:
            known.setdefault(contact.peer, contact.addresses)
        return list(known.items())[:MAX_KNOWN_PEERS]

    def seen_peers(self) -> list[SeenPeer]:
        """The peers in this one's table, those first that are best to start from another time; none when this peer is
        alone."""
        held = self.unreachable()
        live = [each for each in self._core.table.worth_keeping() if each.contact.peer not in held]
        return [SeenPeer(each.contact.peer, each.contact.addresses, each.last_seen) for each in live]

    def unreachable(self) -> frozenset[PeerId]:
        """Peers that did not answer lately and are left alone for a while: not worth a place in a route."""
        return self._core.table.back_off.held(self._clock())

    def report_unreachable(self, peer: PeerId) -> None:
        """Another part of the program could not reach `peer`."""
        self._core.table.failed(peer, self._clock())

    # -- saying

    async def publish_coverage(self, record: CoverageRecord) -> None:
        """Says what this peer serves of one model, in place of what it said of that model before.

        It is repeated until `withdraw`. `seq` and `expires_ms` of `record` are not used: both are set here, each time.
        Where a translator forwards to this peer, its address there is added.
        """
        if record.peer != self._core.own:
            raise ValueError("a peer publishes its own coverage only")
        addresses = merge_addresses(self._reachability.extra_addresses, record.addresses)
        record = replace(record, addresses=addresses)
        layers = record.span.start, record.span.stop
        await self._announcer.say(RecordKind.COVERAGE, record.model_id, record.body(), layers)

    async def publish_card(self, card: SignedCard) -> None:
        """Says that this peer holds a model. Repeated until `withdraw`."""
        if card.author != self._core.own:
            raise ValueError("a peer publishes its own cards only")
        self.learn_layers(card.card.model_id, card.card.n_layers)
        await self._announcer.say(RecordKind.CARD, card.card.model_id, card.wire)

    def learn_layers(self, model_id: bytes, n_layers: int) -> None:
        """This peer has seen the model's own header: records of layers beyond are neither kept nor read from now on.
        A stranger's card is no reason to call this."""
        self._core.store.learn_layers(model_id, n_layers)

    async def say_holding(self, record: HolderRecord) -> None:
        """Says which files of a model others may fetch here, in place of what was said of that model's before.

        Repeated until `stop_holding`. `seq` and `expires_ms` of `record` are not used.
        """
        if record.peer != self._core.own:
            raise ValueError("a peer says only what it holds itself")
        record = replace(record, addresses=merge_addresses(self._reachability.extra_addresses, record.addresses))
        await self._announcer.say(RecordKind.HOLDER, record.model_id, record.body())

    async def stop_holding(self, model_id: bytes) -> None:
        """Takes back that files of a model can be fetched here; its card too, unless this peer serves the model."""
        await self._withdraw(model_id, RecordKind.HOLDER)

    async def withdraw(self, record: CoverageRecord | None = None) -> None:
        """Takes back that the model of `record` is served here, or all that was said of any model; others know at
        once. The model's card stands as long as its files are held."""
        await self._withdraw(*(() if record is None else (record.model_id, RecordKind.COVERAGE)))

    # -- asking

    async def coverage(
        self, model_id: bytes, n_layers: int, *, fresh: bool = False, ask: bool = True
    ) -> list[CoverageRecord]:
        """Who serves layers of a model: verified, unexpired, the newest of each peer, own ones included.

        Without `fresh` an answer may be some seconds old, except for what other peers have sent here since. Without
        `ask` it is what is known here already, and nobody is asked.
        """
        records = await self._records(self._topics.span(model_id, 0, n_layers), fresh=fresh, ask=ask)
        read = read_coverage(records)
        found = [record for record in read if record.model_id == model_id and record.span.stop <= n_layers]
        for record in found:
            self._read_of.pop(record.peer, None)
            self._read_of[record.peer] = None
        while len(self._read_of) > _MAX_READ_OF:
            self._read_of.popitem(last=False)
        return found

    async def first_holders(self, model_ids: Iterable[bytes]) -> dict[bytes, list[CoverageRecord]]:
        """Who serves the first layers of each of many models: one key of each, looked up together."""
        wanted = list(model_ids)
        found: dict[bytes, list[CoverageRecord]] = {model_id: [] for model_id in wanted}
        for record in read_coverage(await self._records([self._topics.block(each, 0) for each in wanted])):
            found.get(record.model_id, []).append(record)
        return found

    async def holders(self, model_id: bytes, *, fresh: bool = False) -> list[HolderRecord]:
        """Who says that files of a model can be fetched from him, this peer included; the newest of each peer."""
        return read_holders(await self._records([self._topics.holders(model_id)], fresh=fresh), model_id)

    async def cards(self, *, fresh: bool = False, ask: bool = True) -> list[SignedCard]:
        """The card of every holder of every model, with who signed it. Without `ask`: as far as is known here."""
        return read_signed_cards(await self._records([self._topics.models], fresh=fresh, ask=ask))

    async def models(self, *, fresh: bool = False) -> list[tuple[ModelCard, int]]:
        """Every model somebody holds, with the number of holders; those whose holders were met in most networks first,
        then those with most holders."""
        return count_cards(await self.cards(fresh=fresh), self.met_in)

    async def peers(self) -> list[PeerEntry]:
        """Every other peer known here, by table or by record, with what it serves as far as that is known here."""
        names = {card.model_id: card.name for card, _ in await self.models()}
        now = self._clock()
        serves: dict[PeerId, list[CoverageRecord]] = {}
        for record in read_coverage(self._answers.everything().live(now)):
            serves.setdefault(record.peer, []).append(record)
        near = {neighbour.contact.peer: neighbour for neighbour in self._core.table.neighbours()}
        known = sorted((near.keys() | serves.keys()) - {self._core.own})
        return [self._entry(peer, near.get(peer), serves.get(peer, []), names, now) for peer in known]

    def rtt_s(self, peer: PeerId) -> float | None:
        """The round trip to `peer` as last measured here."""
        connection = self._endpoint.connection(peer)
        if connection is not None and not connection.closed and connection.rtt_s is not None:
            return connection.rtt_s
        known = self._core.table.get(peer)
        return None if known is None else known.rtt_s

    def knows(self, peer: PeerId) -> bool:
        """Whether it is in the table, or its word is kept here or was read lately. At once; nobody is asked."""
        return self._core.table.get(peer) is not None or self._core.store.has_of(peer) or peer in self._read_of

    def met_in(self, peer: PeerId) -> bytes | None:
        """Which network this peer has met `peer` in, at an address it proved to have; None when it never has.

        On a local network each host counts as one, in a private swarm each member.
        """
        connection = self._endpoint.connection(peer)
        if connection is not None and not connection.closed:
            address = connection.remote_address
        elif (known := self._core.table.get(peer)) is not None and known.contact.addresses:
            address = known.contact.addresses[0]
        else:
            return None
        if self._topics.is_private:
            return peer.key
        return self._core.table.networks.of(address) or address.host.encode()

    # -- inside

    @property
    def is_server(self) -> bool:
        """True when others may dial this peer, as far as is known here."""
        return self._reachability.is_server

    @property
    def notices(self) -> list[str]:
        """What a person should know about the swarm: clocks that are wrong, keys that two peers use, crowds."""
        return self._core.notices.sentences

    async def _records(self, keys: Iterable[bytes], *, fresh: bool = False, ask: bool = True) -> list[SignedRecord]:
        records = await self._answers.ask(keys, fresh=fresh) if ask else self._answers.known(keys)
        return records.live(self._clock())

    async def _withdraw(self, subject: bytes | None = None, kind: RecordKind | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await self._announcer.withdraw(subject, kind)

    def _connected(self, connection: Connection) -> None:
        self._core.saw_instance(connection.peer_id, connection.instance)
        self._n_connected += 1
        if self._n_connected <= _FIRST_CONNECTIONS:
            self._renew_sender()

    def _swarm_changed(self) -> None:
        self._core.swarm_changed()
        self._answers.clear()

    def _sender(self) -> Sender:
        addresses = (*self._reachability.extra_addresses, *self._endpoint.addresses)
        return Sender(self._reachability.is_server, addresses)

    def _renew_sender(self) -> None:
        self._reachability.observed(self._endpoint.addresses, self._endpoint.observed_addresses.values())
        self._core.sender = self._sender()
        if self._reachability.wants_check(self._clock()):
            self._upkeep.do_later("reachability", self._check_reachability)

    async def _check_reachability(self) -> None:
        """Has a peer find another that dials this one."""
        away = [n.contact for n in self._core.table.neighbours() if n.network is not None]
        verdict = await self._questions.dial_back(self._rng.choice(away)) if away else Verdict.UNKNOWN
        self._reachability.checked(verdict, self._clock())
        self._core.sender = self._sender()

    async def _answer_dial_back(self, peer: PeerId, question: bytes) -> bytes:
        """Only the address that the asker comes from is dialled: nobody is aimed at anybody else."""
        messages.decode_dial_back(question)
        self._core.spend_dial(peer, self._clock())
        connection = self._endpoint.connection(peer)
        verdict = Verdict.UNKNOWN
        if connection is not None and not is_local(connection.remote_address):
            address = connection.remote_address
            for dialler in self._core.diallers_for(peer, address, self._rng):
                verdict = await self._questions.dial_for(dialler, Contact(peer, (address,)))
                if verdict is not Verdict.UNKNOWN:
                    break
        return messages.encode_verdict(self._core.sender, verdict)

    async def _answer_dial(self, peer: PeerId, question: bytes) -> bytes:
        _, wanted = messages.decode_dial(question)
        self._core.spend_dial(peer, self._clock())
        verdict = Verdict.UNKNOWN
        is_meant = wanted.peer != self._core.own and not any(is_local(address) for address in wanted.addresses[:1])
        # One allowance for whoever asks: to whom the dials go it is all the same.
        if is_meant and self._dials.take(self._core.own, 1.0, self._clock()) == 0.0:
            verdict = await self._questions.dial_afresh(Contact(wanted.peer, wanted.addresses[:1]))
        return messages.encode_verdict(self._core.sender, verdict)

    def _answerer(self, kind: str) -> Callable[[PeerId, bytes], Awaitable[bytes]]:
        async def answer(peer: PeerId, question: bytes) -> bytes:
            connection = self._endpoint.connection(peer)
            came_from = None if connection is None else connection.remote_address
            reply, newcomer = self._core.answer(kind, peer, came_from, question, self._clock())
            if newcomer is not None:
                self._met(newcomer)
            return reply

        return answer

    def _met(self, contact: Contact) -> None:
        self._upkeep.greet(contact)

    def _entry(
        self,
        peer: PeerId,
        near: Neighbour | None,
        serves: list[CoverageRecord],
        names: dict[bytes, str],
        now: float,
    ) -> PeerEntry:
        told = (record.addresses for record in serves)
        return PeerEntry(
            peer=peer,
            addresses=merge_addresses(near.contact.addresses if near else (), *told),
            seen_s_ago=None if near is None else max(0.0, now - near.last_seen),
            rtt_s=self.rtt_s(peer),
            reachable=peer not in self.unreachable(),
            serves=tuple(serves),
            model_names=names,
        )
