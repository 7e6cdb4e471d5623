"""Models by what people call them, got as far as they are needed: the header to know one, a span's bytes to serve it.

The rule this file keeps: what is on the disk is never asked for, and what is asked for is no more than is needed; a
name is looked up here first, then with its publisher, then among the swarm's cards, and two models of one name are
never guessed between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshswarm.artifacts import sources
from meshswarm.artifacts.header_exchange import fetch_header
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.manifests.catalogue import CATALOGUE, CatalogueEntry
from meshswarm.artifacts.merkle import model_id_text, parse_model_id
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.names import clean_name, did_you_mean, matches
from meshswarm.artifacts.sources.references import is_remote
from meshswarm.artifacts.store.finding import AmbiguousModelError
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.node import Dht
from meshswarm.errors import ArtifactError, MeshswarmError, UnknownModelError
from meshswarm.fetching.fetch import Wanted
from meshswarm.fetching.fetcher import Fetcher
from meshswarm.fetching.plan import FetchProgress, whole_files
from meshswarm.fetching.published import Published
from meshswarm.fetching.room import Room
from meshswarm.fetching.seeder import Seeder
from meshswarm.fetching.shelf import Shelf
from meshswarm.fetching.web_sources import WebModel, web_models
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint
from meshswarm.span import Span
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.slices.store import Slices

if TYPE_CHECKING:
    from meshswarm.artifacts.sources.pace import DownloadProgress

TELL_S = 1.0
"""How often a person hears how far a fetch is."""
LOOKUPS, LOOKUP_S = 3, 1.0
"""A peer that has just come may not see everything at once."""

Report = Callable[[Mapping[str, Any]], None]


class NobodyThereError(UnknownModelError):
    """Only peers can know the model, and there is none: they may come."""


class Library:
    """The models of one peer and, behind them, those of its swarm."""

    def __init__(
        self,
        endpoint: Endpoint,
        dht: Dht,
        store: Store,
        slices: Slices,
        shelf: Shelf,
        fetcher: Fetcher,
        room: Room,
        seeder: Seeder | None,
        published: Published,
        report: Report,
    ) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._store = store
        self._slices = slices
        self._shelf = shelf
        self._fetcher = fetcher
        self._room = room
        self._seeder = seeder
        self._published = published
        self._report = report
        self._typed: dict[bytes, str] = {}  # where a person said that a model is
        self._troubles: set[str] = set()  # that a person has heard of

    async def known(self, ref: str, show: Report | None = None) -> ModelInfo:
        """The model behind a name, an id, a path or a source; its header is here when this returns, and no more than
        that where only peers have the model.

        Raises UnknownModelError for a name nobody here knows, NobodyThereError where nobody is, AmbiguousModelError for
        one that several models share, ConfigError for a source that cannot work, ArtifactError when it cannot be had or
        is refused.
        """
        report = show or self._report

        def say(sentence: str) -> None:
            report({"event": "model", "message": sentence})

        # One whose file is gone is known by its header, unless it is the file that is asked for.
        find = self._store.find_any if sources.is_source(ref) else self._store.find_noted
        known = await asyncio.to_thread(find, ref)
        if known is not None:
            await self._tell_trouble(known, say)
            return known
        if is_remote(ref) and (pinned := await self._pinned(ref, say)) is not None:
            return pinned
        if sources.is_source(ref):
            return await self._whole_from_source(
                ref,
                report,
                "the whole file, not some layers alone: no publisher known here has told the hashes of its parts",
            )
        model_id, name, n_layers = await self._in_swarm(ref)
        await self._have_header(model_id, name, n_layers, say)
        return await asyncio.to_thread(self._store.describe, model_id, name)

    async def have_span(self, info: ModelInfo, span: Span, options: LlamaOptions = DEFAULT_OPTIONS) -> None:
        """What is needed to load these layers is on disk when this returns, and room for their slice. Raises
        MeshswarmError."""
        plan = await asyncio.to_thread(self._slices.plan, info.model_id, span, options)
        wanted = Wanted.of(info.model_id, info.name, plan.needs, slice_path=plan.path, slice_bytes=plan.cut_bytes)
        is_whole = len(span) == info.n_layers
        self._room.expect(None)
        await self._fetch(info, wanted, {} if is_whole else {"layers": str(span), "n_layers": info.n_layers})
        self._room.expect(wanted)

    async def have_whole(self, info: ModelInfo, show: Report | None = None) -> None:
        """The whole model is on disk when this returns. Raises MeshswarmError."""
        files = await asyncio.to_thread(self._store.files, info.model_id)
        await self._fetch(info, Wanted.of(info.model_id, info.name, whole_files(files)), {}, show)

    async def only_slices(self, info: ModelInfo) -> int:
        """Remove what was fetched of a model and share it no more: bytes freed. Slices that were cut stay."""
        if self._seeder is not None:
            self._seeder.keep_back(info.model_id)
            await self._seeder.look()
        await self._shelf.close(info.model_id)
        return await asyncio.to_thread(self._store.drop_pieces, info.model_id)

    async def _tell_trouble(self, info: ModelInfo, say: Callable[[str], None]) -> None:
        """Say, once, that files of a model are not what was imported any more."""
        trouble = await asyncio.to_thread(self._store.trouble, info.model_id)
        if trouble is not None and trouble not in self._troubles:
            self._troubles.add(trouble)
            say(f"{trouble[0].upper()}{trouble[1:]}. What is needed of it is fetched.")

    # -- by source

    async def _whole_from_source(self, ref: str, report: Report, why: str | None = None) -> ModelInfo:
        """All of a model from where it is said to be; `why` all, said when it begins to come. Raises
        MeshswarmError."""

        def say(sentence: str) -> None:
            report({"event": "model", "message": sentence})

        now_and_then = _now_and_then(report)

        def tell(now: DownloadProgress) -> None:
            nonlocal why
            if why is not None:
                say(f"Fetching {why}")
                why = None
            figures = {"bytes": now.done_bytes, "wanted_bytes": now.total_bytes, "bytes_s": int(now.bytes_s)}
            now_and_then({"event": "reading", **figures, "eta_s": now.eta_s})

        if is_remote(ref):
            await sources.fetch_whole(ref, say=say, rate=tell)  # ends at once when this is cancelled
        return await asyncio.to_thread(self._store.obtain, ref, say=say)

    async def _pinned(self, ref: str, say: Callable[[str], None]) -> ModelInfo | None:
        """The model at a source, where its id and header can be known without fetching all of it; else None, and a
        person is told why it takes so long."""
        model_id = await self._published.model_of_source(ref)
        if model_id is None:
            return None
        whole = await asyncio.to_thread(self._store.get, model_id)
        if whole is not None:
            return whole
        self._typed[model_id] = ref
        signed = await self._published.of(model_id)
        name = clean_name(ref.rpartition("/")[2].partition("@")[0].removesuffix(".gguf"))
        try:
            await self._have_header(model_id, name, 0, say)
        except MeshswarmError as error:
            say(f"Fetching all of {ref[:200]}, since nobody gives its hashes: {error}")
            return None
        return await asyncio.to_thread(self._store.describe, model_id, name if signed is None else signed.manifest.name)

    async def _have_header(self, model_id: bytes, name: str, n_layers: int, say: Callable[[str], None]) -> None:
        if not await asyncio.to_thread(self._store.has_header, model_id):
            holders = await self._who_knows(model_id, n_layers)
            if not holders and not self._dht.known_peers():
                raise NobodyThereError(f"{name} is not stored here, and no other peer is known in this swarm")
            say(f"Fetching what describes {name} from a peer that holds it")
            await fetch_header(self._endpoint, self._store, model_id, holders)

    # -- by name

    async def _in_swarm(self, ref: str) -> tuple[bytes, str, int]:
        """(model id, name, layers or 0) of what peers know by this name or id. A name means what its publisher says,
        and where there is none what cards say; the catalogue decides where those are silent or of two minds."""
        try:
            model_id = parse_model_id(ref)
        except ValueError:
            model_id = None
        cards: list[ModelCard] = []
        for attempt in range(LOOKUPS):
            if attempt:
                await asyncio.sleep(LOOKUP_S)
            cards = [signed.card for signed in await self._dht.cards(fresh=True)]  # each holder's own words
            found = {card.model_id: card for card in cards if _is_meant(card, ref, model_id)}
            is_last = attempt == LOOKUPS - 1 or not self._dht.known_peers()
            if model_id is None and (found or is_last):
                signed = await self._published.named(ref, found.values())
                if signed is not None:
                    return signed.manifest.model_id, signed.manifest.name, signed.manifest.n_layers
            listed = _in_catalogue(ref)
            if listed is not None and listed.model_id is not None and (len(found) > 1 or (is_last and not found)):
                return listed.model_id, listed.name, listed.n_layers
            if len(found) > 1:
                ids = ", ".join(f"{model_id_text(card.model_id)} ({card.encoding})" for card in found.values())
                raise AmbiguousModelError(
                    f"{ref[:80]!r} may be any of {len(found)} models of this swarm; say which: {ids}", param="model"
                )
            for card in found.values():
                return card.model_id, card.name, card.n_layers
            if is_last:
                break
        if model_id is not None:
            return model_id, clean_name(ref[:12]), 0
        stored = [info.name for info in await asyncio.to_thread(self._store.models)]
        others = sorted({card.name for card in cards})
        raise (UnknownModelError if self._dht.known_peers() else NobodyThereError)(
            f"no model {ref[:80]!r} is stored here (stored: {', '.join(stored) or 'none'}) or known in this swarm "
            f"(known: {', '.join(others[:12]) or 'none'}){did_you_mean(ref, [*stored, *others])}",
            param="model",
        )

    async def _who_knows(self, model_id: bytes, n_layers: int) -> Sequence[tuple[PeerId, tuple[Address, ...]]]:
        """Peers that have a model's header: who holds its files, and who serves it."""
        holders = await self._dht.holders(model_id, fresh=True)
        found = {record.peer: record.addresses for record in holders}
        if n_layers and not found:
            found = {record.peer: record.addresses for record in await self._dht.coverage(model_id, n_layers)}
        found.pop(self._endpoint.peer_id, None)
        return list(found.items())

    # -- bytes

    async def _fetch(
        self, info: ModelInfo, wanted: Wanted, facts: Mapping[str, Any], show: Report | None = None
    ) -> None:
        if not any(await self._fetcher.missing(wanted)):
            if wanted.slice_bytes:
                async with self._room.made(wanted):
                    return
            return
        wanted = replace(wanted, web=await self._on_the_web(info))
        clock = asyncio.get_running_loop().time
        began, last = clock(), FetchProgress(0, 0, 0, 0)
        report = show or self._report
        now_and_then = _now_and_then(report)
        about = {"model": info.name, "model_id": info.id_text, **facts}

        def tell(progress: FetchProgress) -> None:
            nonlocal last
            if progress.had_bytes and not last.wanted_bytes:
                here = f"Going on with {info.name}: {progress.had_bytes / 1e6:.1f} MB of what is needed are here."
                report({"event": "model", "message": here})
            last = progress
            now_and_then({"event": "fetching", **about, **_figures(progress)})

        try:
            await self._fetcher.fetch(wanted, tell)
        except ArtifactError as error:
            if info.model_id not in self._typed or await asyncio.to_thread(self._has_hashes, info):
                raise
            await self._all_of(info, error, report)
            return
        seconds = round(clock() - began, 3)
        report({"event": "fetched", **about, "bytes": last.came_bytes, "seconds": seconds})
        if self._seeder is not None:
            await self._seeder.look()

    async def _on_the_web(self, info: ModelInfo) -> tuple[WebModel, ...]:
        typed = self._typed.get(info.model_id)
        published = await self._published.sources(info.model_id)
        return web_models(() if typed is None else (typed,), published, info.file_lengths)

    def _has_hashes(self, info: ModelInfo) -> bool:
        files = range(len(info.file_lengths))
        return all(self._store.piece_layer(info.model_id, file) is not None for file in files)

    async def _all_of(self, info: ModelInfo, why: ArtifactError, report: Report) -> None:
        """The whole model, from where a person said that it is: parts cannot be checked without hashes."""
        ref = self._typed[info.model_id]
        sentence = f"Fetching all of {ref[:200]}, since parts of it cannot be checked: {why}"
        report({"event": "model", "message": sentence})
        await self._whole_from_source(ref, report)


def _now_and_then(report: Report) -> Report:
    """Passes on one event a second."""
    clock, told_at = asyncio.get_running_loop().time, float("-inf")

    def pass_on(event: Mapping[str, Any]) -> None:
        nonlocal told_at
        if clock() - told_at >= TELL_S:
            told_at = clock()
            report(event)

    return pass_on


def _in_catalogue(ref: str) -> CatalogueEntry | None:
    """The model that this project knows by this name, its id with it."""
    return next((entry for entry in CATALOGUE if entry.model_id and matches(ref, entry.name, entry.encoding)), None)


def _is_meant(card: ModelCard, ref: str, model_id: bytes | None) -> bool:
    return card.model_id == model_id or matches(ref, card.name, card.encoding)


def _figures(progress: FetchProgress) -> dict[str, Any]:
    return {
        "bytes": progress.have_bytes,
        "wanted_bytes": progress.wanted_bytes,
        "had_bytes": progress.had_bytes,
        "bytes_s": progress.down_bytes_s,
        "peers": progress.n_peers,
        "web_bytes": progress.from_web_bytes,
        "eta_s": None if progress.eta_s is None else round(progress.eta_s, 1),
        "waits_s": None if progress.waits_s is None else round(progress.waits_s, 1),
    }
