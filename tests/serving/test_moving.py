"""When a peer looks whether it should move: twice before it goes, at once when somebody is gone, never in the way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.store.store import Store
from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.errors import OutOfMemoryError
from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.rebalance import CALM_ROUNDS, ROUND_S
from meshswarm.serving import ServingSettings, moving, reading
from meshswarm.serving.moving import Mover
from meshswarm.span import Span
from meshswarm.stage.slices.store import Slices

OWN, *OTHERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(1, 6)]
URGENT = (CALM_ROUNDS * 1000 + 1) * ROUND_S


class World:
    """A peer with the layers 0:6 of a real model of 12, and what it hears of the others."""

    def __init__(self, folder: Path) -> None:
        store = Store(folder)
        info = store.import_file(write_tiny("qwen3", folder / "m.gguf", n_layers=12))
        self.records = {peer: self.record(peer, Span(0, 6), info.model_id) for peer in (OWN, *OTHERS)}
        self.events: list[dict[str, Any]] = []
        self.moves: list[tuple[Span, bool]] = []
        self.spare: list[bool] = []
        self.told: list[str] = []
        self.asked: list[bool] = []
        self.lost: frozenset[PeerId] = frozenset()
        self.loads: dict[PeerId, LoadReport] = {}
        self.n_peers = 5
        self.can_move = True
        self.on_fresh: Any = lambda: None
        self.error: Exception | None = None
        self.now = URGENT
        settings = ServingSettings("m", n_ctx=64, n_sessions=1, is_mobile=True)
        self.serving: Any = SimpleNamespace(
            model=info, is_mobile=True, is_changing=False, taken_bytes=0, record=lambda: self.records[OWN],
            go_over=self._go_over, stand_by=self._stand_by, restore=self._restore, facts=dict, duties=list,
        )  # fmt: skip
        self.around: Any = SimpleNamespace(
            store=store, slices=Slices(store, folder), report=lambda event: self.events.append(dict(event)),
            dht=SimpleNamespace(
                coverage=self._coverage, unreachable=frozenset, known_peers=lambda: [None] * self.n_peers
            ),
        )  # fmt: skip
        hearsay: Any = SimpleNamespace(
            gone=lambda: self.lost, draining=frozenset, demand=self._demand, loads=lambda: self.loads
        )
        self.mover = Mover(self.serving, settings, self.around, hearsay, clock=lambda: self.now, rng=random.Random(1))

    @staticmethod
    def record(peer: PeerId, span: Span, model_id: bytes) -> CoverageRecord:
        address = (Address("127.0.0.1", 4000),)
        return CoverageRecord(peer, address, model_id, span, True, "cpu", 64, 100, 0, 64, ("server", "mobile"))

    def set(self, peer: PeerId, **changes: Any) -> None:
        self.records[peer] = replace(self.records[peer], **changes)

    async def _coverage(self, model_id: bytes, n_layers: int, *, fresh: bool) -> list[CoverageRecord]:
        self.asked.append(fresh)
        if fresh:
            self.on_fresh()
        return list(self.records.values())

    async def _go_over(self, span: Span, *, beside: bool) -> bool:
        self.moves.append((span, beside))
        if self.can_move:
            self.set(OWN, span=span)
        return self.can_move

    async def _stand_by(self, is_spare: bool, reason: str) -> None:
        self.spare.append(is_spare)
        self.told.append(reason)

    async def _restore(self) -> None:
        if self.error is not None:
            raise self.error

    def _demand(self) -> Mapping[bytes, float]:
        return {}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("meshswarm.routing.rebalance.MAX_WAIT_S", 0.0)
    monkeypatch.setattr(moving, "LOOK_S", 0.001)
    monkeypatch.setattr(moving, "START_SPREAD_S", 0.0)
    made = World(tmp_path)
    for other in OTHERS[2:]:
        made.set(other, span=Span(6, 12))
    return made


def alone_to_fill_the_gap(world: World) -> None:
    """Nobody has 6:12, and whoever else has 0:6 stays there."""
    for other in OTHERS:
        world.set(other, span=Span(0, 6), roles=("server",))


async def test_it_goes_where_a_holder_is_missing_after_a_second_look(world: World) -> None:
    alone_to_fill_the_gap(world)
    await world.mover.think()
    assert world.asked == [False, True]
    assert world.moves == [(Span(6, 12), True)]
    assert [event["event"] for event in world.events] == ["moving", "moved"]


async def test_a_move_that_came_to_nothing_is_not_tried_again_at_once(world: World) -> None:
    alone_to_fill_the_gap(world)
    world.can_move = False
    for n_moves, after_s in ((1, 0), (1, moving.FAILED_S - 1), (2, 1)):
        world.now += after_s
        await world.mover.think()
        assert len(world.moves) == n_moves
    assert [event.get("done") for event in world.events if event["event"] == "moved"] == [False, False]


async def test_it_stays_when_the_second_look_shows_that_somebody_else_goes(world: World) -> None:
    alone_to_fill_the_gap(world)
    world.on_fresh = lambda: world.set(OTHERS[0], next_span=Span(6, 12))
    await world.mover.think()
    assert world.asked == [False, True] and not world.moves


async def test_peers_that_are_gone_are_not_counted_on(world: World) -> None:
    world.set(OTHERS[0], roles=("server",))
    world.set(OTHERS[1], roles=("server",))
    await world.mover.think()
    assert not world.moves
    world.lost = frozenset(OTHERS[2:])
    await world.mover.think()
    assert world.moves == [(Span(6, 12), True)]


async def test_a_peer_that_is_gone_is_noticed_within_the_round_and_else_it_looks_once_a_round(world: World) -> None:
    running = asyncio.create_task(world.mover.run())
    async with asyncio.timeout(10):
        while not world.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert len(world.asked) == 1
        world.lost = frozenset({OTHERS[0]})
        while len(world.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        world.now += ROUND_S
        while len(world.asked) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    running.cancel()


async def test_in_a_large_swarm_records_are_read_again_when_somebody_is_missed_and_else_now_and_then(
    world: World,
) -> None:
    world.n_peers = 1000
    for n_read, after_s, n_lost in ((1, 0, 0), (1, 60, 0), (2, 10, 1), (2, 29, 2), (3, 1, 2)):
        world.now += after_s
        world.lost = frozenset(OTHERS[:n_lost])
        await world.mover.think()
        assert len(world.asked) == n_read
    world.now += reading.MANY_READ_S - 1
    await world.mover.think()
    assert len(world.asked) == 3
    world.n_peers = 50
    await world.mover.think()
    assert len(world.asked) == 4 and not world.moves


async def test_what_peers_report_counts_before_what_their_records_said(world: World) -> None:
    alone_to_fill_the_gap(world)
    model_id = world.records[OWN].model_id
    world.loads = {OTHERS[0]: LoadReport(OTHERS[0], model_id=model_id, span=Span(6, 12), n_layers=12)}
    await world.mover.think()
    assert not world.moves
    world.loads[OTHERS[0]] = replace(world.loads[OTHERS[0]], draining=True)
    await world.mover.think()
    assert world.moves == [(Span(6, 12), True)]


async def test_who_says_for_ever_that_it_is_coming_keeps_nobody_from_a_gap(world: World) -> None:
    alone_to_fill_the_gap(world)
    world.set(OTHERS[0], next_span=Span(6, 9))
    world.set(OTHERS[1], span=Span(9, 12), loaded=False)
    for _ in range(2):
        await world.mover.think()
        assert not world.moves
        world.now += moving.LOADING_S / 2
    world.now += 1
    await world.mover.think()
    assert world.moves == [(Span(6, 12), True)]


async def test_a_role_is_told_when_it_held_for_two_rounds(world: World) -> None:
    """Of five with all layers, two that never move, this one is spare."""
    for peer in world.records:
        world.set(peer, span=Span(0, 12), roles=("server", "mobile") if peer == OWN else ("server",))
    await world.mover.think()
    assert world.spare == []
    await world.mover.think()
    assert world.spare == [True]
    assert world.told == ["Others can serve every layer without this peer: it stands by, loaded and answering."]


async def test_layers_that_were_left_are_let_go_before_the_next_move(world: World) -> None:
    alone_to_fill_the_gap(world)
    world.serving.is_changing = True
    await world.mover.think()
    assert not world.asked and not world.moves
    world.serving.is_changing = False
    await world.mover.think()
    assert world.moves


async def test_what_fails_is_said_and_ends_nothing(world: World) -> None:
    world.error = OutOfMemoryError("no room")
    await world.mover.think()
    assert world.events == [{"event": "warning", "message": "Layers could not be exchanged: no room"}]
    world.error = None
    alone_to_fill_the_gap(world)
    await world.mover.think()
    assert world.moves


async def test_a_peer_without_leave_to_move_has_no_such_duty(world: World) -> None:
    serving: Any = SimpleNamespace(is_mobile=False, duties=list)
    assert moving.duties_of(serving, ServingSettings("m"), world.around) == []
