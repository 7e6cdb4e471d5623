"""Finding out which of several models by one name can be used: their peers are reached, their headers proved.

The rule this file keeps: this is only done when a name is claimed by more than one model, is bounded however many claim
it, and ends in seconds. What decides is in `naming`; this file asks and dials.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError
from meshswarm.head.naming import Candidate, covering, in_turn, is_whole, likeliest, shares, tiers
from meshswarm.identity import PeerId
from meshswarm.net.endpoint import Endpoint

MAX_NAMESAKES = 32
MAX_EXAMINED = 8
DIALS_EACH = 6
MAX_DIALS = 96
MAX_DIALS_AT_ONCE = 24
DIAL_TIMEOUT_S = 2.0
PROVE_TIMEOUT_S = 15.0
COVER_ROUNDS = 3

Prove = Callable[[ModelCard, Sequence[CoverageRecord]], Awaitable[ModelCard]]
"""The card as the model's own header has it, fetched from those who serve it. Raises MeshswarmError."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`usable`: whole on peers that were reached, with a header that is what the id says; more than one when nothing
    tells them apart. `alive`: of the others, those that most speaks for among peers that were reached."""

    usable: tuple[ModelCard, ...]
    alive: tuple[ModelCard, ...]


class Namesakes:
    """`rng` decides whom of many strangers to dial, so that nobody can place himself before them."""

    def __init__(self, endpoint: Endpoint, dht: Dht, prove: Prove, rng: random.Random | None = None) -> None:
        self._endpoint = endpoint
        self._dht = dht
        self._prove = prove
        self._rng = rng or random.Random()

    async def judge(self, candidates: Sequence[Candidate]) -> Judgement:
        """Which of `candidates` a person may mean."""
        by_id = {each.card.model_id: each for each in candidates[:MAX_NAMESAKES]}
        first = await self._dht.first_holders(by_id)
        vouching = {each: [r for r in first[each] if r.peer in by_id[each].vouchers] for each in by_id}
        lot = self._lots()
        dialled = in_turn(
            (likeliest(records, self._dht.met_in, lot, DIALS_EACH) for records in vouching.values()), MAX_DIALS
        )
        reached = await self._reach(dialled)
        ranked = [each for tier in tiers(shares(self._speaking(vouching, reached))) for each in tier][:MAX_EXAMINED]
        records = await asyncio.gather(*(self._cover(by_id[each].card) for each in ranked))
        served = dict(zip(ranked, records, strict=True))
        speaking = self._speaking(
            {each: [r for r in served[each] if r.peer in by_id[each].vouchers] for each in ranked},
            self._reached(record.peer for record in (*dialled, *(r for each in served.values() for r in each))),
        )
        order = tiers(shares(speaking))
        for tier in order:
            proved = await asyncio.gather(*(self._proved(by_id[each].card, served[each]) for each in tier))
            usable = tuple(card for card in proved if card is not None)
            if usable:
                return Judgement(usable, ())
        return Judgement((), tuple(by_id[each].card for each in order[0]) if order else ())

    # -- inside

    def _lots(self) -> Callable[[PeerId], float]:
        drawn: dict[PeerId, float] = {}
        return lambda peer: drawn.setdefault(peer, self._rng.random())

    def _reached(self, peers: Iterable[PeerId]) -> frozenset[PeerId]:
        """Those with a connection now: a peer that answered, at an address it really has."""
        live = ((peer, self._endpoint.connection(peer)) for peer in set(peers))
        return frozenset(peer for peer, connection in live if connection is not None and not connection.closed)

    def _speaking(
        self, vouching: Mapping[bytes, Iterable[CoverageRecord]], reached: frozenset[PeerId]
    ) -> dict[bytes, frozenset[bytes]]:
        """The networks of those of `vouching` that were reached."""
        places = {each: {self._dht.met_in(r.peer) for r in rs if r.peer in reached} for each, rs in vouching.items()}
        return {each: frozenset(place for place in met if place is not None) for each, met in places.items()}

    async def _cover(self, card: ModelCard) -> list[CoverageRecord]:
        """Who serves the model; as many of them are dialled as show whether it is whole."""
        records = await self._dht.coverage(card.model_id, card.n_layers)
        lot = self._lots()
        for _ in range(COVER_ROUNDS):
            away = self._dht.unreachable()
            wanted = covering(records, card.n_layers, self._dht.met_in, lot, away)[:MAX_DIALS]
            if len(await self._reach(wanted)) == len(wanted):
                break
        return records

    async def _proved(self, card: ModelCard, records: Sequence[CoverageRecord]) -> ModelCard | None:
        """The card by the model's own header; None when that cannot be had, or a layer is missing."""
        reached = self._reached(record.peer for record in records)
        if not is_whole(records, card.n_layers, reached):
            return None
        try:
            async with asyncio.timeout(PROVE_TIMEOUT_S):
                proved = await self._prove(card, [record for record in records if record.peer in reached])
        except (MeshswarmError, TimeoutError):
            return None
        return proved if is_whole(records, proved.n_layers, reached) else None

    async def _reach(self, records: Iterable[CoverageRecord]) -> frozenset[PeerId]:
        """Those of the records' peers that answer."""
        wanted = {record.peer: record for record in records}
        turns = asyncio.Semaphore(MAX_DIALS_AT_ONCE)

        async def dial(record: CoverageRecord) -> None:
            async with turns:
                try:
                    await self._endpoint.dial(record.peer, record.addresses, timeout_s=DIAL_TIMEOUT_S)
                except MeshswarmError:
                    self._dht.report_unreachable(record.peer)

        async with asyncio.TaskGroup() as group:
            for record in wanted.values():
                group.create_task(dial(record))
        return self._reached(wanted)
