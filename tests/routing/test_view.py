"""Who holds what, from records and from what peers have said since."""

from __future__ import annotations

from dataclasses import replace

from tests.routing.balance import cuts_of, peer_id

from meshswarm.config import Address
from meshswarm.dht.records import CoverageRecord
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.view import Holder, View, level, lot, rows_per_s
from meshswarm.span import Span

MODEL, OTHER_MODEL = bytes([1]) * 32, bytes([2]) * 32


def record(number: int, start: int, stop: int, us: int = 1000, **other: object) -> CoverageRecord:
    made = CoverageRecord(
        peer_id(number), (Address("127.0.0.1", 4000),), MODEL, Span(start, stop), True, "cpu", 64, us, 0, 64,
        ("server", "mobile"),
    )  # fmt: skip
    return replace(made, **other)  # type: ignore[arg-type]


def report(number: int, start: int, stop: int, **other: object) -> LoadReport:
    made = LoadReport(peer_id(number), model_id=MODEL, span=Span(start, stop), n_layers=512)
    return replace(made, **other)  # type: ignore[arg-type]


def only(view: View) -> Holder:
    (holder,) = view.holders
    return holder


def test_what_a_layer_can_do_is_the_sum_of_what_its_holders_can() -> None:
    view = View.of(cuts_of(12), [record(1, 0, 6), record(2, 4, 12, us=500)])
    assert [round(rows_per_s(view.rates[layer]), 1) for layer in (0, 4, 11)] == [166.7, 416.7, 250.0]
    assert list(view.counts) == [1] * 4 + [2] * 2 + [1] * 6
    assert max(view.levels[:4]) < min(view.levels[4:6]), "one holder, however fast, is worth less than two"
    assert level(10**30, 1) < level(10**25, 2) and level(5, 0) == 0


def test_who_is_on_the_way_counts_where_it_goes_and_is_counted_on_nowhere() -> None:
    view = View.of(cuts_of(12), [record(1, 0, 6, next_span=Span(6, 12)), record(2, 0, 6, loaded=False)])
    assert list(view.counts) == [1] * 12
    assert list(view.firm) == [0] * 12
    assert view.unheld == (Span(6, 12),), "though the first still serves its old layers"


def test_a_report_is_newer_than_a_record() -> None:
    told = record(1, 0, 6, next_span=Span(6, 12))
    moved = only(View.of(cuts_of(12), [told], loads=[report(1, 6, 12, us_per_layer=70)]))
    assert (moved.span, moved.next_span, moved.us_per_layer, moved.is_mobile) == (Span(6, 12), None, 70, True)
    still = only(View.of(cuts_of(12), [told], loads=[report(1, 0, 6)]))
    assert (still.span, still.next_span, still.us_per_layer) == (Span(0, 6), Span(6, 12), 1000)
    assert only(View.of(cuts_of(12), [told], loads=[report(1, 0, 6, draining=True)])).is_leaving
    assert View.of(cuts_of(12), [told], loads=[report(1, 0, 6, model_id=OTHER_MODEL)]).holders == ()
    nothing = LoadReport(peer_id(1))
    assert only(View.of(cuts_of(12), [told], loads=[nothing])).next_span == Span(6, 12)


def test_who_is_gone_or_serves_layers_that_there_are_not_is_left_out() -> None:
    assert View.of(cuts_of(12), [record(1, 0, 6)], gone=frozenset({peer_id(1)})).holders == ()
    assert View.of(cuts_of(12), [record(1, 6, 13)]).holders == ()
    beyond = report(1, 11, 400)
    assert View.of(cuts_of(12), [record(1, 0, 6)], loads=[beyond]).holders == ()
    nowhere = View.of(cuts_of(12), [record(1, 0, 6, next_span=Span(11, 13))])
    assert only(nowhere).next_span is None and list(nowhere.counts) == [1] * 6 + [0] * 6


def test_lots_differ_by_peer_and_by_drawing() -> None:
    assert len({lot(peer_id(n), number) for n in range(20) for number in range(20)}) == 400
