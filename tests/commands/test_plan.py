"""What a person reads of a plan, and what is asked for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.routing.peers import HEAD, near, peer, record

from meshswarm.commands.plan import PlanQuestion
from meshswarm.commands.show_plan import show_plan
from meshswarm.commands.throwaway import Where
from meshswarm.config import Home
from meshswarm.routing.planner import Situation
from meshswarm.routing.preview import Knowledge, Question, preview
from meshswarm.routing.preview_json import as_json


def said_of(records: list[Any], n_streams: int = 1) -> dict[str, Any]:
    known = Knowledge(
        n_layers=30, records=records, situation=Situation(HEAD, near), away={}, measured={}, now=0.0, unix_ms=0,
        reported_ms={}, byte_s=lambda peers: 0.0, row_bytes=4096,
    )  # fmt: skip
    found = preview(Question(1024, 256, n_streams), known)
    return {"model": "tiny", "model_id": "x", "layers": 30, **as_json(found)}


def test_a_plan_begins_with_the_answer_and_leaves_nobody_out(capsys: pytest.CaptureFixture[str]) -> None:
    offered = [record(1, "0:30"), record(2, "0:15"), replace(record(3, "15:30"), paged_bytes=5), record(4, "0:9")]
    show_plan(said_of(offered))
    shown = capsys.readouterr().out
    assert shown.startswith(
        "tiny, 30 layers: 1 answer, 1024 positions, a prompt of 256 tokens\n\nRun it alone, splitting"
    )
    assert "Route: 5.0 ms a token (200.0 tokens/s each), the first after 0.0" in shown
    assert "claimed by the peer" in shown and "(measured here)" in shown and "not known" in shown
    assert "Kept for when a peer refuses: 0:15 on" in shown
    for number in (1, 2, 3, 4):
        assert str(peer(number)) in shown


def test_several_routes_and_what_has_no_room_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    offered = [record(n, "0:30", us_4=900, us_16=9000, free=4096) for n in (1, 2)]
    show_plan(said_of(offered, n_streams=3))
    shown = capsys.readouterr().out
    assert "Route 1: " in shown and "Route 2: " in shown
    assert "Together: 400.0 tokens/s over 2 routes, which share no peer." in shown
    assert "Room for 2 of 3 only: layers 0:30 of this model are served, but by no peer" in shown
    show_plan(said_of([record(1, "0:10")]))
    shown = capsys.readouterr().out
    assert "No route: no peer of this swarm serves layers 10:30 of this model yet." in shown
    assert "meshswarm run" not in shown
    show_plan(said_of([]))
    assert 'meshswarm run --model tiny "PROMPT"' in capsys.readouterr().out


def test_what_is_asked_stands_in_the_path() -> None:
    asked = PlanQuestion(Where(Home(Path("x"))), "a b&c", n_ctx=64, n_streams=2)
    assert asked.path == "/meshswarm/plan?model=a+b%26c&context=64&streams=2"
