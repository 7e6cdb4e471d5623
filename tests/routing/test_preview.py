"""What a plan says of routes, of what its figures rest on, and of everybody who is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.routing.peers import HEAD, near, peer, record
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.alone import OwnMachine
from meshswarm.routing.cost import DEFAULT_RTT_S, HOP_S, LOCAL_HOP_S, Basis
from meshswarm.routing.left_out import LeftOut
from meshswarm.routing.measured import MeasuredSpeed
from meshswarm.routing.own_speeds import OwnSpeed, OwnSpeeds
from meshswarm.routing.planner import Planning, Situation
from meshswarm.routing.preview import Knowledge, Preview, Question, age_words, preview
from meshswarm.routing.preview_json import as_json
from meshswarm.routing.probing import MAX_PROBES, worth_probing
from meshswarm.stage.sizes.memory import Load, MemoryModel

ASKED = Question(n_ctx=1024, n_prompt=256)
NOW, UNIX_MS = 1000.0, 1_700_000_000_000


def known(
    records: Sequence[CoverageRecord],
    *,
    away: Mapping[PeerId, str] | None = None,
    measured: Mapping[PeerId, MeasuredSpeed] | None = None,
    own: OwnMachine | None = None,
    memory: MemoryModel | None = None,
    **situation: object,
) -> Knowledge:
    away, measured = away or {}, measured or {}
    now = Situation(
        HEAD, near, avoid=frozenset(away), measured_us={each: seen.us_per_layer for each, seen in measured.items()}
    )
    return Knowledge(
        n_layers=30, records=records, situation=replace(now, **situation), away=away, measured=measured, now=NOW,  # type: ignore[arg-type]
        unix_ms=UNIX_MS, reported_ms={}, byte_s=lambda peers: 0.0, row_bytes=4096, memory=memory, own=own,
    )  # fmt: skip


def left_out(found: Preview) -> dict[int, LeftOut]:
    return {int.from_bytes(each.record.peer.key[:8]): each for each in found.left_out}


def test_everybody_who_is_left_out_has_a_reason_and_what_would_change_it() -> None:
    offered = [
        record(1, "0:30", us=100),
        record(2, "0:30", us=90),
        record(3, "0:30", n_ctx=512),
        record(4, "10:20", free=0),
        record(5, "20:30", loaded=False),
        record(6, "0:30", us=50),
        record(7, "0:31"),
        record(8, "10:20", us=99),
        record(9, "20:30", us=99),
        record(10, "25:28", us=99),
    ]
    far = {peer(2): 0.040}
    found = preview(
        ASKED,
        known(offered, away={peer(6): "has gone"}, rtt_s=lambda _head, other: far.get(other, 0.001)),
    )
    assert [hop.record.peer for hop in found.routes[0].hops] == [peer(1)]
    why = left_out(found)
    assert set(why) == {2, 3, 4, 5, 6, 7, 8, 9, 10}
    assert "a nearer peer does" in why[2].reason
    assert why[2].changes[0] == "would be used if its round trip fell below 1.3 ms (now 40 ms)"
    assert why[3].reason == "context 512 < 1,024"
    assert why[3].changes == ("restart it with --ctx 1024",)
    assert "sessions are taken" in why[4].reason
    assert "not in memory" in why[5].reason
    assert why[6].reason == "it has gone"
    assert "the model ends before" in why[7].reason
    assert "more a token" in why[8].reason
    assert "no route can go through its layers 25:28" in why[10].reason, "it ends where nobody starts"
    assert all(each.changes for each in why.values())


def test_a_busy_peer_is_told_how_free_it_would_have_to_be() -> None:
    found = preview(ASKED, known([record(1, "0:30", us=200), record(2, "0:30", us=100)], queue_s={peer(2): 0.010}))
    (change, *_) = left_out(found)[2].changes
    assert change == "would be used if its queue fell below 3 ms (now 10 ms)"


def test_figures_say_who_says_so_and_how_long_ago() -> None:
    own = replace(record(1, "0:10"), peer=HEAD)
    offered = [own, record(2, "10:20", seq=UNIX_MS - 30_000), record(3, "20:30", rtts={2: 4000})]
    seen = {peer(3): MeasuredSpeed(2000.0, 3, NOW - 12)}
    (route,) = preview(ASKED, known(offered, measured=seen)).routes
    bases = [(hop.speed_basis, hop.is_claim) for hop in route.hops]
    assert bases == [
        ("measured here when it loaded", False),
        ("claimed by the peer, 30 s ago", True),
        ("measured here 3 times, 12 s ago", False),
    ]
    assert [hop.way_in.basis for hop in route.hops] == [Basis.OWN, Basis.OVER_HEAD, Basis.ONE]
    assert route.way_back.basis is Basis.HERE
    assert route.hops[2].us_per_layer == 2000
    unknown = preview(ASKED, known(offered, rtt_s=lambda _head, _peer: None)).routes[0]
    assert unknown.way_back.basis is Basis.ASSUMED
    assert unknown.way_back.seconds == DEFAULT_RTT_S / 2


def test_the_prediction_is_the_planners_own() -> None:
    (route,) = preview(ASKED, known([record(1, "0:10", us=300), record(2, "10:30", us=200)])).routes
    assert route.tpot_s == pytest.approx(10 * 300e-6 + 20 * 200e-6 + 4 * 0.0005 + 2 * HOP_S)
    assert route.tpot_s == pytest.approx(route.route.predicted_tpot_s)
    assert route.tokens_per_s == pytest.approx(1 / route.tpot_s)


def test_the_first_token_waits_for_the_prompt_and_is_not_guessed_where_nobody_measured_prompts() -> None:
    one, two = record(1, "0:15", prefill_us=100), record(2, "15:30", prefill_us=100)
    (route,) = preview(ASKED, known([one, two])).routes
    rows_s = 256 * 15 * 100e-6
    assert route.ttft_s is not None
    assert rows_s < route.ttft_s < 2 * rows_s, "the two spans overlap"
    assert route.ttft_is_claim
    assert not preview(ASKED, known([replace(record(1, "0:30"), peer=HEAD)])).routes[0].ttft_is_claim
    assert preview(ASKED, known([one, replace(two, prefill_us_per_row_layer=0)])).routes[0].ttft_s is None
    thin = replace(known([one, two]), byte_s=lambda peers: 1e-6)
    slower = preview(ASKED, thin).routes[0].ttft_s
    assert slower is not None and slower > 256 * 4096 * 1e-6


def test_streams_part_where_sharing_costs_more_than_going_round() -> None:
    offered = [record(number, "0:30", us=100, us_4=400, us_16=1600) for number in (1, 2, 3)]
    found = preview(replace(ASKED, n_streams=3), known(offered))
    assert found.is_disjoint
    assert [route.n_streams for route in found.routes] == [1, 1, 1]
    alone = preview(ASKED, known(offered)).tokens_per_s
    assert found.tokens_per_s == pytest.approx(3 * alone)


def test_streams_share_what_costs_nothing_to_share() -> None:
    offered = [record(1, "0:30", us=100, us_4=100, us_16=100, free=40_000), record(2, "0:30", us=500)]
    (route,) = preview(replace(ASKED, n_streams=4), known(offered)).routes
    assert route.n_streams == 4
    assert route.tokens_per_s == pytest.approx(4 / route.tpot_s)
    assert route.tpot_s == pytest.approx(0.003 + 0.001 + HOP_S)


def test_groups_keep_both_spans_at_work() -> None:
    """Two streams whose turns cost as much together as one after the other: each span computes for one of them."""
    offered = [record(n, span, us=1000, us_4=4000, free=40_000) for n, span in ((1, "0:15"), (2, "15:30"))]
    one = preview(ASKED, known(offered)).tokens_per_s
    two = preview(replace(ASKED, n_streams=2), known(offered)).tokens_per_s
    assert two == pytest.approx(2 * one, rel=0.01)


def test_streams_without_room_are_counted_and_the_reason_said() -> None:
    found = preview(replace(ASKED, n_streams=5), known([record(1, "0:30", free=2 * 4096)]))
    assert sum(route.n_streams for route in found.routes) == 2
    assert found.refusal is not None and "1 whose sessions are all taken" in found.refusal


def test_without_a_route_the_missing_layers_are_said_and_nothing_breaks() -> None:
    found = preview(ASKED, known([record(1, "0:10")]))
    assert found.refusal is not None and "10:30" in found.refusal
    assert not found.routes and not found.tokens_per_s
    assert left_out(found)[1].reason == "other layers have no holder"
    assert as_json(found)["tokens_per_s"] is None


def test_a_whole_model_that_beats_every_split_says_so() -> None:
    offered = [record(1, "0:30"), record(2, "0:15"), record(3, "15:30")]
    alone = preview(ASKED, known(offered)).alone
    assert alone is not None and alone.is_better and alone.peer == peer(1)
    assert alone.sentence.startswith("run it alone, splitting would be slower: ")
    assert alone.best_split_s is not None and alone.tpot_s is not None and alone.best_split_s > alone.tpot_s
    slow = preview(ASKED, known([record(1, "0:30", us=9000), *offered[1:]])).alone
    assert slow is None, "the split is faster, and this machine was not asked about"


def test_this_machine_alone_is_compared_by_what_was_measured_and_never_by_a_guess() -> None:
    offered = [record(2, "0:15"), record(3, "15:30")]
    fast = preview(ASKED, known(offered, own=OwnMachine(10**9, 2 * 10**9, 50.0, "timed today"))).alone
    assert fast is not None and fast.is_better and fast.peer is None
    assert fast.tpot_s == pytest.approx(30 * 50e-6 + LOCAL_HOP_S)
    slow = preview(ASKED, known(offered, own=OwnMachine(10**9, 2 * 10**9, 5000.0, "timed today"))).alone
    assert slow is not None and not slow.is_better and "timed today" in slow.sentence
    untimed = preview(ASKED, known(offered, own=OwnMachine(10**9, 2 * 10**9))).alone
    assert untimed is not None and untimed.tpot_s is None and "meshswarm bench" in untimed.sentence
    assert preview(ASKED, known(offered, own=OwnMachine(3 * 10**9, 2 * 10**9, 50.0, ""))).alone is None
    nobody = preview(ASKED, known([], own=OwnMachine(10**9, 2 * 10**9, 50.0, ""))).alone
    assert nobody is not None and nobody.is_better and nobody.best_split_s is None


def test_memory_is_what_the_span_takes_for_these_sessions(tmp_path: Path) -> None:
    memory = MemoryModel(read_header(write_tiny("qwen3", tmp_path / "m.gguf", n_layers=12)), Load(1024, 1))
    offered = [record(1, "0:5", free=40_000), record(2, "5:12", free=40_000)]
    one = preview(ASKED, replace(known(offered, memory=memory), n_layers=12)).routes[0]
    two = preview(replace(ASKED, n_streams=2), replace(known(offered, memory=memory), n_layers=12)).routes[0]
    for hop, both in zip(one.hops, two.hops, strict=True):
        assert hop.memory is not None and both.memory is not None
        assert hop.memory == memory.span(hop.record.span)
        assert both.memory.kv == 2 * hop.memory.kv
    assert preview(ASKED, known([*offered, record(3, "12:30")])).routes[0].hops[0].memory is None


def test_json_names_every_figure(tmp_path: Path) -> None:
    memory = MemoryModel(read_header(write_tiny("qwen3", tmp_path / "m.gguf", n_layers=12)), Load(1024, 1))
    offered = [record(1, "0:5"), record(2, "5:12"), record(3, "5:12", us=500), record(4, "0:12", us=9000)]
    said = as_json(preview(ASKED, replace(known(offered, memory=memory), n_layers=12)))
    (route,) = said["routes"]
    assert route["tpot_ms"] == pytest.approx(route["compute_ms"] + route["network_ms"] + route["queue_ms"], abs=0.01)
    assert [hop["layers"] for hop in route["hops"]] == ["0:5", "5:12"]
    assert all(hop["memory"]["total"] > 0 and hop["speed_is_claim"] for hop in route["hops"])
    assert {each["layers"] for each in said["left_out"]} == {"5:12", "0:12"}
    assert said["alternatives"] and said["streams_placed"] == 1


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5, "just now"), (0.2, "just now"), (30, "30 s ago"), (300, "5 min ago")]
)
def test_ages_are_said_in_words(seconds: float, words: str) -> None:
    assert age_words(seconds) == words


def test_what_bench_measured_is_kept_for_plans_and_a_damaged_file_is_nothing(tmp_path: Path) -> None:
    speeds = OwnSpeeds(tmp_path / "speeds.json")
    assert speeds.get("a") is None
    speeds.note("a", OwnSpeed(500, "0:30", 1.0))
    speeds.note("b", OwnSpeed(700, "0:15", 2.0))
    assert speeds.get("a") == OwnSpeed(500.0, "0:30", 1.0)
    for damaged in ("", "[]", '{"a": 5}', '{"a": {"us_per_layer": -1, "layers": "", "unix_s": 0}}', '{"a": {"us'):
        (tmp_path / "speeds.json").write_text(damaged)
        assert speeds.get("a") is None


# -- strangers


def asked(offered: list[CoverageRecord], now: Situation, n_tokens: int) -> list[PeerId]:
    return worth_probing(Planning.of(30, offered, now), offered, now, n_tokens)


def test_only_strangers_that_could_be_chosen_are_asked() -> None:
    offered = [record(1, "0:30", us=1000), record(2, "0:30", us=100), record(3, "0:30", us=2000)]
    now = Situation(HEAD, lambda _head, other: 0.001 if other == peer(1) else None)
    assert asked(offered, now, 100) == [peer(2)], "the third could not be better at any distance"
    assert asked(offered, now, 5) == [], "nor is it worth it for so short an answer"
    assert asked(offered, replace(now, rtt_s=near), 100) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 10_000))
def test_never_more_are_asked_than_is_allowed_and_never_one_that_is_known(speeds: list[int], n_tokens: int) -> None:
    offered = [record(number, "0:30", us=us) for number, us in enumerate(speeds, 1)]
    measured = {peer(number) for number in range(1, len(speeds) + 1, 3)}
    now = Situation(HEAD, lambda _head, other: 0.01 if other in measured else None)
    strangers = asked(offered, now, n_tokens)
    assert len(strangers) <= MAX_PROBES and len(set(strangers)) == len(strangers)
    assert measured.isdisjoint(strangers)
