"""When a peer goes over to another model: after a second look that others were told of; it takes what fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.serving.test_moving import OTHERS, OWN, World
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.manifests.card import ModelCard
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import ArtifactError
from meshswarm.routing.change import CHANGE_ROUND_S, STEADY_S
from meshswarm.routing.choice import Choice
from meshswarm.routing.demand import Offer
from meshswarm.routing.restraint import SETTLE_S, TRUST_S
from meshswarm.serving import ServingSettings, changing
from meshswarm.serving.moving import FAILED_S, Mover
from meshswarm.span import Span
from meshswarm.stage.engine.memory import Room

WHOLE, HALF = Span(0, 12), Span(0, 6)


class TwoModels(World):
    """All five peers have the whole of one model; of another, which is asked for, one peer has a half."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.other = self.around.store.import_file(write_tiny("llama", folder / "other.gguf", n_layers=12))
        self.wanted: dict[bytes, float] = {self.other.model_id: 5.0}
        self.said: list[bool] = []
        self.changes: list[tuple[str, Span, bool]] = []
        self.beyond = [self.record(OTHERS[0], HALF, self.other.model_id)]
        self.fault: Exception | None = None
        for peer in self.records:
            self.set(peer, span=WHOLE)
        settings = ServingSettings("m", n_ctx=64, n_sessions=1, is_mobile=True, changes_model=True)
        self.serving.settings = settings
        self.serving.announce_going = self._announce_going
        self.serving.change_model = self._change_model
        self.around.identity = SimpleNamespace(peer_id=OWN)
        self.around.home, self.around.library = SimpleNamespace(root=folder), None
        self.around.dht.models = self._models
        hearsay: Any = SimpleNamespace(
            gone=lambda: self.lost,
            draining=frozenset,
            demand=self._demand,
            loads=lambda: self.loads,
            told=lambda model_id, n_layers: None,
        )
        self.mover = Mover(self.serving, settings, self.around, hearsay, clock=lambda: self.now, rng=self.mover._rng)

    async def _coverage(self, model_id: bytes, n_layers: int, *, fresh: bool = False) -> list[CoverageRecord]:
        if model_id == self.other.model_id:
            return self.beyond
        return await super()._coverage(model_id, n_layers, fresh=fresh)

    async def _models(self, *, fresh: bool) -> list[tuple[ModelCard, int]]:
        return [(ModelCard.of(self.other), 1)]

    async def _announce_going(self, is_going: bool) -> None:
        self.said.append(is_going)
        roles = ("server", "mobile", "going") if is_going else ("server", "mobile")
        self.set(OWN, roles=roles)

    async def _change_model(self, settings: ServingSettings, info: ModelInfo, choice: Choice, *, beside: bool) -> bool:
        if self.fault is not None:
            raise self.fault
        self.changes.append((settings.model, choice.span, beside))
        return self.can_move

    def _demand(self) -> Mapping[bytes, float]:
        return self.wanted

    async def until_its_turn(self) -> None:
        """Rounds go by until it goes, or each peer had its turn many times."""
        for _ in range(60):
            await self.mover.think()
            if self.changes or (self.fault is not None and self.events):
                return
            self.now += CHANGE_ROUND_S / 2


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoModels:
    monkeypatch.setattr("meshswarm.routing.change.MAX_CHANGE_WAIT_S", 0.0)
    return TwoModels(tmp_path)


async def test_it_goes_where_it_is_wanted_once_it_has_settled_and_others_know(world: TwoModels) -> None:
    began = world.now
    await world.until_its_turn()
    assert world.changes == [(world.other.id_text, WHOLE, True)]
    assert world.now - began >= max(SETTLE_S, STEADY_S, TRUST_S)
    assert world.said == [True] and world.asked[-1] is True
    assert [event["event"] for event in world.events] == ["moving", "moved"]
    assert world.events[0]["message"].startswith("Going over to other from m, which can do without this peer: 1 peer")


async def test_it_stays_when_the_second_look_shows_that_another_one_goes(world: TwoModels) -> None:
    def others_go() -> None:
        for peer in OTHERS[:3]:
            world.set(peer, roles=("server", "mobile", "going"))

    world.on_fresh = others_go
    await world.until_its_turn()
    assert world.changes == [] and world.said == [True, False]


async def test_who_named_its_model_or_hears_of_no_other_stays(world: TwoModels) -> None:
    wanted, world.wanted = world.wanted, {}
    await world.until_its_turn()
    world.wanted = {world.serving.model.model_id: 0.1}
    await world.until_its_turn()
    world.wanted, world.mover._changer = wanted, None
    await world.until_its_turn()
    assert world.changes == [] and world.said == []


async def test_what_cannot_be_had_draws_nobody(world: TwoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(changing.Reach):
        async def obstacle(self, offer: Offer) -> str:
            return "no room on the disk"

    monkeypatch.setattr(changing, "Reach", FullDisk)
    await world.until_its_turn()
    assert world.changes == [] and world.said == []


async def test_where_both_do_not_fit_the_old_one_makes_room(world: TwoModels, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = changing.limits_of

    def tight(*args: Any) -> Any:
        return replace(limits(*args), room=Room(0, 10**12))

    monkeypatch.setattr(changing, "limits_of", tight)
    world.serving.taken_bytes = 10**9
    await world.until_its_turn()
    assert world.changes == [(world.other.id_text, WHOLE, False)]


async def test_what_goes_wrong_is_said_taken_back_and_not_tried_again_at_once(world: TwoModels) -> None:
    world.fault = ArtifactError("a piece of it cannot be had")
    await world.until_its_turn()
    assert world.said == [True, False]
    assert world.events[-1]["message"] == "Layers could not be exchanged: a piece of it cannot be had"
    failed_s, world.fault = world.now, None
    await world.until_its_turn()
    assert world.changes and world.now - failed_s >= FAILED_S
