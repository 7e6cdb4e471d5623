"""Layers exchanged for others: what is announced, loaded, emptied and stopped, in which order, and what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import MeshswarmError, OutOfMemoryError
from meshswarm.identity import Identity
from meshswarm.routing.choice import Choice
from meshswarm.serving import Serving, ServingSettings, Surroundings, serving
from meshswarm.span import Span
from meshswarm.stage.engine.benchmark import Speed
from meshswarm.stage.engine.devices import ON_CPU
from meshswarm.stage.engine.memory import EngineMemory
from meshswarm.stage.engine.paging import ALL_FITS
from meshswarm.stage.sessions.terms import Served
from meshswarm.tasks import Tasks

MODEL = ModelInfo(bytes(32), "tiny", "llama", "f32", 12, 64, 32, 128, (1000,), 100, True)
OTHER = ModelInfo(bytes([1]) * 32, "other", "llama", "f32", 12, 64, 32, 128, (1000,), 100, True)
OLD, NEW = Span(0, 6), Span(6, 12)


def of(model: ModelInfo) -> str:
    return "" if model == MODEL else "other "


class Peer:
    """A `Serving` with its layers 0:6 among parts that write down, in one list, what happens to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tasks: Tasks) -> None:
        self.happened: list[str] = []
        self.published: list[CoverageRecord] = []
        self.warnings: list[str] = []
        self.failing: set[Span] = set()
        self.is_emptied = True
        self.leaving = asyncio.Event()
        monkeypatch.setattr(serving, "OLD_LAYERS_S", 0.0)
        monkeypatch.setattr(serving, "load_slice", self._load)
        around: Any = Surroundings(
            home=SimpleNamespace(), identity=Identity.from_seed(bytes(32)),
            endpoint=SimpleNamespace(addresses=(Address("127.0.0.1", 4810),)),
            dht=SimpleNamespace(
                publish_coverage=self._publish, withdraw=self._withdraw, publish_card=self._publish_card
            ),
            store=SimpleNamespace(),
            slices=SimpleNamespace(let_go=lambda model_id, span: self.happened.append(f"let go {span}")),
            spans=SimpleNamespace(
                serve=self._serve, empty=self._empty, retire=self._retire, draining=False, n_free_slots=4,
                leaving=self.leaving,
                reopen=lambda: self.happened.append("reopen"),
            ),
            tasks=tasks, report=self._report,
        )  # fmt: skip
        settings = ServingSettings("tiny", is_mobile=True)
        self.serving = Serving(settings, around, MODEL, self.served(OLD))
        self.happened.clear()

    def served(self, span: Span, model: ModelInfo = MODEL) -> Served:
        async def stop() -> None:
            self.happened.append(f"stop {of(model)}{span}")

        engine: Any = SimpleNamespace(
            numclass="cpu-1", speed=Speed(300, 600, 2000, 90), offload=ON_CPU, n_threads=1, n_threads_now=1,
            set_share=lambda share: None, memory=EngineMemory(10, 20, 30), paging=ALL_FITS, stop=stop,
        )  # fmt: skip
        return Served(model.model_id, 12, span, bytes(32), engine, 128, 512)

    async def _load(self, settings: object, around: object, info: ModelInfo, span: Span, n_ctx: int) -> Served:
        if span in self.failing:
            raise OutOfMemoryError("no room")
        self.happened.append(f"load {of(info)}{span}")
        return self.served(span, info)

    def _serve(self, served: Served, *, beside: bool = False) -> None:
        self.happened.append(f"serve {served.span}{' beside' if beside else ''}")

    async def _empty(self, served: Served, timeout_s: float) -> bool:
        self.happened.append(f"empty {served.span}")
        return self.is_emptied

    async def _retire(self, served: Served, timeout_s: float) -> None:
        self.happened.append(f"retire {served.span}")

    async def _publish(self, record: CoverageRecord) -> None:
        self.published.append(record)
        state = "" if record.loaded else " unloaded"
        going = " going" if "going" in record.roles else ""
        about = f"{'' if record.model_id == MODEL.model_id else 'other '}{record.span}{state}{going}"
        self.happened.append(f"say {about}" + (f" to {record.next_span}" if record.next_span else ""))

    async def _withdraw(self, record: CoverageRecord) -> None:
        self.happened.append(f"withdraw {'' if record.model_id == MODEL.model_id else 'other '}{record.span}")

    async def _publish_card(self, card: object) -> None:
        self.happened.append("say card")

    def _report(self, event: Any) -> None:
        if event["event"] == "warning":
            self.warnings.append(event["message"])


@pytest.fixture
async def peer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peer]:
    async with asyncio.TaskGroup() as group:
        yield Peer(monkeypatch, Tasks(group, lambda error: pytest.fail(str(error))))


async def test_where_both_fit_the_old_layers_are_served_until_the_new_ones_were_announced(peer: Peer) -> None:
    assert await peer.serving.go_over(NEW, beside=True)
    await asyncio.sleep(0.01)
    assert peer.happened == [
        "say 0:6 to 6:12", "load 6:12", "serve 6:12 beside", "say 6:12", "retire 0:6", "stop 0:6", "let go 0:6",
    ]  # fmt: skip
    assert all(record.loaded for record in peer.published)
    assert not peer.serving.is_changing
    assert peer.serving.record().span == NEW
    assert "mobile" in peer.serving.record().roles
    await peer.serving.stop()
    assert peer.happened[-1] == "stop 6:12"


