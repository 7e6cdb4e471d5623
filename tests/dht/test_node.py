"""Whole peers on loopback: real endpoints, real records, one clock."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.config import Address
from meshswarm.dht import messages
from meshswarm.dht.contact import Contact
from meshswarm.dht.holders import HolderRecord
from meshswarm.dht.messages import Sender, StoreQuestion, StoreStatus, Verdict
from meshswarm.dht.node import DIALS_FOR_OTHERS_BURST, DIALS_FOR_OTHERS_PER_S, Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.dht.signed import LIFETIME_S, SignedRecord
from meshswarm.dht.upkeep import Periods
from meshswarm.errors import RefusedError, RemoteProtocolError
from meshswarm.identity import Identity, PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.span import Span

MODEL = bytes(range(32))
N_LAYERS = 30
QUICK = Periods(round_s=0.05, rejoin_s=0.05)


class Clock:
    """Unix time that moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Peer:
    def __init__(self, identity: Identity, endpoint: Endpoint, dht: Dht) -> None:
        self.identity, self.endpoint, self.dht = identity, endpoint, dht

    @property
    def reach(self) -> tuple[PeerId, tuple[Address, ...]]:
        return self.endpoint.peer_id, (self.endpoint.address,)

    def record(self, span: str) -> CoverageRecord:
        return CoverageRecord(
            peer=self.endpoint.peer_id,
            addresses=tuple(self.endpoint.addresses),
            model_id=MODEL,
            span=Span.parse(span),
            loaded=True,
            numclass="cpu",
            n_ctx=4096,
            us_per_layer=300,
            prefill_us_per_row_layer=90,
            free_kv_tokens=16384,
        )

    async def serve(self, span: str) -> None:
        await self.dht.publish_coverage(self.record(span))

    async def sees(self, *, fresh: bool = False) -> dict[PeerId, str]:
        return {record.peer: str(record.span) for record in await self.dht.coverage(MODEL, N_LAYERS, fresh=fresh)}


class Loopback:
    """Starts peers and ends them."""

    def __init__(self, swarm: Swarm) -> None:
        self.clock = Clock()
        self.swarm = swarm
        self._endpoints: list[Endpoint] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(
        self,
        number: int,
        *,
        listen: Address | None = None,
        periods: Periods | None = None,
        run: bool = True,
        server: bool = True,
    ) -> Peer:
        identity = Identity.from_seed(number.to_bytes(32))
        endpoint = await Endpoint.bind(identity, listen or Address("127.0.0.1", 0), swarm=self.swarm)
        self._endpoints.append(endpoint)
        dht = Dht(
            endpoint,
            identity,
            self.swarm,
            clock=self.clock,
            periods=periods,
            rng=random.Random(number),
            server=server,
            question_timeout_s=1.0,
        )
        if run:
            self._tasks.append(asyncio.get_running_loop().create_task(dht.run()))
        return Peer(identity, endpoint, dht)

    async def chain(self, count: int) -> list[Peer]:
        """Peers of which each knows only the one before it."""
        peers = [await self.start(1)]
        for number in range(2, count + 1):
            peers.append(await self.start(number))
            await peers[-1].dht.join([peers[-2].reach])
        return peers

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        for endpoint in self._endpoints:
            await endpoint.close()


