"""What `--auto` takes, of a real store and a real catalogue, by what the swarm says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshswarm.artifacts.card import ModelCard
from meshswarm.artifacts.catalogue import CATALOGUE
from meshswarm.artifacts.store import Store
from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import OutOfMemoryError
from meshswarm.identity import Identity
from meshswarm.serving import ServingSettings, auto
from meshswarm.serving.auto import choose_model
from meshswarm.span import Span
from meshswarm.stage.slices.store import Slices

OWN, *OTHERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3)]
ENTRY = CATALOGUE[0]


class Swarm:
    """What the table says; `demand` what gossip does."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.cards: list[tuple[ModelCard, int]] = []
        self.records: list[CoverageRecord] = []
        self.demand: dict[bytes, float] = {}
        self.around: Any = SimpleNamespace(
            store=store, slices=Slices(store, folder), identity=SimpleNamespace(peer_id=OWN),
            dht=SimpleNamespace(models=self._models, coverage=self._coverage, unreachable=frozenset),
        )  # fmt: skip

    def serves(self, card: ModelCard, *spans: Span) -> None:
        self.cards.append((card, len(spans)))
        for other, span in zip(OTHERS, spans, strict=False):
            where = (Address("127.0.0.1", 4000),)
            self.records.append(
                CoverageRecord(other, where, card.model_id, span, True, "cpu", 64, 100, 0, 64, ("server",))
            )

    def hear(self) -> dict[bytes, float]:
        return self.demand

    async def _models(self, *, fresh: bool) -> list[tuple[ModelCard, int]]:
        return self.cards

    async def _coverage(self, model_id: bytes, n_layers: int) -> list[CoverageRecord]:
        return [record for record in self.records if record.model_id == model_id]

    async def chosen(self, **settings: Any) -> ServingSettings:
        hearsay: Any = SimpleNamespace(gone=frozenset, draining=frozenset, loads=dict, demand=self.hear)
        return await choose_model(ServingSettings("unused", is_auto=True, **settings), self.around, hearsay)


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(Store(tmp_path / "store"), tmp_path)


@pytest.fixture
def own_model(swarm: Swarm, gguf_recipe: type, tmp_path: Path) -> ModelCard:
    """A tiny model on this peer's disk that the catalogue does not know."""
    path: Path = gguf_recipe(n_layers=4).write(tmp_path / "own.gguf", seed=1)
    return ModelCard.of(swarm.around.store.import_file(path))


async def test_alone_with_an_empty_folder_it_takes_the_catalogues(swarm: Swarm) -> None:
    chosen = await swarm.chosen()
    assert chosen.model == ENTRY.ref and not chosen.is_auto
    assert chosen.because == "nobody serves a model that this peer could join, and it is the best that fits whole"


async def test_alone_the_verified_one_is_taken_before_a_small_one_of_its_own(
    swarm: Swarm, own_model: ModelCard, smollm2: Path
) -> None:
    assert (await swarm.chosen()).model == ENTRY.ref
    swarm.around.store.import_file(smollm2)
    assert (await swarm.chosen()).model == ENTRY.ref


async def test_it_joins_what_others_serve_and_it_has(swarm: Swarm, own_model: ModelCard) -> None:
    swarm.serves(own_model, Span(0, 2))
    chosen = await swarm.chosen()
    assert swarm.around.store.obtain(chosen.model).model_id == own_model.model_id
    assert chosen.because == "1 peer serves it, and the layers 2:4 have no holder"


async def test_where_several_could_be_joined_it_waits_to_hear_what_is_asked_for(
    swarm: Swarm, own_model: ModelCard, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModelCard.of(swarm.around.store.import_file(smollm2))
    swarm.serves(own_model, Span(0, 4), Span(0, 4))
    swarm.serves(other, Span(0, 30))
    monkeypatch.setattr(auto, "DEMAND_WAIT_S", 0.0)
    assert (await swarm.chosen()).because == "1 peer serves it", "the slower of both"
    heard = iter([{}, {}, {own_model.model_id: 0.5}])
    monkeypatch.setattr(swarm, "hear", lambda: next(heard))
    assert (await swarm.chosen()).because == "2 peers serve it, 0.5 requests/s ask for it"


async def test_what_it_cannot_get_is_not_chosen_however_much_it_is_asked_for(
    swarm: Swarm, own_model: ModelCard
) -> None:
    foreign = ModelCard(bytes(32), "foreign", "llama", "q4_0", 8, (1000,), 100, 64, 64, 64)
    swarm.serves(foreign, Span(0, 4))
    swarm.demand = {foreign.model_id: 100.0}
    assert (await swarm.chosen()).model == ENTRY.ref
    swarm.serves(own_model, Span(0, 4))
    assert (await swarm.chosen()).because == "1 peer serves it"


async def test_a_card_that_lies_about_its_layers_is_not_believed(swarm: Swarm, own_model: ModelCard) -> None:
    swarm.serves(replace(own_model, n_layers=3), Span(0, 3))
    assert (await swarm.chosen()).model == ENTRY.ref


async def test_where_nothing_fits_it_says_what_the_smallest_takes(
    swarm: Swarm, smollm2: Path, own_model: ModelCard
) -> None:
    swarm.around.store.import_file(smollm2)
    with pytest.raises(OutOfMemoryError, match=r"no part of any model known here fits into 1 MB of memory; .* 694 MB"):
        await swarm.chosen(memory_bytes=10**6)
