"""Finding and opening a route over real sockets and a real DHT: refusals, ghosts, stale memory."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError, NoRouteError, PeerUnreachableError, RefusedError
from meshswarm.head import routes
from meshswarm.head.route_session import RouteSession
from meshswarm.head.routes import Needs, Routes
from meshswarm.head.session_actions import InLine
from meshswarm.identity import Identity, PeerId
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream
from meshswarm.net.swarm import Swarm
from meshswarm.routing.gossip.news import Quiet
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.planner import Route
from meshswarm.span import Span
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.proving.wire_proofs import Wire
from meshswarm.stage.sessions.messages import (
    MAX_FRAME_BYTES,
    SESSION_STREAM,
    Dtype,
    Fork,
    Message,
    Open,
    Opened,
    RefusalReason,
    Refused,
    Result,
    Row,
    Step,
    Waiting,
)
from meshswarm.stage.sessions.wire import decode, encode

CARD = ModelCard(bytes(32), "tiny", "llama", "f32", 4, (1000,), 100, 512, 8, 32)
NEEDS = Needs(CARD, n_prompt=4, max_tokens=8, profile=Profile.FAST, temperature=0.0, top_k=1)
OPENED = Opened("cpu", 512, bytes(32))
ROW = Row(b"\x07\0\0\0", b"\0\0\x80\x3f", -1.0)
BUSY = Refused(RefusalReason.BUSY, "all its sessions are taken", 60_000)


@dataclass
class Holder:
    """A peer that says it serves layers, and gives `answers` to OPENs, the last one again and again. It lets a session
    wait for a moment where its OPEN allows that, and opens it then. A step takes it `step_s`, whatever it says."""

    endpoint: Endpoint
    dht: Dht
    answers: tuple[Message, ...]
    asked: list[Open] = field(default_factory=list)
    step_s: float = 0.0

    def __post_init__(self) -> None:
        self.endpoint.handle_stream(SESSION_STREAM, self.accept, max_frame_bytes=MAX_FRAME_BYTES)

    def accept(self, stream: Stream) -> None:
        def on_frame(frame: bytes) -> None:
            message = decode(frame)
            if isinstance(message, Open) and message.max_wait_ms:
                stream.send(encode(Waiting(3, 1500)))
                stream.send(encode(OPENED))
                self.asked.append(message)
            elif isinstance(message, Open):
                stream.send(encode(self.answers[min(len(self.asked), len(self.answers) - 1)]))
                self.asked.append(message)
            elif isinstance(message, Step):
                result = Result(message.seq, (ROW,) * message.n_outputs, None)
                asyncio.get_running_loop().call_later(self.step_s, stream.send, encode(result))

        stream.receive_with(on_frame, lambda error: None)

    def record(
        self, span: Span, us_per_layer: int, addresses: tuple[Address, ...] | None = None, us_per_layer_4: int = 0
    ) -> CoverageRecord:
        return CoverageRecord(
            peer=self.endpoint.peer_id, addresses=addresses or (self.endpoint.address,), model_id=CARD.model_id,
            span=span, loaded=True, numclass="cpu", n_ctx=256, us_per_layer=us_per_layer,
            prefill_us_per_row_layer=1, free_kv_tokens=1024, us_per_layer_4=us_per_layer_4,
        )  # fmt: skip

    async def say(
        self, span: Span, us_per_layer: int, addresses: tuple[Address, ...] | None = None, us_per_layer_4: int = 0
    ) -> None:
        await self.dht.publish_coverage(self.record(span, us_per_layer, addresses, us_per_layer_4))


class Told(Quiet):
    """News that a test tells."""

    def __init__(self) -> None:
        self.leaving: set[PeerId] = set()
        self.reports: dict[PeerId, LoadReport] = {}

    def draining(self) -> frozenset[PeerId]:
        return frozenset(self.leaving)

    def loads(self) -> dict[PeerId, LoadReport]:
        return self.reports


@dataclass
class Scene:
    """A head and whoever a test puts beside it."""

    swarm: Swarm
    routes: Routes
    head: Endpoint
    dht: Dht
    endpoints: list[Endpoint]
    told: Told

    async def holder(self, *answers: Message, knows_head: bool = True) -> Holder:
        identity = Identity.generate()
        endpoint = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=self.swarm)
        self.endpoints.append(endpoint)
        dht = Dht(endpoint, identity, self.swarm)
        if knows_head:
            await dht.join([(self.head.peer_id, (self.head.address,))])
        return Holder(endpoint, dht, answers or (OPENED,))

    async def hops(self) -> list[Endpoint]:
        records = await self.routes.coverage(CARD)
        session = await self.routes.open(NEEDS, records)
        by_id = {endpoint.peer_id: endpoint for endpoint in self.endpoints}
        found = [by_id[hop.peer] for hop in session.core.hops]
        session.cancel()
        return found


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    swarm = Swarm(f"test-{secrets.token_hex(8)}")
    identity = Identity.generate()
    head = await Endpoint.bind(identity, Address("127.0.0.1", 0), swarm=swarm)
    dht = Dht(head, identity, swarm)
    writer = ReceiptWriter(ReceiptStore(tmp_path / "ledger.sqlite"), lambda error: None)
    told = Told()
    routes = Routes(head, identity, dht, Bookkeeper(identity, writer, swarm.swarm_id), list, news=told)
    running = Scene(swarm, routes, head, dht, [head], told)
    yield running
    for endpoint in running.endpoints:
        await endpoint.close()
    writer.close()


async def test_the_next_best_peer_is_taken_when_the_best_refuses(scene: Scene) -> None:
    fast, slow = await scene.holder(BUSY), await scene.holder()
    await fast.say(Span(0, 4), 10)
    await slow.say(Span(0, 4), 500_000)
    assert await scene.hops() == [slow.endpoint]
    assert len(fast.asked) == 1


async def test_a_peer_that_said_it_was_busy_is_priced_by_its_wait_next_time(scene: Scene) -> None:
    fast, slow = await scene.holder(BUSY, OPENED), await scene.holder()
    await fast.say(Span(0, 4), 10)
    await slow.say(Span(0, 4), 500_000)
    await scene.hops()
    assert await scene.hops() == [slow.endpoint]
    assert len(fast.asked) == 1


async def test_when_every_holder_refuses_the_client_hears_when_to_come_back(scene: Scene) -> None:
    for _ in range(3):
        holder = await scene.holder(BUSY)
        await holder.say(Span(0, 4), 10)
    with pytest.raises(RefusedError) as caught:
        await scene.hops()
    assert caught.value.retry_after_s == 60.0


async def test_an_unreachable_next_span_is_gone_round_not_the_one_that_reported_it(scene: Scene) -> None:
    first = await scene.holder(Refused(RefusalReason.NEXT_UNREACHABLE, "no way there", 0), OPENED)
    fast, slow = await scene.holder(), await scene.holder()
    await first.say(Span(0, 2), 10)
    await fast.say(Span(2, 4), 10)
    await slow.say(Span(2, 4), 500_000)
    assert await scene.hops() == [first.endpoint, slow.endpoint]


async def test_a_dead_peer_in_a_remembered_record_is_replaced_by_one_that_came_since(scene: Scene) -> None:
    dead = await scene.holder()
    await dead.say(Span(0, 4), 10)
    stale = await scene.routes.coverage(CARD)
    await dead.endpoint.close()
    replacement = await scene.holder()
    await replacement.say(Span(0, 4), 1000)
    session = await scene.routes.open(NEEDS, stale)
    assert session.core.hops[0].peer == replacement.endpoint.peer_id
    session.cancel()


async def test_a_ghost_address_is_an_error_that_names_the_peer(scene: Scene) -> None:
    ghost = await scene.holder()
    await ghost.say(Span(0, 4), 10, (Address("127.0.0.1", 9),))
    records = await scene.routes.coverage(CARD)
    await ghost.endpoint.close()
    with pytest.raises((PeerUnreachableError, NoRouteError), match=ghost.endpoint.peer_id.short):
        await scene.routes.open(NEEDS, records)


async def test_nobody_with_the_layers_is_said_with_the_layers(scene: Scene) -> None:
    holder = await scene.holder()
    await holder.say(Span(0, 2), 10)
    with pytest.raises(NoRouteError, match="2:4"):
        await scene.hops()


async def test_a_peer_that_was_gone_a_moment_ago_is_tried_again_before_saying_no(scene: Scene) -> None:
    holder = await scene.holder()
    await holder.say(Span(0, 4), 10)
    await scene.routes.coverage(CARD)
    scene.dht.report_unreachable(holder.endpoint.peer_id)
    assert holder.endpoint.peer_id in scene.dht.unreachable()
    assert await scene.hops() == [holder.endpoint]


async def test_when_every_holder_is_full_the_request_waits_at_the_one_that_will_be_free_first(scene: Scene) -> None:
    busy = Refused(RefusalReason.BUSY, "all its sessions are taken", 60_000)
    soon = Refused(RefusalReason.BUSY, "all its sessions are taken", 2_000)
    fast, slow = await scene.holder(busy), await scene.holder(soon)
    await fast.say(Span(0, 4), 10)
    await slow.say(Span(0, 4), 500)
    heard: list[InLine] = []
    needs = replace(NEEDS, max_wait_s=30.0)
    session = await scene.routes.open(needs, await scene.routes.coverage(CARD), heard.append)
    assert session.core.hops[0].peer == slow.endpoint.peer_id
    assert [(where.place, where.estimate_s) for where in heard] == [(3, 1.5)]
    assert [each.max_wait_ms for each in fast.asked] == [0], "nobody waits before everybody was asked"
    assert [each.max_wait_ms for each in slow.asked] == [0, 30_000]
    session.cancel()


async def test_a_holder_that_refuses_for_good_is_not_waited_for(scene: Scene) -> None:
    holder = await scene.holder(Refused(RefusalReason.UNSUPPORTED, "no such profile", 0))
    await holder.say(Span(0, 4), 10)
    with pytest.raises(RefusedError, match="no such profile"):
        await scene.routes.open(replace(NEEDS, max_wait_s=30.0), await scene.routes.coverage(CARD))
    assert len(holder.asked) == 1


async def test_a_copy_of_a_session_asks_the_same_spans_and_names_what_it_takes_over(scene: Scene) -> None:
    holder = await scene.holder()
    await holder.say(Span(0, 4), 10)
    session = await scene.routes.open(NEEDS, await scene.routes.coverage(CARD))
    session.history.add(list(range(40)))
    copy = await scene.routes.copy(session, 30, replace(NEEDS, temperature=0.5, top_k=7))
    asked = holder.asked[-1]
    assert asked.fork == Fork(session.core.session, 30)
    assert (asked.temperature, asked.top_k, asked.n_ctx) == (0.5, 7, 256)
    assert copy.length == 30
    assert len(session.history.tokens) == 40
    session.cancel()
    copy.cancel()


async def test_sessions_over_the_same_peers_learn_together_how_fast_their_links_are(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, other = await scene.holder(), await scene.holder()
    await holder.say(Span(0, 4), 10)
    records = await scene.routes.coverage(CARD)
    opened = [await scene.routes.open(NEEDS, records) for _ in range(2)]
    assert opened[0].core.link is opened[1].core.link
    monkeypatch.setattr(routes, "MAX_LINKS", 1)
    await other.say(Span(0, 4), 1)
    records = await scene.routes.coverage(CARD, fresh=True)
    opened += [await scene.routes.open(NEEDS, [record]) for record in (records[0], records[1])]
    assert opened[2].core.link is not opened[3].core.link
    assert len(scene.routes._links) == 1
    for session in opened:
        session.cancel()


async def test_a_head_spreads_its_sessions_over_peers_that_get_slower_with_each(scene: Scene) -> None:
    first, second = await scene.holder(), await scene.holder()
    await first.say(Span(0, 4), 100_000, us_per_layer_4=400_000)
    await second.say(Span(0, 4), 150_000, us_per_layer_4=600_000)
    records = await scene.routes.coverage(CARD)
    opened = [await scene.routes.open(NEEDS, records) for _ in range(3)]
    peers = [session.core.hops[0].peer for session in opened]
    assert peers == [first.endpoint.peer_id, second.endpoint.peer_id, first.endpoint.peer_id]
    opened[0].cancel()
    opened[2].cancel()
    again = await scene.routes.open(NEEDS, records)
    assert again.core.hops[0].peer == first.endpoint.peer_id
    for session in (opened[1], again):
        session.cancel()


async def test_rows_are_narrower_only_over_as_few_hops_as_were_proved(scene: Scene) -> None:
    first, second = await scene.holder(), await scene.holder()
    await first.say(Span(0, 2), us_per_layer=10)
    await second.say(Span(2, 4), us_per_layer=10)
    records = await scene.routes.coverage(CARD)
    for max_hops in (1, 0):
        session = await scene.routes.open(replace(NEEDS, wire=Wire(Dtype.F16, max_hops)), records)
        session.cancel()
    assert [opening.dtype for opening in first.asked] == [Dtype.F16, Dtype.F32]
    assert [opening.dtype for opening in second.asked] == [Dtype.F16, Dtype.F32]


# -- what is measured before a route is chosen, and what is learned from it


async def test_a_stranger_that_may_be_near_is_measured_before_its_first_use(scene: Scene) -> None:
    known, stranger = await scene.holder(), await scene.holder(knows_head=False)
    records = [known.record(Span(0, 4), 10_000), stranger.record(Span(0, 4), 10)]
    assert scene.dht.rtt_s(stranger.endpoint.peer_id) is None
    session = await scene.routes.open(replace(NEEDS, max_tokens=100), records)
    assert session.core.hops[0].peer == stranger.endpoint.peer_id, "taken for 100 ms away, it would not have been"
    assert scene.dht.rtt_s(stranger.endpoint.peer_id) is not None
    session.cancel()


async def test_a_stranger_that_would_save_less_than_the_question_costs_is_not_asked(scene: Scene) -> None:
    known, stranger = await scene.holder(), await scene.holder(knows_head=False)
    records = [known.record(Span(0, 4), 10_000), stranger.record(Span(0, 4), 10)]
    session = await scene.routes.open(replace(NEEDS, max_tokens=2), records)
    assert session.core.hops[0].peer == known.endpoint.peer_id
    assert scene.head.connection(stranger.endpoint.peer_id) is None
    session.cancel()


async def test_a_stranger_that_does_not_answer_costs_no_attempt(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PROBE_TIMEOUT_S", 0.2)
    known, ghost = await scene.holder(), await scene.holder(knows_head=False)
    records = [
        known.record(Span(0, 4), 10_000),
        ghost.record(Span(0, 4), 10, (Address("127.0.0.1", 9),)),
    ]
    await ghost.endpoint.close()
    session = await scene.routes.open(replace(NEEDS, max_tokens=100), records)
    assert session.core.hops[0].peer == known.endpoint.peer_id
    assert ghost.endpoint.peer_id in scene.dht.unreachable()
    session.cancel()


class Rounds:
    """Listens to a session, and pushes a token for every row that comes back, as often as it is told."""

    def __init__(self, session: RouteSession, n: int) -> None:
        self.session, self.left, self.done = session, n, asyncio.Event()
        session.listen(self)
        session.push([1, 2, 3])

    def on_rows(self, seq: int, rows: tuple[Row, ...]) -> None:
        if not self.left:
            self.done.set()
            return
        self.left -= 1
        self.session.push([7])

    def on_full_row(self, seq: int, row: int, logits: bytes) -> None: ...
    def on_broken(self, error: MeshswarmError) -> None:
        raise AssertionError(error)


@pytest.mark.parametrize("end", [RouteSession.park, RouteSession.cancel])
async def test_a_peer_that_is_slower_than_it_says_is_left_after_its_first_session(
    scene: Scene, end: Callable[[RouteSession], None]
) -> None:
    liar, honest = await scene.holder(), await scene.holder()
    liar.step_s = 0.060
    await liar.say(Span(0, 4), 1)
    await honest.say(Span(0, 4), 5000)
    records = await scene.routes.coverage(CARD)
    session = await scene.routes.open(NEEDS, records)
    assert session.core.hops[0].peer == liar.endpoint.peer_id
    await asyncio.wait_for(Rounds(session, 6).done.wait(), 10)
    end(session)
    assert await scene.hops() == [honest.endpoint]
    session.cancel()


async def test_while_a_session_still_runs_others_learn_from_it(scene: Scene) -> None:
    liar, honest = await scene.holder(), await scene.holder()
    liar.step_s = 0.040
    await liar.say(Span(0, 4), 1)
    await honest.say(Span(0, 4), 5000)
    session = await scene.routes.open(NEEDS, await scene.routes.coverage(CARD))
    await asyncio.wait_for(Rounds(session, 17).done.wait(), 10)
    assert await scene.hops() == [honest.endpoint]
    assert scene.routes.in_use() == {liar.endpoint.peer_id}
    session.cancel()
    assert not scene.routes.in_use()


async def test_who_is_leaving_is_gone_round_and_who_is_busy_is_priced_by_it(scene: Scene) -> None:
    first, second = await scene.holder(), await scene.holder()
    await first.say(Span(0, 4), 10)
    await second.say(Span(0, 4), 50_000)
    peer = first.endpoint.peer_id
    assert await scene.hops() == [first.endpoint]
    scene.told.leaving.add(peer)
    assert await scene.hops() == [second.endpoint]
    scene.told.leaving.clear()
    said = LoadReport(peer, model_id=CARD.model_id, span=Span(0, 4), n_layers=4, free_kv_tokens=1024)
    scene.told.reports[peer] = replace(said, queue_s=2.0)
    assert await scene.hops() == [second.endpoint]
    scene.told.reports[peer] = replace(said, us_per_layer=500_000)
    assert await scene.hops() == [second.endpoint]
    scene.told.reports[peer] = replace(said, free_kv_tokens=0)
    assert await scene.hops() == [second.endpoint]
    scene.told.reports[peer] = said
    assert await scene.hops() == [first.endpoint]


async def test_who_has_gone_or_is_leaving_holds_nothing_in_listings(scene: Scene) -> None:
    first, second = await scene.holder(), await scene.holder()
    for holder in (first, second):
        await holder.say(Span(0, 4), 10)

    async def living() -> set[PeerId]:
        return {record.peer for record in await scene.routes.living(CARD)}

    both = {first.endpoint.peer_id, second.endpoint.peer_id}
    assert await living() == both
    scene.told.leaving.add(first.endpoint.peer_id)
    assert await living() == both - {first.endpoint.peer_id}
    assert {record.peer for record in await scene.routes.coverage(CARD)} == both


async def test_routes_are_planned_once_and_the_next_best_are_kept(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    holders = [await scene.holder(BUSY), await scene.holder(BUSY), await scene.holder()]
    for place, holder in enumerate(holders):
        await holder.say(Span(0, 4), 10 + 50_000 * place)
    plan, n_plans = scene.routes._plan, 0

    async def counted(needs: Needs, records: Sequence[CoverageRecord], avoid: frozenset[PeerId]) -> list[Route]:
        nonlocal n_plans
        n_plans += 1
        return await plan(needs, records, avoid)

    monkeypatch.setattr(scene.routes, "_plan", counted)
    assert await scene.hops() == [holders[2].endpoint]
    assert [len(holder.asked) for holder in holders] == [1, 1, 1]
    assert n_plans == 1
