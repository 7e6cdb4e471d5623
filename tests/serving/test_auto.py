"""What `--auto` takes, of a real store and a real catalogue, by what the swarm says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from tests.artifacts.sources.web_server import HubServer, WebServer

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.manifests.catalogue import CATALOGUE, CatalogueEntry
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import ArtifactError, OutOfMemoryError
from meshswarm.identity import Identity
from meshswarm.routing.demand import Fit, Offer
from meshswarm.routing.gossip.told import Told
from meshswarm.serving import ServingSettings, auto, offers, reach
from meshswarm.serving.auto import AutoChoice
from meshswarm.serving.hearsay import SILENCE
from meshswarm.serving.offers import MAX_LOOKED_AT, worth_looking_at
from meshswarm.serving.reach import Reach
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
        self.looked_at: list[bytes] = []
        self.said: list[str] = []
        self.around: Any = SimpleNamespace(
            store=store, slices=Slices(store, folder), identity=SimpleNamespace(peer_id=OWN),
            dht=SimpleNamespace(models=self._models, coverage=self._coverage, unreachable=frozenset),
            home=SimpleNamespace(root=folder), library=None, report=lambda event: self.said.append(event["message"]),
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
        self.looked_at.append(model_id)
        return [record for record in self.records if record.model_id == model_id]

    async def chosen(self, **settings: Any) -> ServingSettings:
        return await self.choice(**settings).next()

    def choice(self, **settings: Any) -> AutoChoice:
        hearsay: Any = SimpleNamespace(
            gone=frozenset, draining=frozenset, loads=dict, demand=self.hear, told=lambda model_id, n: None
        )
        return AutoChoice(ServingSettings("unused", is_auto=True, **settings), self.around, hearsay)


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    return Swarm(Store(tmp_path), tmp_path)


@pytest.fixture
def nothing_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no model lay among the downloads of earlier tests."""
    monkeypatch.setattr(offers, "is_fetched", lambda ref: False)


@pytest.fixture
def own_model(swarm: Swarm, gguf_recipe: type, tmp_path: Path) -> ModelCard:
    """A tiny model on this peer's disk that the catalogue does not know."""
    path: Path = gguf_recipe(n_layers=4).write(tmp_path / "own.gguf", seed=1)
    return ModelCard.of(swarm.around.store.import_file(path))


async def test_alone_with_an_empty_folder_it_takes_the_catalogues(swarm: Swarm, smollm2: Path) -> None:
    chosen = await swarm.chosen()
    assert chosen.model == ENTRY.ref and not chosen.is_auto
    assert chosen.because.startswith(
        "nobody serves a model that this peer could join, and it is the best that fits whole"
    )
    assert not [said for said in swarm.said if "Fetching" in said], "it lies among the downloads already"