@pytest.fixture
async def loopback() -> AsyncIterator[Loopback]:
    loopback = Loopback(Swarm("dht-tests"))
    yield loopback
    await loopback.close()


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Waits for what another peer does in the background."""
    async with asyncio.timeout(20):
        while True:
            result = condition()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.01)


async def test_a_peer_that_knows_one_other_finds_all(loopback: Loopback) -> None:
    peers = await loopback.chain(6)
    everybody = {peer.endpoint.peer_id for peer in peers}
    for peer in peers:
        await until(lambda p=peer: len(p.dht.known_peers()) == 5)
        assert {known for known, _ in peer.dht.known_peers()} == everybody - {peer.endpoint.peer_id}


async def test_coverage_is_found_by_everybody_odd_and_overlapping_spans_included(loopback: Loopback) -> None:
    peers = await loopback.chain(4)
    spans = {0: "0:17", 1: "9:23", 2: "21:22"}
    for number, span in spans.items():
        await peers[number].serve(span)
    expected = {peers[number].endpoint.peer_id: span for number, span in spans.items()}
    for peer in peers:
        assert await peer.sees(fresh=True) == expected
    [own] = [r for r in await peers[3].dht.coverage(MODEL, N_LAYERS) if r.peer == peers[0].endpoint.peer_id]
    published = peers[0].record("0:17")
    assert (own.addresses, own.us_per_layer, own.numclass) == (published.addresses, 300, "cpu")
    assert own.expires_ms == int((loopback.clock.now + LIFETIME_S) * 1000)


async def test_who_is_in_the_table_or_was_read_is_known_and_nobody_else(loopback: Loopback) -> None:
    one, other = await loopback.start(1), await loopback.start(2)
    hidden = await loopback.start(3, server=False)
    await hidden.dht.join([other.reach])
    await hidden.serve("0:10")
    assert not one.dht.knows(other.identity.peer_id)
    await one.dht.join([other.reach])
    assert one.dht.knows(other.identity.peer_id) and other.dht.knows(hidden.identity.peer_id)
    await one.sees(fresh=True)
    assert one.dht.knows(hidden.identity.peer_id), "its record was read"
    assert not one.dht.knows(Identity.from_seed((99).to_bytes(32)).peer_id)


async def test_what_is_said_reaches_those_who_asked_before(loopback: Loopback) -> None:
    """The answer is remembered, but what others send here since is in it."""
    one, two = await loopback.chain(2)
    assert await two.sees() == {}
    await one.serve("0:30")
    assert await two.sees() == {one.endpoint.peer_id: "0:30"}


async def test_a_peer_alone_sees_itself(loopback: Loopback) -> None:
    one = await loopback.start(1)
    await one.serve("0:30")
    assert await one.sees() == {one.endpoint.peer_id: "0:30"}
    assert await one.dht.peers() == []


async def test_newcomers_are_told_without_asking(loopback: Loopback) -> None:
    one = await loopback.start(1)
    await one.serve("0:30")
    two = await loopback.start(2)
    await two.dht.join([one.reach])
    await until(lambda: bool(two.dht._core.store.all(loopback.clock.now)))


async def test_leaving_and_moving_are_seen_at_once(loopback: Loopback) -> None:
    one, two, three = await loopback.chain(3)
    await one.serve("0:10")
    await two.serve("10:30")
    assert len(await three.sees()) == 2
    await one.serve("20:30")
    await two.dht.withdraw(two.record("10:30"))
    assert await three.sees() == {one.endpoint.peer_id: "20:30"}
    assert await three.sees(fresh=True) == {one.endpoint.peer_id: "20:30"}
    assert await two.sees() == {one.endpoint.peer_id: "20:30"}
    await one.dht.withdraw()
    assert await three.sees() == {}


def held(peer: Peer, **changes: object) -> HolderRecord:
    fields: dict[str, object] = {
        "peer": peer.endpoint.peer_id,
        "addresses": tuple(peer.endpoint.addresses),
        "model_id": MODEL,
        "torrent_port": 6881,
    }
    return HolderRecord(**(fields | changes))  # type: ignore[arg-type]


async def test_a_pure_seeder_is_found_by_everybody_and_is_in_nobodys_coverage(loopback: Loopback) -> None:
    server, seeder, asker = await loopback.chain(3)
    await server.serve("0:30")
    await seeder.dht.say_holding(held(seeder, is_whole=True))
    await server.dht.say_holding(held(server, layers=Span(0, 30), torrent_port=7000))
    for peer in (server, seeder, asker):
        found = {each.peer: each for each in await peer.dht.holders(MODEL, fresh=True)}
        assert found.keys() == {server.endpoint.peer_id, seeder.endpoint.peer_id}
        assert found[seeder.endpoint.peer_id].is_whole and found[seeder.endpoint.peer_id].torrent_port == 6881
        assert found[server.endpoint.peer_id].layers == Span(0, 30)
        assert await peer.sees(fresh=True) == {server.endpoint.peer_id: "0:30"}
        assert await peer.dht.holders(bytes(32)) == []
    with pytest.raises(ValueError, match="itself"):
        await asker.dht.say_holding(held(seeder))


async def test_who_stops_serving_still_holds_and_the_card_stays_as_long_as_one_of_both_does(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    card = ModelCard(MODEL, "tiny", "llama", "q4_1", N_LAYERS, (98_000_000,), 2_000_000, 8192, 576, 49152)

    async def seen() -> tuple[int, int, int]:
        records = await two.dht.coverage(MODEL, N_LAYERS), await two.dht.holders(MODEL), await two.dht.models()
        return len(records[0]), len(records[1]), len(records[2])

    await one.serve("0:30")
    await one.dht.publish_card(card.sign(one.identity))
    await one.dht.say_holding(held(one, is_whole=True))
    assert await seen() == (1, 1, 1)
    await one.dht.withdraw(one.record("0:30"))
    assert await seen() == (0, 1, 1)
    await one.serve("0:30")
    await one.dht.stop_holding(MODEL)
    assert await seen() == (1, 0, 1)
    await one.dht.withdraw(one.record("0:30"))
    assert await seen() == (0, 0, 0)
    await one.dht.say_holding(held(one, is_whole=True))
    await one.dht.publish_card(card.sign(one.identity))
    await one.dht.stop_holding(MODEL)
    assert await seen() == (0, 0, 0)
    await one.dht.say_holding(held(one))
    await one.dht.withdraw()
    assert await seen() == (0, 0, 0)


async def test_a_strangers_card_says_nothing_of_a_models_layers_to_the_store_and_the_models_own_header_does(
    loopback: Loopback,
) -> None:
    liar, keeper, reader = await loopback.chain(3)
    card = ModelCard(MODEL, "tiny", "llama", "q4_1", 4, (98_000_000,), 2_000_000, 8192, 576, 49152)
    await liar.dht.publish_card(card.sign(liar.identity))
    await keeper.serve("0:30")
    assert len(await reader.sees(fresh=True)) == 1, "the lie hides nobody"
    for peer in (keeper, reader):
        peer.dht.learn_layers(MODEL, N_LAYERS)
    liar.dht._core.store._n_layers.clear()
    await liar.serve("26:40")
    for peer in (keeper, reader):
        found = await peer.dht.coverage(MODEL, 64, fresh=True)
        assert [record.peer for record in found] == [keeper.endpoint.peer_id]


async def test_who_only_looks_makes_nobody_be_asked(loopback: Loopback) -> None:
    """What was asked for before and what others have sent here is seen; nothing is looked up, then or behind it."""
    one, _, three = await loopback.chain(3)
    card = ModelCard(MODEL, "tiny", "llama", "q4_1", N_LAYERS, (98_000_000,), 2_000_000, 8192, 576, 49152)
    asked = 0
    ask = three.dht._questions._ask

    async def counted(*args: object, **more: object) -> object:
        nonlocal asked
        asked += 1
        return await ask(*args, **more)  # type: ignore[arg-type]

    three.dht._questions._ask = counted  # type: ignore[method-assign, assignment]
    await one.serve("0:30")
    await one.dht.publish_card(card.sign(one.identity))
    three.dht._core.store._under.clear()
    three.dht._core.store._count = 0
    assert await three.dht.coverage(MODEL, N_LAYERS, ask=False) == [] == await three.dht.cards(ask=False)
    assert asked == 0
    assert len(await three.dht.coverage(MODEL, N_LAYERS)) == 1 == len(await three.dht.cards())
    n_asked = asked
    assert n_asked > 0
    for _ in range(3):
        loopback.clock.now += 200.0
        assert [record.peer for record in await three.dht.coverage(MODEL, N_LAYERS, ask=False)] == [
            one.endpoint.peer_id
        ]
        assert [each.author for each in await three.dht.cards(ask=False)] == [one.endpoint.peer_id]
        await asyncio.sleep(0.1)
    assert asked == n_asked
    loopback.clock.now += LIFETIME_S
    assert await three.dht.coverage(MODEL, N_LAYERS, ask=False) == []


async def test_a_second_reading_brings_what_is_new_and_nothing_else(loopback: Loopback) -> None:
    """Records that are known are not sent again; who withdrew, moved or came since is seen."""
    peers = await loopback.chain(8)
    for number, peer in enumerate(peers[:6]):
        await peer.serve(f"{number}:{number + 20}")
    reader = await loopback.start(50)
    answers: list[bytes] = []
    ask = reader.dht._questions._ask

    async def noted(*args: Any, **more: Any) -> Any:
        answered = await ask(*args, **more)
        answers.append(answered[0])
        return answered

    await reader.dht.join([peers[0].reach])
    reader.dht._questions._ask = noted  # type: ignore[method-assign]

    def records_sent() -> int:
        sent = sum(len(messages.decode_found(answer).records) for answer in answers)
        answers.clear()
        return sent

    reader.dht._core.store._under.clear()
    assert len(await reader.sees(fresh=True)) == 6
    assert records_sent() >= 6
    assert len(await reader.sees(fresh=True)) == 6
    assert records_sent() == 0
    await peers[0].dht.withdraw()
    await peers[1].serve("5:30")
    await peers[7].serve("0:2")
    reader.dht._core.store._under.clear()
    seen = await reader.sees(fresh=True)
    assert peers[0].endpoint.peer_id not in seen
    assert (seen[peers[1].endpoint.peer_id], seen[peers[7].endpoint.peer_id], len(seen)) == ("5:30", "0:2", 6)
    assert 3 <= records_sent() <= 4 * 8, "the tombstones and the new ones"


async def test_whom_others_name_by_a_mark_counts_as_named(loopback: Loopback) -> None:
    """Else a peer that is known here would be on one path of a lookup only, however many name it."""
    peers = await loopback.chain(5)
    reader = peers[0]
    await until(lambda: all(len(peer.dht.known_peers()) == 4 for peer in peers))
    await reader.sees(fresh=True)
    named: dict[PeerId, set[PeerId]] = {}
    n_whole = 0
    take_found = reader.dht._core.take_found

    def noted(contact: Contact, found: messages.FindAnswer, *args: Any, **more: Any) -> bool:
        nonlocal n_whole
        named[contact.peer] = {each.peer for each in found.contacts}
        n_whole += len(found.contacts) - len(found.had)
        return take_found(contact, found, *args, **more)

    reader.dht._core.take_found = noted  # type: ignore[method-assign]
    await reader.sees(fresh=True)
    others = {peer.endpoint.peer_id for peer in peers[1:]}
    assert named == {peer: others - {peer} for peer in others}
    assert n_whole == 0, "nobody was sent whole who is known here"


async def test_who_serves_the_first_layers_of_many_models_is_asked_once_for_all(loopback: Loopback) -> None:
    one, two, three = await loopback.chain(3)
    await one.serve("0:10")
    await two.serve("8:30")
    found = await three.dht.first_holders([MODEL, bytes(32)])
    assert {model: [record.peer for record in records] for model, records in found.items()} == {
        MODEL: [one.endpoint.peer_id],
        bytes(32): [],
    }


async def test_a_peer_that_dies_costs_one_time_out_and_is_then_left_alone(loopback: Loopback) -> None:
    one, two, three = await loopback.chain(3)
    await two.serve("0:30")
    gone = three.endpoint.peer_id
    await three.endpoint.close()
    assert await one.sees(fresh=True) == {two.endpoint.peer_id: "0:30"}
    assert one.dht.unreachable() == {gone}
    asked: list[PeerId] = []
    dial = one.endpoint.dial

    async def counted(peer: PeerId, *args: object, **more: object) -> object:
        asked.append(peer)
        return await dial(peer, *args, **more)  # type: ignore[arg-type]

    one.endpoint.dial = counted  # type: ignore[method-assign, assignment]
    assert await one.sees(fresh=True) == {two.endpoint.peer_id: "0:30"}
    assert gone not in asked


async def test_a_peer_that_comes_back_is_known_again(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    address = two.endpoint.address
    await two.endpoint.close()
    await one.sees(fresh=True)
    assert one.dht.unreachable() == {two.endpoint.peer_id}
    again = await loopback.start(2, listen=address)
    await again.serve("0:30")
    await again.dht.join([one.reach])
    assert one.dht.unreachable() == frozenset()
    assert await one.sees(fresh=True) == {again.endpoint.peer_id: "0:30"}


async def test_a_peer_whose_friends_come_later_joins_them_then(loopback: Loopback) -> None:
    early = await loopback.start(1, periods=QUICK)
    late_identity = Identity.from_seed((2).to_bytes(32))
    spare = await Endpoint.bind(late_identity, Address("127.0.0.1", 0), swarm=loopback.swarm)
    address = spare.address
    await spare.close()
    assert await early.dht.join([(late_identity.peer_id, (address,))]) == 0
    await early.serve("0:30")
    late = await loopback.start(2, listen=address)
    await until(lambda: len(early.dht.known_peers()) == 1 and not early.dht.unreachable())
    await until(lambda: _sees(late, {early.endpoint.peer_id: "0:30"}))


async def _sees(peer: Peer, expected: dict[PeerId, str]) -> bool:
    return await peer.sees(fresh=True) == expected


async def test_records_are_said_again_before_they_end(loopback: Loopback) -> None:
    one = await loopback.start(1, periods=QUICK)
    two = await loopback.start(2)
    await two.dht.join([one.reach])
    await one.serve("0:30")
    [before] = await two.dht.coverage(MODEL, N_LAYERS)
    loopback.clock.now += LIFETIME_S - 60

    async def renewed() -> bool:
        return any(record.seq > before.seq for record in await two.dht.coverage(MODEL, N_LAYERS))

    await until(renewed)
    loopback.clock.now += 120
    assert await two.sees(fresh=True) == {one.endpoint.peer_id: "0:30"}


async def test_what_is_not_said_again_ends(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    await one.serve("0:30")
    assert len(await two.sees()) == 1
    await one.endpoint.close()
    loopback.clock.now += LIFETIME_S + 1
    assert await two.sees(fresh=True) == {}


def card(model_id: bytes = MODEL, name: str = "tiny") -> ModelCard:
    return ModelCard(model_id, name, "llama", "q4_1", N_LAYERS, (98_000_000,), 2_000_000, 8192, 576, 49152)


async def test_models_are_listed_with_their_holders_also_two_under_one_name(loopback: Loopback) -> None:
    one, two, three = await loopback.chain(3)
    await one.dht.publish_card(card().sign(one.identity))
    await two.dht.publish_card(card().sign(two.identity))
    await two.dht.publish_card(card(b"t" * 32).sign(two.identity))
    assert await three.dht.models() == [(card(), 2), (card(b"t" * 32), 1)]
    await two.dht.withdraw()
    assert await three.dht.models() == [(card(), 1)]


async def test_peers_are_listed_with_what_they_serve(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    await two.dht.publish_card(card().sign(two.identity))
    await two.serve("3:30")
    [entry] = await one.dht.peers()
    shown = entry.as_json()
    assert shown["peer_id"] == str(two.endpoint.peer_id)
    assert str(two.endpoint.address) in shown["addresses"]
    assert shown["reachable"] is True
    assert shown["rtt_ms"] >= 0
    assert [(served["model"], served["layers"]) for served in shown["serves"]] == [("tiny", "3:30")]
    assert one.dht.rtt_s(two.endpoint.peer_id) is not None


async def test_a_peer_that_cannot_be_dialled_serves_and_asks_but_is_in_no_table(loopback: Loopback) -> None:
    one = await loopback.start(1)
    client = await loopback.start(2, server=False)
    assert await client.dht.join([one.reach]) == 1
    await client.serve("0:30")
    assert await one.sees(fresh=True) == {client.endpoint.peer_id: "0:30"}
    assert one.dht.known_peers() == []


async def test_known_peers_lead_back_into_the_swarm(loopback: Loopback) -> None:
    peers = await loopback.chain(3)
    saved = peers[2].dht.known_peers()
    newcomer = await loopback.start(9)
    gone = (PeerId(b"?" * 32), (Address("127.0.0.1", 9),))
    assert await newcomer.dht.join([gone, *saved]) == 3


async def test_a_silent_address_holds_nobody_up(loopback: Loopback) -> None:
    one = await loopback.start(1)
    newcomer = await loopback.start(2)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = PeerId(b"?" * 32)
        addresses = (Address("127.0.0.1", silent.getsockname()[1]),)
        assert await newcomer.dht.join([(nobody, addresses), one.reach]) == 1
        await until(lambda: newcomer.dht.unreachable() == {nobody})


async def test_a_peer_speaks_for_itself_only(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    with pytest.raises(ValueError, match="own"):
        await one.dht.publish_coverage(two.record("0:30"))
    with pytest.raises(ValueError, match="own"):
        await one.dht.publish_card(card().sign(two.identity))


@pytest.mark.parametrize("kind", [messages.PING, messages.FIND, messages.STORE])
async def test_garbage_is_refused_and_the_connection_goes_on(loopback: Loopback, kind: str) -> None:
    one, two = await loopback.chain(2)
    connection = await two.endpoint.dial(*one.reach)
    for garbage in (b"", b"\xc1", b"\x90", bytes(1000)):
        with pytest.raises(RemoteProtocolError):
            await connection.request(kind, garbage)
    await one.serve("0:30")
    assert await two.sees(fresh=True) == {one.endpoint.peer_id: "0:30"}


async def test_nothing_is_stored_without_a_token_and_floods_are_refused(
    loopback: Loopback, make_record: Callable[..., SignedRecord]
) -> None:
    one, two = await loopback.chain(2)
    connection = await two.endpoint.dial(*one.reach)
    question = messages.encode_store(
        StoreQuestion(Sender(True, ()), bytes(16), ((make_record().wire, (bytes(20),) * 100),))
    )
    stored = messages.decode_stored(await connection.request(messages.STORE, question))
    assert set(stored.statuses[0]) == {StoreStatus.BAD_TOKEN}
    with pytest.raises(RefusedError) as refused:
        for _ in range(20):
            await connection.request(messages.STORE, question)
    assert refused.value.retry_after_s is not None
    assert one.dht._core.store.all(loopback.clock.now) == []


async def test_many_askers_at_once_share_one_lookup(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    await one.serve("0:30")
    asked = 0
    look_up = two.dht._questions.look_up

    async def counted(*args: object, **more: object) -> object:
        nonlocal asked
        asked += 1
        return await look_up(*args, **more)  # type: ignore[arg-type]

    two.dht._questions.look_up = counted  # type: ignore[method-assign, assignment]
    answers = await asyncio.gather(*(two.sees() for _ in range(10)))
    assert answers == [{one.endpoint.peer_id: "0:30"}] * 10
    assert asked == 1


async def test_an_asker_that_goes_away_leaves_nothing_behind(loopback: Loopback) -> None:
    one, two, three = await loopback.chain(3)
    await one.serve("0:30")
    before = asyncio.all_tasks()
    asking = asyncio.create_task(three.sees(fresh=True))
    await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await until(lambda: asyncio.all_tasks() <= before)
    assert await three.sees(fresh=True) == {one.endpoint.peer_id: "0:30"}
    assert two.dht.unreachable() == three.dht.unreachable() == frozenset()


async def test_swarms_do_not_mix(loopback: Loopback) -> None:
    one = await loopback.start(1)
    other = Loopback(Swarm("another"))
    try:
        stranger = await other.start(2)
        assert await stranger.dht.join([one.reach]) == 0
        assert one.dht.known_peers() == []
    finally:
        await other.close()


async def test_two_peers_with_one_key_are_noticed_by_those_they_meet(loopback: Loopback) -> None:
    """The second one is started from a copy of the first one's folder; each dials again when the other took over."""
    witness = await loopback.start(1)
    one = await loopback.start(2, run=False)
    twin = await loopback.start(2, run=False)
    for _ in range(2):
        for each in (one, twin):
            await each.dht.join([witness.reach])
    await until(lambda: any(one.endpoint.peer_id.short in said for said in witness.dht.notices))


