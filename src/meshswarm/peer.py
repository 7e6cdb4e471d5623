"""One peer: the parts composed, in the order they start and the order they end.

Start: folder and key, socket, DHT, API, then the model, then "ready". End: stop accepting, drain sessions, leave the
DHT, close the API, close QUIC, join the engine's thread. The rule this file keeps: it wires parts together and decides
nothing that a part could decide itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshswarm.api.errand import Errand
from meshswarm.api.key import load_or_create_api_key
from meshswarm.api.plan import PATH as PLAN_PATH
from meshswarm.api.plan import plan_query
from meshswarm.api.server import ApiServer
from meshswarm.artifacts.header_exchange import offer_headers
from meshswarm.artifacts.manifest_exchange import offer_manifests
from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.store.store import Store
from meshswarm.config import DEFAULT_API_PORT, DEFAULT_PEER_PORT, Address, Home, HomeLock, WireChoice
from meshswarm.dht.known_peers import KnownPeer, KnownPeers
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.discovery.bootstrap import Bootstrap
from meshswarm.discovery.settings import DiscoverySettings
from meshswarm.errors import ConfigError, MeshswarmError
from meshswarm.fetching.sharing import PULL_PATH, Sharing, SharingSettings, Work
from meshswarm.head.draft_model import DraftModel, check_draft_model
from meshswarm.head.forecast import Forecast
from meshswarm.head.head import MAX_WAIT_S, Head
from meshswarm.head.models import ModelDirectory
from meshswarm.head.names import RememberedNames
from meshswarm.head.request import Speculation
from meshswarm.head.routes import Routes
from meshswarm.head.wire_wish import WireWish
from meshswarm.identity import Identity, PeerId
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.membership.keeper import Keeper
from meshswarm.membership.swarms import Swarms
from meshswarm.net.endpoint import Endpoint
from meshswarm.routing.gossip.node import GossipNode
from meshswarm.routing.own_speeds import OwnSpeeds
from meshswarm.serving import DEFAULT_N_CTX, Report, Serving, ServingSettings, Surroundings
from meshswarm.serving.auto import AutoChoice
from meshswarm.serving.layers import known_model
from meshswarm.serving.load import LoadTeller
from meshswarm.serving.moving import duties_of
from meshswarm.span import missing_layers
from meshswarm.stage.proving.wire_proofs import WireProofs
from meshswarm.stage.sessions.activation_log import ActivationLog, LogLimits
from meshswarm.stage.sessions.sent_rows import SentRows
from meshswarm.stage.sessions.server import SpanServer
from meshswarm.stage.slices.store import Slices
from meshswarm.tasks import Tasks

MAX_DRAIN_S = 10.0
"""So long a peer that stops waits for answers that are being given, its own programs' and others'."""
DRAIN_S = 3.0
"""So long it waits for others' sessions that compute nothing."""
_SOURCES = ("pypi:", "hf:", "https:")
LAYERS_PERIOD_S = 3.0


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a person chose. None means: the default, or no layers at all."""

    home: Home
    swarm: str | None
    listen: Address | None = None
    api: Address | None = None
    join: tuple[tuple[PeerId, Address], ...] = ()
    serving: ServingSettings | None = None
    speculation: Speculation = Speculation.AUTO
    max_wait_s: float = MAX_WAIT_S
    draft_model: str | None = None
    wire: WireChoice = WireChoice.F32
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    private: bool = False
    """Only ever in a private swarm."""
    sharing: SharingSettings = field(default_factory=SharingSettings)


class Peer:
    """`run` it; `stop` it from a signal handler."""

    def __init__(self, settings: PeerSettings, report: Report) -> None:
        self.settings = settings
        self._report = report
        self._stopping = asyncio.Event()
        self._started = time.monotonic()
        self._serving: Serving | None = None
        self._draft_model: DraftModel | None = None
        self._background: list[asyncio.Task[None]] = []
        self._key: str | None = None
        self.sharing: Sharing | None = None

    def stop(self) -> None:
        self._stopping.set()

    @property
    def missed(self) -> list[dict[str, str]]:
        """The last peers that were looked for and not reached: `peer`, `address`, `why`."""
        return self._bootstrap.missed

    async def run(self) -> None:
        """Until `stop`. Raises MeshswarmError when the peer cannot start; the folder's lock is held all the while."""
        home = self.settings.home.create()
        lock = HomeLock(home)
        try:
            await self._run(home)
        finally:
            lock.release()

    async def _run(self, home: Home) -> None:
        """Parts end in the opposite order of their start, each whether or not the others managed to."""
        self.membership = Swarms(home).open(self.settings.swarm, private=self.settings.private, now_ms=_now_ms())
        self._is_first_start = not home.key.exists()
        self.identity = Identity.load_or_create(home.key)
        self.store = Store(home.root)
        self.manifests = Manifests(home.root)
        self.slices = Slices(self.store, home.root)
        async with contextlib.AsyncExitStack() as parts:
            self.receipts = await asyncio.to_thread(ReceiptStore, home.ledger)
            writer = ReceiptWriter(self.receipts, self._warn)
            parts.push_async_callback(asyncio.to_thread, writer.close)
            parts.push_async_callback(self._stop_draft_model)
            parts.push_async_callback(self._stop_serving)
            self.endpoint = await self._bind_endpoint()
            parts.push_async_callback(self.endpoint.close)
            parts.push_async_callback(self._stop_sharing)
            self._key = self._api_key()
            self.api = self._bind_api(self._key)
            parts.push_async_callback(self.api.stop)
            try:
                async with asyncio.TaskGroup() as group:
                    await self._live(group, writer)
            except BaseExceptionGroup as group:
                known, unknown = group.split((MeshswarmError, OSError))
                if known is None or unknown is not None:
                    raise
                raise known.exceptions[0] from None

    def _notice(self, sentence: str) -> None:
        self._report({"event": "notice", "message": sentence})

    def _warn(self, error: MeshswarmError) -> None:
        self._report({"event": "warning", "message": str(error)})

    def _fault(self, error: Exception) -> None:
        """A background task failed: its own session suffers, the peer goes on, and a person can report it."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        self._report({"event": "warning", "message": f"a task failed unexpectedly at {place}: {error!r}"})

    async def _stop_serving(self) -> None:
        if self._serving is not None:
            await self._serving.stop()

    async def _stop_sharing(self) -> None:
        if self.sharing is not None:
            await self.sharing.stop()

    async def _stop_draft_model(self) -> None:
        if self._draft_model is not None:
            await self._draft_model.stop()

    # -- ports

    def _api_key(self) -> str | None:
        address = self.settings.api
        if address is None or address.is_loopback:
            return None
        key = load_or_create_api_key(self.settings.home.api_key)
        if key.created:
            self._report({"event": "api-key", "api_key": key.text, "path": str(self.settings.home.api_key)})
        return key.text

    def _bind_api(self, api_key: str | None) -> ApiServer:
        if self.settings.api is not None:
            return ApiServer.bind(self.settings.api, api_key=api_key)
        try:
            return ApiServer.bind(Address("127.0.0.1", DEFAULT_API_PORT), api_key=None)
        except ConfigError:
            self._report({"event": "port-taken", "port": DEFAULT_API_PORT, "what": "the endpoint"})
            return ApiServer.bind(Address("127.0.0.1", 0), api_key=None)

    async def _bind_endpoint(self) -> Endpoint:
        swarm = self.membership.swarm
        if self.settings.listen is not None:
            return await Endpoint.bind(self.identity, self.settings.listen, swarm=swarm)
        try:
            return await Endpoint.bind(self.identity, Address("0.0.0.0", DEFAULT_PEER_PORT), swarm=swarm)
        except ConfigError:
            self._report({"event": "port-taken", "port": DEFAULT_PEER_PORT, "what": "other peers"})
            return await Endpoint.bind(self.identity, Address("0.0.0.0", 0), swarm=swarm)

    # -- living

    async def _live(self, group: asyncio.TaskGroup, writer: ReceiptWriter) -> None:
        home = self.settings.home
        tasks = self._tasks = Tasks(group, self._fault)
        swarm = self.membership.swarm
        bookkeeper = Bookkeeper(self.identity, writer, swarm.swarm_id)
        self.dht = Dht(self.endpoint, self.identity, swarm)
        known = KnownPeers(self.membership.known_peers, self.identity, swarm.swarm_id)
        self._bootstrap = Bootstrap(
            self.settings.discovery, self.endpoint, self.dht, swarm, known, self._asked(), self._report, home.dht_nodes
        )
        sent = SentRows(ActivationLog(LogLimits(), home.spill), tasks)
        self.spans = SpanServer(self.endpoint, tasks, bookkeeper, sent)
        self.gossip = GossipNode(self.endpoint, self.identity, swarm, known=self.dht.knows)
        offer_headers(self.endpoint, self.store)
        offer_manifests(self.endpoint, self.manifests)
        names = RememberedNames(home.root / "names.json", swarm.swarm_id)
        directory = ModelDirectory(self.endpoint, self.store, self.dht, home.vocabularies, names, self.manifests.pinned)
        routes = Routes(self.endpoint, self.identity, self.dht, bookkeeper, self._own_records, news=self.gossip)
        self._load = LoadTeller(
            self.identity.peer_id,
            self.gossip,
            self.dht,
            self.spans,
            lambda: self._serving,
            routes.in_use,
            seeds=lambda: self.sharing is not None and self.sharing.is_seeding,
            report=self._report,
            is_to_serve=self.settings.serving is not None,
        )
        self._wire = WireWish(self.settings.wire, WireProofs(home.proofs), self._notice)
        speeds = OwnSpeeds(home.speeds)
        self._forecast = Forecast(routes, directory, self.store, speeds, self.identity.peer_id)
        head = self._head = Head(
            routes,
            directory,
            tasks,
            speculation=self.settings.speculation,
            max_wait_s=self.settings.max_wait_s,
            wire=self._wire,
        )
        self.sharing = self._share()
        self._keeper = self._keep_membership()
        self._background = [group.create_task(self._start(head, directory)), tasks.create_task(self.dht.run())]
        self._background.append(tasks.create_task(self._bootstrap.run()))
        self._background.append(tasks.create_task(self._load.run()))
        self._background.append(tasks.create_task(self.sharing.run()))
        self._background.append(tasks.create_task(head.keep_known()))
        gossiping = tasks.create_task(self.gossip.run())  # to the very end: a peer that leaves says so
        if self._keeper is not None:
            self._background.append(tasks.create_task(self._keeper.run()))
        try:
            await self._stopping.wait()
        finally:
            if self._stopping.is_set():
                self._report({"event": "stopping"})
            for task in self._background:
                task.cancel()
            await self._leave(sent)
            gossiping.cancel()

    async def _start(self, head: Head, directory: ModelDirectory) -> None:
        """From a bound socket to "ready". A signal may cancel it anywhere; a failure here is the peer's."""
        await self.api.start(
            head, views=self._views(), queries={PLAN_PATH: plan_query(self._forecast)}, errands=self._errands()
        )
        first = {"first_start": self._is_first_start, "announced": self._bootstrap.announced}
        self._report({"event": "started", **self._reach(), **first})
        await self._bootstrap.first()
        serving, auto = self.settings.serving, None
        if serving is not None and serving.is_auto:
            # A draft model guesses for one model alone.
            serving = replace(serving, changes_model=self.settings.draft_model is None)
            auto = AutoChoice(serving, self._around(), self.gossip)
            self.settings = replace(self.settings, serving=await auto.next())
        if self.settings.draft_model is not None:  # first: it is small, and may turn out to be the wrong one
            head.guess_with(await self._load_draft_model(self.settings.draft_model), self._warn)
        if self.settings.serving is not None:
            await self._serve(self.settings.serving, directory, auto)
        outlook = await self._outlook(head)
        self._report({"event": "ready", **self._reach(), **(await self._served()), **outlook})
        if outlook["missing"] or outlook["ask"] is None:
            self._background.append(self._tasks.create_task(self._wait_for_layers(head)))

    def _share(self) -> Sharing:
        """The files that this peer fetches and gives. While it computes, giving makes way."""
        work = Work(
            is_busy=lambda: len(self.spans.sessions) > self.spans.n_parked,
            slowdown=lambda: None if self._serving is None else self._serving.take_slowdown(),
        )
        return Sharing(
            self.endpoint,
            self.identity,
            self.dht,
            self.membership.swarm,
            self.store,
            self.slices,
            self.settings.home.root,
            settings=self.settings.sharing,
            report=self._report,
            work=work,
        )

    def _keep_membership(self) -> Keeper | None:
        """What keeps a private swarm's keys and member list up to date while this peer runs."""
        membership = self.membership
        if membership.folder is None or membership.standing is None:
            return None
        return Keeper(self.endpoint, membership.folder, membership.swarm, membership.standing, self._report)

    def _around(self) -> Surroundings:
        return Surroundings(
            home=self.settings.home,
            identity=self.identity,
            endpoint=self.endpoint,
            dht=self.dht,
            store=self.store,
            slices=self.slices,
            spans=self.spans,
            tasks=self._tasks,
            report=self._report,
            library=None if self.sharing is None else self.sharing.library,
        )

    async def _serve(self, settings: ServingSettings, directory: ModelDirectory, auto: AutoChoice | None) -> None:
        around = self._around()
        self._serving = serving = await (Serving.load(settings, around) if auto is None else auto.load(settings))

        def prefer() -> None:
            directory.preferred = serving.model.model_id

        prefer()
        serving.on_model = prefer
        await serving.announce()
        duties = duties_of(serving, serving.settings, around, self.gossip)
        self._background += [self._tasks.create_task(duty) for duty in duties]
        await self._wire.of(self._serving.model)  # what is not proved is said at the start, not at the first request

    async def _load_draft_model(self, ref: str) -> DraftModel:
        """Raises ConfigError when it cannot guess for the model that is to be served here."""
        serving = self.settings.serving
        around = self._around()
        draft = await known_model(ServingSettings(ref, waits=serving is not None and serving.waits), around)
        if serving is not None:
            model = await known_model(serving, around)
            await asyncio.to_thread(check_draft_model, self.store, draft, model)
        if around.library is not None:
            await around.library.have_whole(draft)
        self._draft_model = await DraftModel.load(
            draft.id_text,
            self.store,
            self.slices,
            n_ctx=DEFAULT_N_CTX if serving is None or serving.n_ctx is None else serving.n_ctx,
            n_threads=1 if serving is None or serving.n_threads is None else serving.n_threads,
        )
        return self._draft_model

    async def _outlook(self, head: Head) -> dict[str, Any]:
        """Which model a client here would best ask for, None when there is none, and what is missing of it."""
        own_model_id = None if self._serving is None else self._serving.model.id_text
        listings = sorted(await head.models(), key=lambda each: (each.model_id != own_model_id, not each.ready))
        if not listings:
            return {"ask": None, "missing": []}
        best = listings[0]
        gaps = missing_layers(best.covered, best.n_layers)
        return {"ask": best.id, "missing": [str(gap) for gap in gaps]}

    async def _wait_for_layers(self, head: Head) -> None:
        """Say when the model that could not be asked for can be."""
        while True:
            await asyncio.sleep(LAYERS_PERIOD_S)
            outlook = await self._outlook(head)
            if outlook["ask"] is not None and not outlook["missing"]:
                self._report({"event": "complete", **self._reach(), **outlook})
                return

    async def _leave(self, sent: SentRows) -> None:
        """Out of the swarm in good order: nobody is sent here any more, the running sessions get a moment."""
        self.spans.draining = True
        self._load.tell()
        n_answers = self.api.n_running + self.spans.n_at_work_for(self.identity.peer_id)
        if n_answers:
            self._report({"event": "draining", "answers": n_answers, "most_s": MAX_DRAIN_S})
        self._bootstrap.save()
        await self.dht.withdraw()
        await asyncio.gather(self._end_answers(), self.spans.drain(MAX_DRAIN_S, idle_s=DRAIN_S))
        await self.gossip.leave()
        await sent.stop()

    async def _end_answers(self) -> None:
        """Those of this peer's own programs."""
        await self.api.stop(drain_s=MAX_DRAIN_S)
        await self._head.close()

    def _asked(self) -> list[KnownPeer]:
        """Peers that a person named: with --join, or in a private swarm's invite."""
        joined = [(peer, (address,)) for peer, address in self.settings.join]
        return [each for each in (*joined, *self.membership.invited) if each[0] != self.identity.peer_id]

    # -- what others may know

    def _own_records(self) -> list[CoverageRecord]:
        return [] if self._serving is None else [self._serving.record()]

    def _reach(self) -> dict[str, Any]:
        return {
            "peer_id": str(self.identity.peer_id),
            "address": f"{self.identity.peer_id}@{self.endpoint.addresses[0]}",
            "api": self.api.base_url,
            "api_elsewhere": self._api_elsewhere(),
            "api_key_path": None if self._key is None else str(self.settings.home.api_key),
            "swarm": self.membership.swarm.name,
            "private": self.membership.swarm.is_private,
            "model_ref": self._model_ref(),
            "gives_files": self.settings.sharing.seeds,
        }

    def _api_elsewhere(self) -> str | None:
        """The endpoint's base URL for other machines, when they can reach it."""
        if not self.api.address.is_unspecified:
            return None
        return f"http://{Address(self.endpoint.addresses[0].host, self.api.address.port)}/v1"

    def _model_ref(self) -> str | None:
        """What to call the model on another machine: a path of this one means nothing there."""
        settings = self.settings.serving if self._serving is None else self._serving.settings
        if settings is None:
            return None
        return settings.model if settings.model.startswith(_SOURCES) else Path(settings.model).name

    async def _served(self) -> dict[str, Any]:
        if self._serving is None:
            return {"model": None, "layers": None, **self._load.facts(), "wire": await self._wire.facts(None)}
        wire = await self._wire.facts(self._serving.model)
        return {**self._serving.facts(), **self._load.facts(), "wire": wire}

    async def _status(self) -> dict[str, Any]:
        return {
            **self._reach(),
            **(await self._served()),
            "uptime_s": round(time.monotonic() - self._started, 1),
            "sessions": len(self.spans.sessions) - self.spans.n_parked,
            "sessions_parked": self.spans.n_parked,
            "sessions_waiting": self.spans.n_waiting,
            "sessions_kept": self._head.n_warm,
            "sessions_total": self.spans.sessions_total,
            "rows_total": self.spans.rows_total,
            "connections": len(self.endpoint.connections),
            "discovery": self._bootstrap.as_json(),
            "gossip": self.gossip.as_json(),
            "files": None if self.sharing is None else self.sharing.as_json(),
            "receipts": await asyncio.to_thread(self.receipts.count),
        }

    def _errands(self) -> dict[str, Errand]:
        return {} if self.sharing is None else {PULL_PATH: self.sharing.pull}

    def _views(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {
            "/meshswarm/status": self._status,
            "/meshswarm/peers": self._peers,
            "/meshswarm/members": self._members,
        }

    async def _members(self) -> dict[str, Any]:
        return {"swarm": None} if self._keeper is None else self._keeper.view()

    async def _peers(self) -> list[dict[str, Any]]:
        return [{**entry.as_json(), **self.gossip.facts(entry.peer)} for entry in await self.dht.peers()]


def _now_ms() -> int:
    return int(time.time() * 1000)
