"""One peer: the parts composed, in the order they start and the order they end.

Start: folder and key, socket, DHT, API, then the model, then "ready". End: stop accepting, drain sessions, leave the
DHT, close the API, close QUIC, join the engine's thread. The rule this file keeps: it wires parts together and decides
nothing that a part could decide itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshswarm.api.key import load_or_create_api_key
from meshswarm.api.server import ApiServer
from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.header_exchange import offer_headers
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.store import Store
from meshswarm.config import DEFAULT_API_PORT, DEFAULT_PEER_PORT, PUBLIC_SWARM, Address, Home, HomeLock
from meshswarm.dht.known_peers import load_known_peers, save_known_peers
from meshswarm.dht.node import Dht
from meshswarm.dht.records import MAX_RTTS, RTT_PREFIX_BYTES, CoverageRecord
from meshswarm.errors import ConfigError, MeshswarmError
from meshswarm.head.head import Head
from meshswarm.head.models import ModelDirectory
from meshswarm.head.routes import Routes
from meshswarm.identity import Identity, PeerId
from meshswarm.ledger.bookkeeper import Bookkeeper
from meshswarm.ledger.store import ReceiptStore, ReceiptWriter
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm
from meshswarm.routing.placement import choose_span
from meshswarm.span import Span, missing_layers
from meshswarm.stage.activation_log import ActivationLog, LogLimits
from meshswarm.stage.engine import SpanEngine, padding
from meshswarm.stage.memory import kv_bytes_per_layer, layer_weight_bytes, shared_weight_bytes
from meshswarm.stage.messages import MAX_ROWS_PER_STEP
from meshswarm.stage.sent_rows import SentRows
from meshswarm.stage.server import Served, SpanServer
from meshswarm.stage.slices import Slices
from meshswarm.tasks import Tasks

DEFAULT_N_CTX = 4095  # with the cell that the exact profile pads with, a whole number of llama.cpp's 256-cell steps
PROCESS_BYTES = 160 << 20  # the program itself with its buffers, beside weights and KV (docs/benchmarks.md)
DRAIN_S = 3.0
SURVEY_PERIOD_S = 120.0
LAYERS_PERIOD_S = 3.0
LOAD_DELAY_S = 1.0  # what changes back within a second is not worth telling
SERVING_STRANGERS = (
    "This peer serves strangers: whoever is in the swarm 'public' may compute on this machine, and their prompts pass "
    "through it. To stay among yourselves, choose a name only you know with --swarm NAME."
)
WINDOW_ROWS = 4 * MAX_ROWS_PER_STEP

Report = Callable[[Mapping[str, Any]], None]
"""Takes what a person or a program should know: a mapping with "event" and that event's fields."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a person chose. None means: the default, or whatever fits."""

    home: Home
    swarm: str
    listen: Address | None = None
    api: Address | None = None
    join: tuple[tuple[PeerId, Address], ...] = ()
    model: str | None = None
    span: Span | None = None
    memory_bytes: int | None = None
    n_threads: int | None = None
    n_ctx: int | None = None
    n_sessions: int = 4