async def test_on_one_machine_everybody_is_a_server_without_asking(loopback: Loopback) -> None:
    peers = await loopback.chain(3)
    for peer in peers:
        peer.dht._renew_sender()
        assert peer.dht.is_server
        assert not peer.dht._reachability.wants_check(loopback.clock.now)


async def test_a_clock_that_is_hours_off_is_said_at_the_first_words(loopback: Loopback) -> None:
    one, two = await loopback.chain(2)
    two.dht._clock = two.dht._questions._clock = lambda: loopback.clock.now - 7200.0
    two.dht._upkeep._clock = two.dht._questions._clock
    await two.dht._questions.ping(two.dht._core.table.neighbours()[0].contact)
    [said] = two.dht.notices
    assert f"the clock of peer {one.endpoint.peer_id.short} is about 2 h ahead of this machine's" in said
    assert any("2 h behind this machine's" in sentence for sentence in one.dht.notices)


async def test_a_private_swarm_works_sealed_over_real_connections() -> None:
    ours = Loopback(Swarm("ours", b"k" * 32))
    try:
        peers = await ours.chain(3)
        await peers[0].serve("0:30")
        for peer in peers:
            assert await peer.sees(fresh=True) == {peers[0].endpoint.peer_id: "0:30"}
        key = peers[1].dht._topics.block(MODEL, 0)
        [sealed] = peers[1].dht._core.store.sealed(key, ours.clock.now)
        assert MODEL not in sealed
        ours.swarm.renew([b"n" * 32, b"k" * 32], expelled=[peers[0].endpoint.peer_id])
        assert await peers[2].sees() == {}
    finally:
        await ours.close()