async def test_a_peer_that_leaves_does_not_wait_for_those_who_have_not_heard_of_its_move(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "OLD_LAYERS_S", 3600.0)
    assert await peer.serving.go_over(NEW, beside=True)
    await asyncio.sleep(0.01)
    assert "retire 0:6" not in peer.happened and peer.serving.is_changing
    peer.leaving.set()
    await asyncio.sleep(0.01)
    assert peer.happened[-3:] == ["retire 0:6", "stop 0:6", "let go 0:6"]


async def test_where_they_do_not_the_old_ones_are_emptied_and_given_up_first(peer: Peer) -> None:
    assert await peer.serving.go_over(NEW, beside=False)
    assert peer.happened == [
        "say 0:6 to 6:12", "empty 0:6", "say 0:6 unloaded to 6:12", "stop 0:6", "let go 0:6",
        "load 6:12", "serve 6:12", "say 6:12",
    ]  # fmt: skip


async def test_sessions_that_last_are_not_ended_for_a_move(peer: Peer) -> None:
    peer.is_emptied = False
    assert not await peer.serving.go_over(NEW, beside=False)
    assert peer.happened == ["say 0:6 to 6:12", "empty 0:6", "reopen", "say 0:6"]


async def test_layers_that_cannot_be_loaded_cost_nothing_where_both_fit(peer: Peer) -> None:
    peer.failing = {NEW}
    assert not await peer.serving.go_over(NEW, beside=True)
    assert peer.happened == ["say 0:6 to 6:12", "say 0:6"]
    assert peer.warnings == ["The layers 6:12 cannot be served here: no room"]


async def test_what_was_given_up_in_vain_is_loaded_again(peer: Peer) -> None:
    peer.failing = {NEW}
    assert not await peer.serving.go_over(NEW, beside=False)
    assert peer.happened[-4:] == ["say 0:6 unloaded", "load 0:6", "serve 0:6", "say 0:6"]
    peer.failing = {NEW, OLD}
    with pytest.raises(MeshswarmError):
        await peer.serving.go_over(NEW, beside=False)
    assert not peer.published[-1].loaded, "and the swarm is told the truth meanwhile"
    peer.failing = set()
    await peer.serving.restore()
    await peer.serving.restore()
    assert peer.happened[-3:] == ["load 0:6", "serve 0:6", "say 0:6"]
    assert peer.serving.record().loaded


async def test_a_standby_says_so_once_and_a_server_again_too(peer: Peer) -> None:
    for is_spare in (False, True, True, False):
        await peer.serving.stand_by(is_spare, "because")
    assert [record.roles[0] for record in peer.published] == ["standby", "server"]
    assert peer.serving.facts()["role"] == "server"


async def change(peer: Peer, *, beside: bool) -> bool:
    settings = ServingSettings("other", is_mobile=True)
    return await peer.serving.change_model(settings, OTHER, Choice(NEW, 128), beside=beside)


async def test_another_model_is_loaded_and_announced_before_the_old_one_is_withdrawn_and_let_go(peer: Peer) -> None:
    await peer.serving.announce_going(True)
    models: list[str] = []
    peer.serving.on_model = lambda: models.append(peer.serving.model.name)
    assert await change(peer, beside=True)
    await asyncio.sleep(0.01)
    assert peer.happened == [
        "say 0:6 going", "say other 6:12 unloaded", "load other 6:12", "serve 6:12 beside", "say card",
        "say other 6:12", "withdraw 0:6", "retire 0:6", "stop 0:6", "let go 0:6",
    ]  # fmt: skip
    assert peer.serving.model == OTHER and peer.serving.settings.model == "other" and models == ["other"]
    assert peer.serving.facts()["model"] == "other" and not peer.serving.is_changing


async def test_where_both_do_not_fit_the_old_one_is_emptied_and_given_up_first(peer: Peer) -> None:
    assert await change(peer, beside=False)
    assert peer.happened == [
        "say other 6:12 unloaded", "empty 0:6", "say 0:6 unloaded", "stop 0:6", "let go 0:6",
        "load other 6:12", "serve 6:12", "say card", "say other 6:12", "withdraw 0:6",
    ]  # fmt: skip


@pytest.mark.parametrize("beside", [True, False])
async def test_another_model_that_cannot_be_loaded_leaves_the_old_one_served(peer: Peer, beside: bool) -> None:
    peer.failing = {NEW}
    assert not await change(peer, beside=beside)
    again = [] if beside else ["load 0:6", "serve 0:6", "say 0:6"]
    assert peer.happened[-len(again) - 1 :] == ["withdraw other 6:12", *again]
    assert peer.serving.model == MODEL and peer.serving.record().span == OLD and peer.serving.record().loaded
    assert peer.warnings == ["other cannot be served here: no room"]


async def test_sessions_that_last_keep_the_old_model(peer: Peer) -> None:
    peer.is_emptied = False
    assert not await change(peer, beside=False)
    assert peer.happened == ["say other 6:12 unloaded", "empty 0:6", "reopen", "withdraw other 6:12"]


async def test_who_is_about_to_go_says_so_and_takes_it_back(peer: Peer) -> None:
    for is_going in (True, True, False):
        await peer.serving.announce_going(is_going)
    assert peer.happened == ["say 0:6 going", "say 0:6"]
