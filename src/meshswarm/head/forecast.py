"""What a request to this head would go through now: the knowledge gathered, and the preview made of it.

The rule this file keeps: a preview plans with what a request plans with. Unlike a request it takes its time: peers
whose distance nobody has measured are asked, whether that may pay or not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.store.store import Store
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError, RequestError
from meshswarm.head.models import ModelDirectory
from meshswarm.head.routes import USUAL_ANSWER, Routes
from meshswarm.identity import PeerId
from meshswarm.routing.alone import OwnMachine
from meshswarm.routing.own_speeds import OwnSpeeds
from meshswarm.routing.preview import MAX_STREAMS, Knowledge, Preview, Question, age_words, preview
from meshswarm.stage.engine.memory import room
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sessions.rows_codec import row_bytes
from meshswarm.stage.sizes.memory import Load, MemoryModel

USUAL_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person wants planned. None: the usual."""

    model: str | None
    n_ctx: int | None = None
    n_prompt: int | None = None
    n_streams: int = 1


class Forecast:
    """Previews for one head, `own`. Rows are taken to travel in F32."""

    def __init__(self, routes: Routes, directory: ModelDirectory, store: Store, speeds: OwnSpeeds, own: PeerId) -> None:
        self._routes = routes
        self._directory = directory
        self._store = store
        self._speeds = speeds
        self._own = own

    async def preview(self, asked: Asked) -> tuple[ModelCard, Preview]:
        """Raises RequestError for a model nobody knows and for numbers that cannot be."""
        card = await self._directory.resolve(asked.model)
        records = await self._routes.coverage(card, fresh=True)
        card, header = await self._proved(card, records)
        question = question_of(asked, card)
        await self._routes.survey(records)
        records = self._routes.current(records)
        away = self._routes.away()
        memory = None if header is None else await asyncio.to_thread(_memory, header, question)
        own = None if memory is None else await asyncio.to_thread(self._own_machine, card, memory, records)
        known = Knowledge(
            n_layers=card.n_layers,
            records=records,
            situation=self._routes.situation(card.model_id, records, frozenset(away)),
            away=away,
            measured=self._routes.measured(card.model_id, records),
            now=asyncio.get_running_loop().time(),
            unix_ms=int(time.time() * 1000),
            reported_ms=self._routes.reported_ms(records),
            byte_s=self._routes.link_byte_s,
            row_bytes=_row_bytes(card),
            memory=memory,
            own=own,
        )
        return card, await asyncio.to_thread(preview, question, known)

    async def _proved(self, card: ModelCard, records: Sequence[CoverageRecord]) -> tuple[ModelCard, GgufHeader | None]:
        """What the model's own header says of it; without one, what its holders say."""
        try:
            voice = await self._directory.voice(card, records)
            return voice.card, await asyncio.to_thread(self._store.header, card.model_id)
        except MeshswarmError:
            return card, None

    def _own_machine(
        self, card: ModelCard, memory: MemoryModel, records: Sequence[CoverageRecord]
    ) -> OwnMachine | None:
        """This machine as a place for the whole model; None where it serves that already."""
        served = next((record for record in records if record.peer == self._own), None)
        if served is not None and len(served.span) == card.n_layers:
            return None
        needs, free = memory.span(memory.whole).total, room().free
        if served is not None:
            basis = f"as fast as its layers {served.span} were when it loaded them"
            return OwnMachine(needs, free, float(served.us_per_layer), basis)
        known = self._speeds.get(model_id_text(card.model_id))
        if known is None:
            return OwnMachine(needs, free)
        basis = f"`meshswarm bench` timed layers {known.layers} {age_words(time.time() - known.unix_s)}"
        return OwnMachine(needs, free, known.us_per_layer, basis)


def question_of(asked: Asked, card: ModelCard) -> Question:
    """With what is usual filled in. Raises RequestError."""
    usual_ctx = min(card.n_ctx, (asked.n_prompt or USUAL_PROMPT) + USUAL_ANSWER)
    n_ctx = usual_ctx if asked.n_ctx is None else asked.n_ctx
    if not 2 <= n_ctx <= card.n_ctx:
        raise RequestError(f"{card.name} was made for 2 to {card.n_ctx} positions, not {n_ctx}", param="context")
    n_prompt = min(USUAL_PROMPT, n_ctx - 1) if asked.n_prompt is None else asked.n_prompt
    if not 1 <= n_prompt < n_ctx:
        raise RequestError(
            f"a prompt of {n_prompt} tokens leaves no room for an answer in {n_ctx} positions", param="prompt"
        )
    if not 1 <= asked.n_streams <= MAX_STREAMS:
        raise RequestError(f"streams are 1 to {MAX_STREAMS}, not {asked.n_streams}", param="streams")
    return Question(n_ctx, n_prompt, asked.n_streams)


def _memory(header: GgufHeader, question: Question) -> MemoryModel:
    return MemoryModel(header, Load(question.n_ctx, 1))


def _row_bytes(card: ModelCard) -> int:
    family = FAMILIES.get(card.architecture)
    return row_bytes(Dtype.F32, card.n_embd if family is None else family.row_width(card.n_embd))
