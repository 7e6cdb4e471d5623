"""What a peer does, and what it tells the swarm, when its machine's owner comes first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.config import Address
from meshswarm.dht.records import WHOLE_ONLY, CoverageRecord
from meshswarm.identity import Identity
from meshswarm.serving import Serving, ServingSettings, Surroundings, serving
from meshswarm.span import Span
from meshswarm.stage.engine.benchmark import Speed
from meshswarm.stage.engine.devices import ON_CPU
from meshswarm.stage.engine.memory import EngineMemory
from meshswarm.stage.engine.paging import ALL_FITS
from meshswarm.stage.owner_first import Reading
from meshswarm.stage.sessions.terms import Served
from meshswarm.tasks import Tasks

MODEL = ModelInfo(bytes(32), "tiny", "llama", "f32", 4, 64, 32, 128, (1000,), 100, True)
QUIET, BATTERY, CROWD = Reading(0.0, False), Reading(0.0, True), Reading(1.0, False)


class Peer:
    """The parts around a `Serving`, which only write down what they are told. `reading` is what its machine shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tasks: Tasks, *, is_whole_only: bool = False) -> None:
        self.reading = QUIET
        self.now = 0.0
        self.published: list[CoverageRecord] = []
        self.shares: list[float] = []
        self.events: list[dict[str, Any]] = []
        self.resting = ""
        monkeypatch.setattr(serving, "LOAD_DELAY_S", 0.0)
        monkeypatch.setattr(serving, "OWNER_PERIOD_S", 0.001)
        self.read: Callable[[], Reading] = lambda: self.reading
        monkeypatch.setattr(serving, "LoadMeter", lambda: SimpleNamespace(read=lambda: self.read()))
        monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=self._second))
        engine: Any = SimpleNamespace(
            numclass="cpu-1", speed=Speed(300, 600, 2000, 90), offload=ON_CPU, n_threads=1, n_threads_now=1,
            set_share=self.shares.append, memory=EngineMemory(10, 20, 30, mapped_bytes=10), paging=ALL_FITS,
        )  # fmt: skip
        spans: Any = SimpleNamespace(
            serve=lambda served, beside=False: None,
            draining=False,
            n_free_slots=4,
            rest=self._rest,
            resume=lambda: self._rest(""),
        )
        self.spans = spans
        around: Any = Surroundings(
            home=SimpleNamespace(), identity=Identity.from_seed(bytes(32)),
            endpoint=SimpleNamespace(addresses=(Address("127.0.0.1", 4810),)),
            dht=SimpleNamespace(publish_coverage=self._publish, known_peers=list), store=SimpleNamespace(),
            slices=SimpleNamespace(),
            spans=spans, tasks=tasks, report=lambda event: self.events.append(dict(event)),
        )  # fmt: skip
        served = Served(MODEL.model_id, 4, Span(0, 4), bytes(32), engine, 128, 512, is_whole_only=is_whole_only)
        self.serving = Serving(ServingSettings("tiny", yields=True), around, MODEL, served)

    def _second(self) -> float:
        self.now += 1.0
        return self.now

    def _rest(self, reason: str) -> None:
        self.resting = reason

    async def _publish(self, record: CoverageRecord) -> None:
        self.published.append(record)

    async def until_mode(self, mode: str) -> None:
        async with asyncio.timeout(10):
            while self.serving.facts()["owner"]["mode"] != mode:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)  # and what follows from it


@pytest.fixture
async def peer(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peer]:
    async with asyncio.TaskGroup() as group:
        made = Peer(monkeypatch, Tasks(group, lambda error: pytest.fail(str(error))))
        survey, yielding = made.serving.duties()
        survey.close()
        running = group.create_task(yielding)
        yield made
        running.cancel()


async def test_on_battery_it_rests_and_the_swarm_is_told(peer: Peer) -> None:
    peer.reading = BATTERY
    await peer.until_mode("paused")
    assert peer.shares == [0.0] and "battery" in peer.resting
    assert [record.free_kv_tokens for record in peer.published] == [0]
    assert peer.serving.record().free_kv_tokens == 4 * 128, "its own head may go on"
    peer.reading = QUIET
    await peer.until_mode("full")
    assert peer.shares == [0.0, 1.0] and peer.resting == ""
    assert [record.free_kv_tokens for record in peer.published] == [0, 4 * 128]
    assert [event["mode"] for event in peer.events] == ["paused", "full"]


async def test_a_battery_that_takes_its_time_to_answer_holds_up_nobody(peer: Peer) -> None:
    loop, loop_went_on, answers = asyncio.get_running_loop(), threading.Event(), []

    def read() -> Reading:
        loop.call_soon_threadsafe(loop_went_on.set)
        answers.append(loop_went_on.wait(10))
        return BATTERY

    peer.read = read
    await peer.until_mode("paused")
    assert all(answers), "the loop waited for the battery"


async def test_under_other_programs_load_it_slows_down_before_it_rests(peer: Peer) -> None:
    peer.reading = CROWD
    await peer.until_mode("paused")
    assert peer.shares == [0.25, 0.0]
    assert "other programs use" in peer.serving.facts()["owner"]["reason"]


async def test_a_peer_that_was_full_when_it_told_its_round_trips_is_not_full_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asyncio.TaskGroup() as group:
        made = Peer(monkeypatch, Tasks(group, lambda error: pytest.fail(str(error))))
        monkeypatch.setattr(serving, "FIRST_SURVEY_S", 0.0)

        async def measured(serving: Serving) -> tuple[tuple[bytes, int], ...]:
            return ((bytes(8), 1000),)

        monkeypatch.setattr(Serving, "_measure_rtts", measured)
        surveying, yielding = made.serving.duties()
        yielding.close()
        survey = group.create_task(surveying)
        made.spans.n_free_slots = 0
        async with asyncio.timeout(10):
            while not made.published:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        made.spans.n_free_slots = 1
        made.spans.on_load()
        await asyncio.sleep(0.01)
        survey.cancel()
    assert [record.free_kv_tokens for record in made.published] == [0, 128]
    assert all(record.rtts for record in made.published)


async def test_only_who_was_asked_to_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.TaskGroup() as group:
        made = Peer(monkeypatch, Tasks(group, lambda error: pytest.fail(str(error))))
        made.serving._settings = ServingSettings("tiny")
        duties = made.serving.duties()
        assert len(duties) == 1
        for duty in duties:
            duty.close()


async def test_its_record_says_how_fast_it_is_and_whether_parts_of_its_span_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group, lambda error: pytest.fail(str(error)))
        record = Peer(monkeypatch, tasks).serving.record()
        whole = Peer(monkeypatch, tasks, is_whole_only=True).serving.record()
    assert (record.us_per_layer, record.us_per_layer_4, record.us_per_layer_16) == (300, 600, 2000)
    assert WHOLE_ONLY not in record.roles and WHOLE_ONLY in whole.roles