async def test_a_larger_one_that_would_fit_is_named_and_not_fetched(
    swarm: Swarm, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    better = replace(listed("better", 11 * 10**8), memory_bytes=3 * 10**8)
    monkeypatch.setattr("meshswarm.artifacts.manifests.trust.CATALOGUE", (ENTRY, better))
    chosen = await swarm.chosen()
    assert chosen.model == ENTRY.ref and chosen.because.endswith("of those that are here or were run by this project")
    assert swarm.said == [f"A larger model would fit, 1.1 GB to fetch and never run here: --model {better.ref}"]


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


async def test_nothing_is_fetched_to_find_that_no_layer_of_it_fits(swarm: Swarm, nothing_fetched: None) -> None:
    with pytest.raises(OutOfMemoryError, match="no part of any model known here fits into 150 MB of memory"):
        await swarm.chosen(memory_bytes=150 * 10**6)
    assert swarm.said == []


async def test_of_hundreds_of_models_those_with_most_holders_are_looked_at(swarm: Swarm, own_model: ModelCard) -> None:
    """Whoever wants to may name hundreds; the table lists those first that most say they hold."""
    for number in range(MAX_LOOKED_AT):
        model_id = number.to_bytes(32, "big")
        swarm.serves(ModelCard(model_id, f"many-{number}", "llama", "q4_0", 8, (1000,), 100, 64, 64, 64), Span(0, 4))
    swarm.serves(own_model, Span(0, 2))
    assert (await swarm.chosen()).model == ENTRY.ref, "the one more is beyond what is looked at"
    assert len(swarm.looked_at) == MAX_LOOKED_AT
    swarm.cards.insert(0, swarm.cards.pop())
    chosen = await swarm.chosen()
    assert chosen.because == "1 peer serves it, and the layers 2:4 have no holder"


def test_of_models_that_several_peers_call_well_held_only_those_most_asked_for_are_looked_at() -> None:
    cards = [
        ModelCard(number.to_bytes(32, "big"), f"m-{number}", "llama", "q4_0", 2, (1000,), 100, 64, 64, 64)
        for number in range(40)
    ]

    def told(model_id: bytes, n_layers: int) -> Told | None:
        """The first 20 are well held, the later the more asked for; of ten nothing is told; ten lack holders."""
        number = int.from_bytes(model_id, "big")
        if 20 <= number < 30:
            return None
        return Told(model_id, (3, 3) if number < 20 else (3, 1), 3, 100.0, float(number), 3)

    hearsay: Any = SimpleNamespace(told=told)
    looked_at = [int.from_bytes(card.model_id, "big") for card in worth_looking_at(cards, hearsay)]
    assert looked_at == [*range(20, 40), *range(19, 11, -1)]
    quiet = worth_looking_at(cards, SILENCE)
    assert quiet == cards[:MAX_LOOKED_AT]


class Library:
    """Gets what the swarm has: the model of `path`, or an error."""

    def __init__(self, store: Store, path: Path | None = None) -> None:
        self._store = store
        self._path = path

    async def known(self, ref: str) -> ModelInfo:
        if ref == ENTRY.ref:
            return self._store.obtain(ref)
        if self._path is None:
            raise ArtifactError("nobody gives its header")
        return self._store.import_file(self._path)


async def test_a_model_of_the_catalogue_that_peers_serve_comes_from_them(
    swarm: Swarm, smollm2: Path, tmp_path: Path, nothing_fetched: None
) -> None:
    card = ModelCard.of(Store(tmp_path / "elsewhere").import_file(smollm2))
    swarm.serves(card, Span(0, 15))
    swarm.around.library = Library(swarm.around.store, smollm2)
    assert (await swarm.chosen(memory_bytes=5 * 10**8)).model == model_id_text(card.model_id)
    assert swarm.said[0].startswith(f"Fetching {ENTRY.name}, up to ") and "from the peers" in swarm.said[0]


async def test_or_else_from_its_source(swarm: Swarm, smollm2: Path, tmp_path: Path, nothing_fetched: None) -> None:
    card = ModelCard.of(Store(tmp_path / "elsewhere").import_file(smollm2))
    swarm.serves(card, Span(0, 15))
    swarm.around.library = Library(swarm.around.store)
    assert (await swarm.chosen()).model == ENTRY.ref
    assert [said.rpartition(": ")[2] for said in swarm.said[1:2]] == ["nobody gives its header"]


@pytest.fixture
def foreign(gguf_recipe: type, tmp_path: Path) -> tuple[ModelCard, Path]:
    """A model that peers have, and nobody here."""
    path: Path = gguf_recipe(n_layers=4).write(tmp_path / "foreign.gguf", seed=2)
    return ModelCard.of(Store(tmp_path / "elsewhere").import_file(path)), path


async def test_a_model_that_only_peers_have_is_joined_and_said_to_be_unverified(
    swarm: Swarm, foreign: tuple[ModelCard, Path]
) -> None:
    card, path = foreign
    swarm.around.library = Library(swarm.around.store, path)
    swarm.serves(card, Span(0, 2))
    chosen = await swarm.chosen()
    assert chosen.model == model_id_text(card.model_id)
    (said,) = swarm.said
    assert said.startswith("Fetching foreign, up to 0 MB, from the peers that serve it: 1 peer serves it, and the")
    assert said.endswith("Foreign is unverified: peers of this swarm serve it, and nothing else is known of it here.")


async def test_what_cannot_be_had_is_passed_over_for_the_next(swarm: Swarm, foreign: tuple[ModelCard, Path]) -> None:
    swarm.around.library = Library(swarm.around.store)
    swarm.serves(foreign[0], Span(0, 2))
    assert (await swarm.chosen()).model == ENTRY.ref
    assert swarm.said[1] == f"{model_id_text(foreign[0].model_id)} is passed over: nobody gives its header"


async def test_where_loading_fails_the_next_is_served_and_where_none_is_left_the_reason_is_raised(
    swarm: Swarm, own_model: ModelCard, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.around.store.import_file(smollm2)
    swarm.serves(own_model, Span(0, 2))
    failing, tried = {own_model.model_id}, []

    async def load(settings: ServingSettings, around: object) -> ServingSettings:
        model_id = swarm.around.store.obtain(settings.model).model_id
        tried.append(model_id)
        if model_id in failing:
            raise ArtifactError("a piece of it cannot be had")
        return settings

    monkeypatch.setattr(auto.Serving, "load", load)
    choice = swarm.choice()
    served: Any = await choice.load(await choice.next())
    assert served.model == ENTRY.ref and tried == [own_model.model_id, ENTRY.model_id]
    failing.add(ENTRY.model_id or b"")
    choice = swarm.choice()
    with pytest.raises(ArtifactError, match="a piece of it cannot be had"):
        await choice.load(await choice.next())


async def test_no_room_on_the_disk_passes_over_what_would_be_fetched(
    swarm: Swarm, own_model: ModelCard, nothing_fetched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "KEEP_FREE_BYTES", 1 << 60)
    assert swarm.around.store.obtain((await swarm.chosen()).model).model_id == own_model.model_id


# -- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    cdn = WebServer()
    server = HubServer(cdn)
    monkeypatch.setenv("HF_ENDPOINT", server.origin)
    monkeypatch.setattr(constants, "ENDPOINT", server.origin)
    template = server.origin + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", "")
    yield server
    server.close()
    cdn.close()


def on_hub(file: str = "m.gguf", n_bytes: int = 1000) -> Offer:
    return Offer(f"hf:some/repo/{file}", "m", None, n_bytes, False, Fit.WHOLE, to_fetch=n_bytes, warning="m is new")


async def test_what_is_on_the_hub_is_taken_where_the_hub_gives_it(hub: HubServer, tmp_path: Path) -> None:
    hub.put_repo("some/repo", {"m.gguf": bytes(1000)})
    at_hub = Reach(tmp_path)
    assert await at_hub.obstacle(on_hub()) == ""
    assert await at_hub.obstacle(on_hub("other.gguf")) == "the hub cannot be reached, or does not give it"
    assert await at_hub.obstacle(on_hub()) == "", "one file that is not there says nothing of others"
    assert "4.0 GB" not in await at_hub.obstacle(on_hub(n_bytes=4 * 10**9))
    assert await at_hub.obstacle(on_hub(n_bytes=5 * 10**9)) == "5.0 GB are more than is fetched without being asked"


async def test_a_hub_that_is_gone_is_asked_once_and_one_that_is_not_to_be_asked_never(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert await Reach(tmp_path).obstacle(on_hub())
    assert hub.seen == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    gone = Reach(tmp_path)
    assert await gone.obstacle(on_hub())
    monkeypatch.setenv("HF_ENDPOINT", hub.origin)
    assert await gone.obstacle(on_hub())
    assert hub.seen == [], "one wait was enough"


def listed(name: str, n_bytes: int) -> CatalogueEntry:
    ref = f"hf:some/{name}/{name}.gguf"
    return CatalogueEntry(name, ref, "llama", "f32", 4, n_bytes, n_bytes + 10**9, "mit", None, is_verified=False)


async def test_an_unverified_model_comes_from_the_hub_and_one_that_is_damaged_there_is_passed_over(
    swarm: Swarm, hub: HubServer, gguf_recipe: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger one is tried first, then the smaller one; a restart without the hub has it, and says nothing."""
    monkeypatch.setenv("MESHSWARM_CACHE", str(tmp_path / "cache"))
    good: bytes = gguf_recipe(n_layers=4).write(tmp_path / "g.gguf", seed=3).read_bytes()
    hub.put_repo("some/smaller", {"smaller.gguf": good})
    hub.put_repo("some/larger", {"larger.gguf": b"GGUF" + bytes(2 * len(good))})
    entries = (listed("smaller", len(good)), listed("larger", 2 * len(good) + 4))
    monkeypatch.setattr("meshswarm.artifacts.manifests.trust.CATALOGUE", entries)
    chosen = await swarm.chosen()
    assert chosen.model == "hf:some/smaller/smaller.gguf"
    first, passed, second, *_ = [said for said in swarm.said if not said.startswith("Downloading")]
    assert first.startswith("Fetching larger, 1 MB, from hf:some/larger/larger.gguf: nobody serves a model")
    assert "Larger is unverified: it was never fetched or run here" in first
    assert passed.startswith("hf:some/larger/larger.gguf is passed over: ")
    assert second.startswith("Fetching smaller, ")
    hub.close()
    swarm.said.clear()
    assert (await swarm.chosen()).model == "hf:some/smaller/smaller.gguf"
    assert swarm.said == []
