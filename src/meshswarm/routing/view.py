"""Who holds which layers of one model, as one peer knows it, and how much each layer can do.

The rule this file keeps: every number is a whole one and the order of holders does not matter, so two peers that know
the same see the same. Nothing here depends on memory, which only its owner knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.span import Span, missing_layers
from meshswarm.stage.families.cuts import LegalCuts

MOBILE = "mobile"
"""The role of a peer that may move to other layers by itself."""
STANDBY = "standby"
"""The role of a peer whose layers others can serve without it: it stays loaded, answers, and is the first to move."""
GOING = "going"
"""The role of a peer that is about to serve another model: it answers until then, and nobody counts on it any more."""
LONE_SHARE = 2**20
"""A layer with one holder counts as this part of what that holder does, less than any with two: one failure takes it
away, however fast it is."""
ENOUGH_HOLDERS = 2
ROWS_PER_REQUEST = 256
"""Decoded rows a request is taken to need, where demand is told in requests a second."""
_SPEED = 10**18
"""Layer-rows in this many microseconds are the unit of speed: whole numbers, exact enough for any machine."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A peer with layers. `us_per_layer`: one row in one layer. `is_loaded` False: they are being loaded. `next_span`:
    what it loads to serve instead. `is_mobile`: it moves by itself. `is_leaving`: it takes no new sessions."""

    peer: PeerId
    span: Span
    us_per_layer: int
    is_loaded: bool = True
    next_span: Span | None = None
    is_mobile: bool = False
    is_leaving: bool = False

    @property
    def planned(self) -> Span:
        """Where it will be."""
        return self.next_span or self.span

    @property
    def stays(self) -> bool:
        """Whether its layers can be counted on."""
        return self.is_loaded and not self.is_leaving and self.next_span is None

    def rate(self, n_layers: int) -> int:
        """What it does for each of `n_layers` layers: it computes one after the other."""
        return _SPEED // (max(1, self.us_per_layer) * n_layers)

    @classmethod
    def of(cls, record: CoverageRecord) -> Holder:
        """From what the peer says of itself."""
        return cls(
            record.peer,
            record.span,
            record.us_per_layer,
            is_loaded=record.loaded,
            next_span=record.next_span,
            is_mobile=MOBILE in record.roles,
            is_leaving=GOING in record.roles,
        )


@dataclass(frozen=True)
class View:
    """The holders of one model whose legal cuts are `cuts`. `demand`: requests a second the swarm is asked for."""

    cuts: LegalCuts
    holders: tuple[Holder, ...]
    demand: float = 0.0
    memo: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    """What was worked out from this view, for whoever asks again."""

    @classmethod
    def of(
        cls,
        cuts: LegalCuts,
        records: Iterable[CoverageRecord],
        *,
        loads: Iterable[LoadReport] = (),
        gone: frozenset[PeerId] = frozenset(),
        leaving: frozenset[PeerId] = frozenset(),
        demand: float = 0.0,
    ) -> View:
        """From the records of one model, and from what peers have said since: `loads` of any model, who is `gone` and
        is left out, who is `leaving`."""
        by_peer = {record.peer: record for record in records if record.span.stop <= cuts.n_layers}
        reports = {report.peer: report for report in loads}
        told = (_now(record, reports.get(peer), cuts.n_layers) for peer, record in by_peer.items() if peer not in gone)
        holders = [
            replace(holder, is_leaving=holder.is_leaving or holder.peer in leaving)
            for holder in told
            if holder is not None
        ]
        return cls(cuts, tuple(holders), demand)

    @property
    def n_layers(self) -> int:
        return self.cuts.n_layers

    @cached_property
    def by_peer(self) -> Mapping[PeerId, Holder]:
        return {holder.peer: holder for holder in self.holders}

    @cached_property
    def rates(self) -> list[int]:
        """What all holders do for each layer, once those that are on their way have arrived."""
        return self._sums(lambda holder: holder.rate(len(holder.planned)))

    @cached_property
    def counts(self) -> list[int]:
        """How many holders each layer has then."""
        return self._sums(lambda holder: 1)

    @cached_property
    def firm(self) -> list[int]:
        """How many holders each layer has that are loaded and stay."""
        steps = [0] * (self.n_layers + 1)
        for holder in self.holders:
            if holder.stays:
                steps[holder.span.start] += 1
                steps[holder.span.stop] -= 1
        return _running(steps)

    @cached_property
    def levels(self) -> list[int]:
        """What each layer is worth: the weakest decides what the model can do."""
        return [level(rate, count) for rate, count in zip(self.rates, self.counts, strict=True)]

    @cached_property
    def unheld(self) -> tuple[Span, ...]:
        """Layers that nobody has loaded."""
        return missing_layers({h.span for h in self.holders if h.is_loaded and not h.is_leaving}, self.n_layers)

    def _sums(self, of: Callable[[Holder], int]) -> list[int]:
        steps = [0] * (self.n_layers + 1)
        for holder in self.holders:
            if not holder.is_leaving:
                amount = of(holder)
                steps[holder.planned.start] += amount
                steps[holder.planned.stop] -= amount
        return _running(steps)

    @cached_property
    def spare(self) -> frozenset[PeerId]:
        """Mobile peers whose layers have enough holders and speed without them.

        Peers are counted in one order that all see alike, those that never move first and then the fastest, so that
        of three equal holders one is spare, not all.
        """
        needed = int(self.demand * ROWS_PER_REQUEST * _SPEED / 1e6)
        counts, rates = [0] * self.n_layers, [0] * self.n_layers
        found = set()
        for holder in sorted((h for h in self.holders if h.stays), key=_standing):
            layers = range(holder.span.start, holder.span.stop)
            if holder.is_mobile and all(counts[i] >= ENOUGH_HOLDERS and rates[i] >= needed for i in layers):
                found.add(holder.peer)
                continue
            rate = holder.rate(len(holder.span))
            for layer in layers:
                counts[layer] += 1
                rates[layer] += rate
        return frozenset(found)


def level(rate: int, n_holders: int) -> int:
    """What a layer is worth that `n_holders` serve at `rate` together."""
    return rate * LONE_SHARE if n_holders > 1 else rate if n_holders == 1 else 0


def rows_per_s(level_or_rate: int) -> float:
    """A rate in rows a second."""
    return level_or_rate * 1e6 / _SPEED


def lot(peer: PeerId, number: int) -> bytes:
    """A peer's lot in drawing `number`: different each time, alike wherever it is drawn, and nobody's to choose."""
    return hashlib.sha256(b"meshswarm/lot/1" + number.to_bytes(8, "big") + peer.key).digest()[:8]


def _now(record: CoverageRecord, report: LoadReport | None, n_layers: int) -> Holder | None:
    """A holder as its newest report has it; None when it serves another model by now, or layers that there are not. One
    that reports nothing served is between two slices, or still loads."""
    holder = Holder.of(record)
    if holder.next_span is not None and holder.next_span.stop > n_layers:
        holder = replace(holder, next_span=None)
    if report is None or report.model_id is None or report.span is None:
        return holder
    if report.model_id != record.model_id or report.span.stop > n_layers:
        return None
    us = report.us_per_layer or record.us_per_layer
    holder = replace(holder, us_per_layer=us, is_leaving=holder.is_leaving or report.draining)
    if report.span == holder.span:
        return holder
    return replace(holder, span=report.span, next_span=None, is_loaded=True)


def _standing(holder: Holder) -> tuple[bool, int, bytes]:
    return holder.is_mobile, holder.us_per_layer, lot(holder.peer, 0)


def _running(steps: Sequence[int]) -> list[int]:
    """The sums up to each step, without the last."""
    total, sums = 0, []
    for step in steps[:-1]:
        total += step
        sums.append(total)
    return sums