async def test_who_turns_out_to_be_a_client_leaves_tables_and_what_is_remembered(loopback: Loopback) -> None:
    one, two, three = await loopback.chain(3)
    await until(lambda: len(one.dht.known_peers()) == 2)
    two.dht._reachability._fixed = False
    two.dht._renew_sender()
    for peer in (one, three):
        await two.dht._questions.ping(two.dht._core.table.get(peer.endpoint.peer_id).contact)  # type: ignore[union-attr]
    gone = two.endpoint.peer_id
    assert gone not in [peer for peer, _ in one.dht.known_peers()]
    assert gone not in one.dht._core.table and gone not in three.dht._core.table
    two.dht._reachability._fixed = True
    two.dht._renew_sender()
    await two.dht.join([one.reach])
    await until(lambda: gone in [peer for peer, _ in one.dht.known_peers()])


async def test_whoever_asks_and_however_many_a_peer_dials_for_others_once_in_two_seconds(loopback: Loopback) -> None:
    """Thirty keys aim it at one victim. Questions that mean nobody, or somebody on a local network, cost nothing."""
    one = await loopback.start(1, run=False)
    dialled: list[Contact] = []

    async def dial_afresh(wanted: Contact) -> Verdict:  # nothing beyond loopback is sent to by a test
        dialled.append(wanted)
        return Verdict.SILENT

    one.dht._questions.dial_afresh = dial_afresh  # type: ignore[method-assign]
    askers = [Identity.from_seed(number.to_bytes(32)).peer_id for number in range(100, 130)]
    sender = Sender(False, ())

    async def ask(asker: PeerId, wanted: Contact) -> Verdict:
        return messages.decode_verdict(await one.dht._answer_dial(asker, messages.encode_dial(sender, wanted)))[1]

    victim = Contact(Identity.from_seed(bytes(32)).peer_id, (Address("203.0.113.5", 53), Address("203.0.113.6", 53)))
    local, itself = Contact(victim.peer, (Address("192.168.1.1", 53),)), Contact(one.dht._core.own, victim.addresses)
    for asker in askers:
        assert await ask(asker, local) is Verdict.UNKNOWN and await ask(asker, itself) is Verdict.UNKNOWN
    assert dialled == []
    verdicts = [await ask(asker, victim) for asker in askers]
    assert verdicts == [Verdict.SILENT] * int(DIALS_FOR_OTHERS_BURST) + [Verdict.UNKNOWN] * (
        len(askers) - int(DIALS_FOR_OTHERS_BURST)
    )
    loopback.clock.now += 10.0
    before = len(dialled)
    assert [await ask(asker, victim) for asker in askers].count(Verdict.SILENT) == min(
        int(DIALS_FOR_OTHERS_BURST), int(10 * DIALS_FOR_OTHERS_PER_S)
    )
    assert len(dialled) - before <= 5
    assert {wanted.addresses for wanted in dialled} == {victim.addresses[:1]}, "one address, however many are named"
    with pytest.raises(RefusedError, match="too many dials"):
        for _ in range(10):
            await ask(askers[0], victim)