class Peer:
    """`run` it; `stop` it from a signal handler."""

    def __init__(self, settings: PeerSettings, report: Report) -> None:
        self.settings = settings
        self._report = report
        self._stopping = asyncio.Event()
        self._started = time.monotonic()
        self._coverage: CoverageRecord | None = None
        self._engine: SpanEngine | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._own_model_id: str | None = None
        self._key: str | None = None

    def stop(self) -> None:
        self._stopping.set()

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
        is_first_start = not home.key.exists()
        self.identity = Identity.load_or_create(home.key)
        if is_first_start and self.settings.swarm == PUBLIC_SWARM and self.settings.model is not None:
            self._report({"event": "notice", "message": SERVING_STRANGERS})
        self.store = Store(home.root)
        self.slices = Slices(self.store, home.root)
        async with contextlib.AsyncExitStack() as parts:
            self.receipts = await asyncio.to_thread(ReceiptStore, home.ledger)
            writer = ReceiptWriter(self.receipts, self._warn)
            parts.push_async_callback(asyncio.to_thread, writer.close)
            parts.push_async_callback(self._stop_engine)
            self.endpoint = await self._bind_endpoint()
            parts.push_async_callback(self.endpoint.close)
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

    def _warn(self, error: MeshswarmError) -> None:
        self._report({"event": "warning", "message": str(error)})

    def _fault(self, error: Exception) -> None:
        """A background task failed: its own session suffers, the peer goes on, and a person can report it."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        self._report({"event": "warning", "message": f"a task failed unexpectedly at {place}: {error!r}"})

    async def _stop_engine(self) -> None:
        if self._engine is not None:
            await self._engine.stop()

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
        swarm = Swarm(self.settings.swarm)
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
        swarm = Swarm(self.settings.swarm)
        bookkeeper = Bookkeeper(self.identity, writer, swarm.swarm_id)
        self.dht = Dht(self.endpoint, self.identity, swarm)
        sent = SentRows(ActivationLog(LogLimits(), home.spill), tasks)
        self.spans = SpanServer(self.endpoint, tasks, bookkeeper, sent)
        offer_headers(self.endpoint, self.store)
        directory = ModelDirectory(self.endpoint, self.store, self.dht, home.vocabularies)
        routes = Routes(self.endpoint, self.identity, self.dht, bookkeeper, self._own_records)
        head = Head(routes, directory, tasks)
        self._background = [group.create_task(self._start(head, directory)), tasks.create_task(self.dht.run())]
        try:
            await self._stopping.wait()
        finally:
            if self._stopping.is_set():
                self._report({"event": "stopping"})
            for task in self._background:
                task.cancel()
            await self._leave(sent)

    async def _start(self, head: Head, directory: ModelDirectory) -> None:
        """From a bound socket to "ready". A signal may cancel it anywhere; a failure here is the peer's."""
        await self.api.start(head, views={"/meshswarm/status": self._status, "/meshswarm/peers": self._peers})
        self._report({"event": "started", **self._reach()})
        await self._join()
        if self.settings.model is not None:
            await self._serve(self.settings.model, directory)
        self._background.append(self._tasks.create_task(self._survey()))
        outlook = await self._outlook(head)
        self._report({"event": "ready", **self._reach(), **self._serving(), **outlook})
        if outlook["missing"] or outlook["ask"] is None:
            self._background.append(self._tasks.create_task(self._wait_for_layers(head)))

    async def _outlook(self, head: Head) -> dict[str, Any]:
        """Which model a client here would best ask for, None when there is none, and what is missing of it."""
        listings = sorted(await head.models(), key=lambda each: (each.model_id != self._own_model_id, not each.ready))
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
        save_known_peers(self.settings.home.known_peers, self.dht.known_peers())
        await self.dht.withdraw()
        await self.api.stop()
        await self.spans.drain(DRAIN_S)
        await sent.stop()

    async def _join(self) -> None:
        asked = [(peer, (address,)) for peer, address in self.settings.join]
        known = load_known_peers(self.settings.home.known_peers)
        if not asked and not known:
            return
        reached = await self.dht.join([*asked, *known])
        for peer, address in self.settings.join:
            if self.endpoint.connection(peer) is None:
                failed = {"peer": str(peer), "address": str(address), "swarm": self.settings.swarm}
                self._report({"event": "join-failed", **failed})
        self._report({"event": "joined", "peers": reached})

    # -- serving layers

    async def _serve(self, ref: str, directory: ModelDirectory) -> None:
        info = await asyncio.to_thread(
            self.store.obtain, ref, say=lambda sentence: self._report({"event": "model", "message": sentence})
        )
        n_ctx = min(self.settings.n_ctx or DEFAULT_N_CTX, info.n_ctx_train)
        span = self.settings.span or await self._choose_span(info, n_ctx)
        self._report({"event": "loading", "model": info.name, "layers": str(span), "n_layers": info.n_layers})
        slice_file = await asyncio.to_thread(
            self.slices.file, info.model_id, span, pad_layers=padding(span, info.n_layers)
        )
        engine = await asyncio.to_thread(
            SpanEngine.load,
            slice_file.path,
            span,
            info.n_layers,
            n_ctx=n_ctx,
            n_slots=self.settings.n_sessions,
            n_threads=self.settings.n_threads or max(1, (os.cpu_count() or 2) // 2),
            max_rows=MAX_ROWS_PER_STEP,
        )
        self._engine = engine
        engine.start(asyncio.get_running_loop())
        self._coverage = CoverageRecord(
            peer=self.identity.peer_id,
            addresses=tuple(self.endpoint.addresses),
            model_id=info.model_id,
            span=span,
            loaded=True,
            numclass=engine.numclass,
            n_ctx=n_ctx,
            us_per_layer=engine.speed.us_per_layer,
            prefill_us_per_row_layer=engine.speed.prefill_us_per_row_layer,
            free_kv_tokens=n_ctx * self.settings.n_sessions,
            roles=("server",),
        )
        self.spans.on_load = self._on_load
        self.spans.serve(Served(info.model_id, info.n_layers, span, slice_file.root, engine, n_ctx, WINDOW_ROWS))
        directory.preferred = info.model_id
        self.model = info
        self._own_model_id = info.id_text
        await self.dht.publish_card(ModelCard.of(info).sign(self.identity))
        await self.dht.publish_coverage(self._coverage)

    async def _choose_span(self, info: ModelInfo, n_ctx: int) -> Span:
        """The whole model when it fits, or the rarest layers that do."""
        whole = Span(0, info.n_layers)
        if self.settings.memory_bytes is None:
            return whole
        kv_bytes = kv_bytes_per_layer(info.n_kv_row, n_ctx, self.settings.n_sessions)
        header = self.store.header(info.model_id)
        costs = [n_bytes + kv_bytes for n_bytes in layer_weight_bytes(header, info.n_layers)]
        held = [record.span for record in await self.dht.coverage(info.model_id, info.n_layers)]
        fixed = shared_weight_bytes(header) + kv_bytes + PROCESS_BYTES  # one layer of padding has KV cells too
        span = choose_span(costs, fixed, self.settings.memory_bytes, held)
        if span is None:
            raise ConfigError(
                f"not even one layer of {info.name} fits into {self.settings.memory_bytes / 1e6:.0f} MB "
                f"with {self.settings.n_sessions} sessions of {n_ctx} positions; allow more, or fewer of either"
            )
        return span

    async def _survey(self) -> None:
        """Measure round trips to the peers that serve the same model, so that heads elsewhere can price this peer's
        hops; a first time soon after the start, then now and then."""
        wait_s = 3.0
        while self._coverage is not None:
            await asyncio.sleep(wait_s)
            wait_s = SURVEY_PERIOD_S
            with contextlib.suppress(MeshswarmError):
                rtts = await self._measure_rtts(self._coverage)
                if rtts != self._coverage.rtts:
                    self._coverage = replace(self._coverage, rtts=rtts)
                    await self.dht.publish_coverage(self._coverage)

    async def _measure_rtts(self, own: CoverageRecord) -> tuple[tuple[bytes, int], ...]:
        records = await self.dht.coverage(own.model_id, self.model.n_layers)
        rtts = []
        for record in [record for record in records if record.peer != own.peer][:MAX_RTTS]:
            with contextlib.suppress(MeshswarmError):
                connection = await self.endpoint.dial(record.peer, record.addresses)
                rtt_s = await connection.measure_rtt()
                rtts.append((record.peer.key[:RTT_PREFIX_BYTES], int(rtt_s * 1e6)))
        return tuple(sorted(rtts))

    # -- what others may know

    def _own_records(self) -> list[CoverageRecord]:
        if self._coverage is None or self._engine is None:
            return []
        return [replace(self._coverage, free_kv_tokens=self._engine.n_free_slots * self._coverage.n_ctx)]

    def _on_load(self) -> None:
        """A session began or ended: others should know when that made this peer full, or gave it room again."""
        if self._announcing is None or self._announcing.done():
            self._announcing = self._tasks.create_task(self._announce_load())

    async def _announce_load(self) -> None:
        await asyncio.sleep(LOAD_DELAY_S)
        if self._coverage is None or self.spans.draining:
            return
        (current,) = self._own_records()
        if (current.free_kv_tokens == 0) != (self._coverage.free_kv_tokens == 0):
            self._coverage = current
            await self.dht.publish_coverage(current)

    def _reach(self) -> dict[str, Any]:
        return {
            "peer_id": str(self.identity.peer_id),
            "address": f"{self.identity.peer_id}@{self.endpoint.addresses[0]}",
            "api": self.api.base_url,
            "api_elsewhere": self._api_elsewhere(),
            "api_key_path": None if self._key is None else str(self.settings.home.api_key),
            "swarm": self.settings.swarm,
            "model_ref": self._model_ref(),
        }

    def _api_elsewhere(self) -> str | None:
        """The endpoint's base URL for other machines, when they can reach it."""
        if not self.api.address.is_unspecified:
            return None
        return f"http://{Address(self.endpoint.addresses[0].host, self.api.address.port)}/v1"

    def _model_ref(self) -> str | None:
        """What to call the model on another machine: a path of this one means nothing there."""
        ref = self.settings.model
        return ref if ref is None or ref.startswith("pypi:") else Path(ref).name

    def _serving(self) -> dict[str, Any]:
        record = self._coverage
        if record is None:
            return {"model": None, "layers": None}
        return {
            "model": self.model.name,
            "model_id": self.model.id_text,
            "layers": str(record.span),
            "n_layers": self.model.n_layers,
            "n_ctx": record.n_ctx,
            "numclass": record.numclass,
            "us_per_layer": record.us_per_layer,
        }

    async def _status(self) -> dict[str, Any]:
        return {
            **self._reach(),
            **self._serving(),
            "uptime_s": round(time.monotonic() - self._started, 1),
            "sessions": len(self.spans.sessions),
            "sessions_total": self.spans.sessions_total,
            "rows_total": self.spans.rows_total,
            "connections": len(self.endpoint.connections),
            "receipts": await asyncio.to_thread(self.receipts.count),
        }

    async def _peers(self) -> list[dict[str, Any]]:
        return [entry.as_json() for entry in await self.dht.peers()]
