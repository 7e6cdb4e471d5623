"""The layers this peer serves: chosen, loaded, announced, measured from time to time, exchanged for others, and let go.

The rule this file keeps: what the swarm is told about this peer is made here alone, from what the engine says of
itself. Layers are announced when they are loaded and given up after that, so none is ever announced that is not served.
A peer without layers has no `Serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.dht.records import MAX_RTTS, RTT_PREFIX_BYTES, WHOLE_ONLY, CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.routing.choice import Choice
from meshswarm.routing.view import GOING, MOBILE, STANDBY
from meshswarm.serving.layers import (
    SERVER,
    choose_layers,
    cut_context,
    have_layers,
    intent_of,
    known_model,
    limits_of,
    load_slice,
    memory_model,
    others_of,
    placed,
    usual_speed,
)
from meshswarm.serving.reading import Holders, read_after_s
from meshswarm.serving.settings import ServingSettings, Surroundings
from meshswarm.span import Span
from meshswarm.stage.engine.devices import list_devices
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.loading import cpu_only_because
from meshswarm.stage.owner_first import AT_EASE, Mode, OwnerFirst, Standing
from meshswarm.stage.owner_watch import LoadMeter
from meshswarm.stage.sessions.terms import Served
from meshswarm.stage.sizes.memory import PROCESS_BYTES

FIRST_SURVEY_S = 3.0
SURVEY_PERIOD_S = 120.0
MODEL_GIVEN = "the model was given"
LOAD_DELAY_S = 1.0  # what changes back within a second is not worth telling
OWNER_PERIOD_S = 1.0
OLD_LAYERS_S = 15.0  # in which heads hear of a move
RETIRE_DRAIN_S = 600.0  # for sessions on layers that were left, where both fit
SWAP_DRAIN_S = 60.0  # where they do not: a move that has to wait for longer is given up


class Serving:
    """One model's layers on one engine. `load` returns when sessions are accepted; `stop` frees the engine."""

    @classmethod
    async def load(cls, settings: ServingSettings, around: Surroundings) -> Serving:
        """Raises MeshswarmError when these layers cannot be served here."""
        info = await known_model(settings, around)
        others = await others_of(settings, around, info)
        devices = await asyncio.to_thread(list_devices)
        model = await asyncio.to_thread(memory_model, settings, around, info)
        limits = await asyncio.to_thread(limits_of, settings, devices)
        choice = choose_layers(settings, model, limits, others, info.name)
        span = choice.span
        for because in (cut_context(settings, info), choice.notice, cpu_only_because(span, info.n_layers, devices)):
            if because:
                around.report({"event": "notice", "message": because})
        because = settings.because or (MODEL_GIVEN if settings.is_mobile and settings.span is None else "")
        if because:
            around.report(placed(because, info, span, others))
        intent = intent_of(around, info, choice, usual_speed(others)) if settings.is_mobile and others else None
        if intent is not None:
            await around.dht.publish_coverage(intent)
        try:
            await have_layers(settings, around, info, span)
            around.report({"event": "loading", "model": info.name, "layers": str(span), "n_layers": info.n_layers})
            served = await load_slice(settings, around, info, span, choice.n_ctx)
        except MeshswarmError:
            if intent is not None:
                await around.dht.withdraw(intent)
            raise
        return cls(settings, around, info, served)

    def __init__(self, settings: ServingSettings, around: Surroundings, model: ModelInfo, served: Served) -> None:
        """Use `load`."""
        self.model = model
        self.holders = Holders(around.dht, model.model_id, model.n_layers, time.monotonic)
        self.role = SERVER
        self.role_reason = ""
        self._settings = settings
        self._around = around
        self._served = served
        self._engines = [served.engine]  # all that must be stopped
        self._is_going = False
        self.on_model: Callable[[], None] = lambda: None  # called when another model is served
        self._standing = AT_EASE
        self._announcing: asyncio.Task[None] | None = None
        self._record = self._record_of(served)
        around.spans.on_load = self._on_load
        around.spans.serve(served)

    @property
    def _engine(self) -> SpanEngine:
        """That of the newest slice."""
        return self._served.engine

    @property
    def is_mobile(self) -> bool:
        """Whether it goes over to other layers by itself."""
        return self._settings.is_mobile

    @property
    def settings(self) -> ServingSettings:
        """What was chosen, by now."""
        return self._settings

    @property
    def is_changing(self) -> bool:
        """Whether layers that were left still serve their last sessions."""
        return len(self._engines) > 1

    @property
    def taken_bytes(self) -> int:
        """What the layers take in memory now, without the program."""
        return self._engine.memory.total_bytes

    def _record_of(self, served: Served) -> CoverageRecord:
        speed = served.engine.speed
        return CoverageRecord(
            peer=self._around.identity.peer_id,
            addresses=tuple(self._around.endpoint.addresses),
            model_id=self.model.model_id,
            span=served.span,
            loaded=True,
            numclass=served.engine.numclass,
            n_ctx=served.n_ctx,
            us_per_layer=speed.us_per_layer,
            prefill_us_per_row_layer=speed.prefill_us_per_row_layer,
            free_kv_tokens=served.n_ctx * self._settings.n_sessions,
            roles=self._roles(served),
            us_per_layer_4=speed.us_per_layer_4,
            us_per_layer_16=speed.us_per_layer_16,
            read_bytes_per_s=served.engine.paging.read_bytes_per_s,
            paged_bytes=served.engine.paging.paged_bytes,
        )

    def _roles(self, served: Served) -> tuple[str, ...]:
        whole = (WHOLE_ONLY,) if served.is_whole_only else ()
        mobile = (MOBILE,) if self._settings.is_mobile else ()
        return (self.role, *whole, *mobile, *((GOING,) if self._is_going else ()))

    async def announce(self) -> None:
        """Tell the swarm what is served here."""
        await self._around.dht.publish_card(ModelCard.of(self.model).sign(self._around.identity))
        await self._around.dht.publish_coverage(self._record)

    async def stop(self) -> None:
        for engine in self._engines:
            await engine.stop()

    def duties(self) -> list[Coroutine[None, None, None]]:
        """What is to be done as long as the peer lives."""
        return [self._survey(), *([self._yield_to_owner()] if self._settings.yields else [])]

    async def _survey(self) -> None:
        """Measure round trips to the peers that serve the same model, so that heads elsewhere can price this peer's
        hops; a first time soon after the start, then now and then."""
        wait_s = FIRST_SURVEY_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = max(SURVEY_PERIOD_S, read_after_s(len(self._around.dht.known_peers())))  # up to 16 dials
            with contextlib.suppress(MeshswarmError):
                rtts = await self._measure_rtts()
                if rtts != self._record.rtts:
                    await self._tell(rtts=rtts)

    async def _measure_rtts(self) -> tuple[tuple[bytes, int], ...]:
        records = await self.holders.read()
        rtts = []
        for record in [record for record in records if record.peer != self._record.peer][:MAX_RTTS]:
            with contextlib.suppress(MeshswarmError):
                connection = await self._around.endpoint.dial(record.peer, record.addresses)
                rtt_s = await connection.measure_rtt()
                rtts.append((record.peer.key[:RTT_PREFIX_BYTES], int(rtt_s * 1e6)))
        return tuple(sorted(rtts))

    async def _yield_to_owner(self) -> None:
        """Make room for the programs of whoever owns the machine, and go on when they have gone."""
        meter = LoadMeter()
        owner = OwnerFirst(self._engine.n_threads / (os.cpu_count() or 1))
        while True:
            await asyncio.sleep(OWNER_PERIOD_S)
            reading = await asyncio.to_thread(meter.read)  # some machines take a while to tell of their battery
            self._stand(owner.observe(reading, time.monotonic()))

    def _stand(self, standing: Standing) -> None:
        before, self._standing = self._standing, standing
        if standing.mode is before.mode:
            return
        for engine in self._engines:
            engine.set_share(standing.mode.value)
        if standing.mode is Mode.PAUSED:
            self._around.spans.rest(standing.reason)
        else:
            self._around.spans.resume()
        self._around.report({"event": "owner", "mode": standing.mode.name.lower(), "reason": standing.reason})
        self._on_load()

    # -- other layers

    async def go_over(self, span: Span, *, beside: bool) -> bool:
        """Serve other layers of the model instead: whether that came to be.

        `beside`: both slices fit into memory, so the new one is loaded and announced first, and the old one serves a
        while longer whoever asks for it. Else the old one is emptied first; where its sessions last too long, it stays.
        What cannot be loaded is reported, and the old layers are served on.
        """
        old = self._served
        await self._tell(next_span=span)
        try:
            await have_layers(self._settings, self._around, self.model, span)  # the old ones are served meanwhile
            if not beside and not await self._give_up(old):
                await self._tell(next_span=None)
                return False
            new = await self._load_again(span, old.n_ctx)
        except MeshswarmError as error:
            self._around.report({"event": "warning", "message": f"The layers {span} cannot be served here: {error}"})
            await self._tell(next_span=None)
            await self.restore()
            return False
        self._take(new, beside=beside)
        self.role, self.role_reason = SERVER, ""
        self._record = replace(self._record_of(new), rtts=self._record.rtts)
        await self._tell()
        if beside:
            self._around.tasks.create_task(self._retire(old))
        return True

    async def announce_going(self, is_going: bool) -> None:
        """Say that others should not count on these layers any more, or take that back."""
        if is_going != self._is_going:
            self._is_going = is_going
            await self._tell(roles=self._roles(self._served))

    async def change_model(self, settings: ServingSettings, info: ModelInfo, choice: Choice, *, beside: bool) -> bool:
        """Serve layers of another model instead, as `go_over` does other layers; whether that came to be. `settings`:
        with that model."""
        old, record = self._served, self._record
        intent = intent_of(self._around, info, choice, record.us_per_layer)
        await self._around.dht.publish_coverage(intent)
        try:
            await have_layers(settings, self._around, info, choice.span)  # the old ones are served meanwhile
            if not beside and not await self._give_up(old):
                await self._around.dht.withdraw(intent)
                return False
            new = await load_slice(settings, self._around, info, choice.span, choice.n_ctx)
        except MeshswarmError as error:
            self._around.report({"event": "warning", "message": f"{info.name} cannot be served here: {error}"})
            await self._around.dht.withdraw(intent)
            await self.restore()
            return False
        self._take(new, beside=beside)
        self.model, self._settings = info, settings
        self.holders = Holders(self._around.dht, info.model_id, info.n_layers, time.monotonic)
        self.role, self.role_reason, self._is_going = SERVER, "", False
        self._record = self._record_of(new)
        self.on_model()
        await self.announce()
        await self._around.dht.withdraw(record)
        if beside:
            self._around.tasks.create_task(self._retire(old))
        return True

    async def restore(self) -> None:
        """Load again what was given up for layers that could not be loaded. Raises MeshswarmError."""
        if not self._engines:
            self._take(await self._load_again(self._served.span, self._served.n_ctx), beside=False)
            await self._tell(loaded=True)

    async def _load_again(self, span: Span, n_ctx: int) -> Served:
        self._around.report(
            {"event": "loading", "model": self.model.name, "layers": str(span), "n_layers": self.model.n_layers}
        )
        return await load_slice(self._settings, self._around, self.model, span, n_ctx)

    def _take(self, new: Served, *, beside: bool) -> None:
        """Sessions are accepted for the new slice from here on."""
        self._served = new
        self._engines.append(new.engine)
        new.engine.set_share(self._standing.mode.value)
        self._around.spans.serve(new, beside=beside)

    async def _give_up(self, old: Served) -> bool:
        """Let the old slice go, once nobody uses it; False when its sessions last too long."""
        if not await self._around.spans.empty(old, SWAP_DRAIN_S):
            self._around.spans.reopen()
            return False
        await self._tell(loaded=False)
        await self._end(old)
        return True

    async def _retire(self, old: Served) -> None:
        """Serve those who have not heard of the move yet, then end the old slice; at once when the peer leaves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OLD_LAYERS_S):
                await self._around.spans.leaving.wait()
        await self._around.spans.retire(old, RETIRE_DRAIN_S)
        await self._end(old)

    async def _end(self, old: Served) -> None:
        """Its file may go from the disk after that."""
        self._engines.remove(old.engine)
        await old.engine.stop()
        self._around.slices.let_go(old.model_id, old.span)

    async def stand_by(self, is_spare: bool, reason: str) -> None:
        """Be a standby, or a server again, and say so: to whoever sits here once, with the reason."""
        role = STANDBY if is_spare else SERVER
        if role != self.role:
            self.role, self.role_reason = role, reason
            self._around.report({"event": "role", "role": role, "message": reason})
            await self._tell(roles=self._roles(self._served))

    def take_slowdown(self) -> float | None:
        """How many times as long as at load the last decode steps took; None without any since the last call."""
        return self._engine.take_slowdown()

    # -- what others may know

    def record(self) -> CoverageRecord:
        """What is true at this moment for this peer's own head."""
        return replace(self._record, free_kv_tokens=self._around.spans.n_free_slots * self._record.n_ctx)

    def public_record(self) -> CoverageRecord:
        """What is true at this moment for strangers."""
        record = self.record()
        return replace(record, free_kv_tokens=0) if self._standing.mode is Mode.PAUSED else record

    def facts(self) -> dict[str, Any]:
        """For "ready" and for the status."""
        record = self._record
        return {
            "model": self.model.name,
            "model_id": self.model.id_text,
            "layers": str(record.span),
            "n_layers": self.model.n_layers,
            "n_ctx": record.n_ctx,
            "numclass": record.numclass,
            "us_per_layer": record.us_per_layer,
            "threads": self._engine.n_threads_now,
            "back_end": self._engine.offload.backend,
            "memory": {**self._engine.memory.as_json(), "program_bytes": PROCESS_BYTES},
            "owner": {"mode": self._standing.mode.name.lower(), "reason": self._standing.reason},
            "role": self.role,
            "role_reason": self.role_reason,
            "moves": self._settings.is_mobile,
            "next_layers": None if record.next_span is None else str(record.next_span),
        }

    async def _tell(self, **changes: Any) -> None:
        """Say what is true now, with these fields of the record changed."""
        self._record = replace(self._record, **changes)
        self._record = self.public_record()
        await self._around.dht.publish_coverage(self._record)

    def _on_load(self) -> None:
        """A session began or ended: others should know when that made this peer full, or gave it room again."""
        if self._announcing is None or self._announcing.done():
            self._announcing = self._around.tasks.create_task(self._announce_load())

    async def _announce_load(self) -> None:
        await asyncio.sleep(LOAD_DELAY_S)
        while not self._around.spans.draining:  # it may change again while it is being told
            current = self.public_record()
            if (current.free_kv_tokens == 0) == (self._record.free_kv_tokens == 0):
                return
            self._record = current
            await self._around.dht.publish_coverage(current)
