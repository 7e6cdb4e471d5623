"""Whether one machine alone would be faster than the best split: splitting never speeds up a single answer.

The rule this file keeps: what nobody measured is not compared. A machine with room for the whole model that was never
timed is told so, and how to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.candidates import MissingLayersError
from meshswarm.routing.cost import LOCAL_HOP_S
from meshswarm.routing.planner import Planning, Situation
from meshswarm.stage.engine.memory import in_words

_SEARCHED = 16  # routes among which one over several peers is looked for before whole models are left out


@dataclass(frozen=True, slots=True)
class OwnMachine:
    """This machine, as a place for the whole model: what that takes with the program around it, and what there is.
    `us_per_layer` None: it was never timed with this model; `basis`: when and how it was."""

    needs_bytes: int
    free_bytes: int
    us_per_layer: float | None = None
    basis: str = ""

    @property
    def fits(self) -> bool:
        return self.needs_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True)
class Alone:
    """One machine for the whole model: `peer`, None for this machine without serving it yet. `tpot_s` and
    `best_split_s` are None where nobody knows. `is_better`: running it there alone is the fastest way."""

    peer: PeerId | None
    tpot_s: float | None
    best_split_s: float | None
    is_better: bool
    sentence: str


def judge(
    n_layers: int,
    records: Sequence[CoverageRecord],
    situation: Situation,
    planning: Planning | None,
    own: OwnMachine | None,
) -> Alone | None:
    """`planning`: the best route there is, None when there is none. None where no machine alone comes into question."""
    split_s = _best_split_s(n_layers, records, situation)
    best = None if planning is None else planning.routes[0]
    if own is not None and own.fits and own.us_per_layer is not None:
        tpot_s = own.us_per_layer * n_layers / 1e6 + LOCAL_HOP_S
        if best is None or tpot_s < best.predicted_tpot_s:
            return Alone(None, tpot_s, split_s, True, _better("this machine alone", tpot_s, split_s, own.basis))
    if best is not None and len(best.hops) == 1:
        peer, tpot_s = best.hops[0].peer, best.predicted_tpot_s
        who = "this peer" if peer == situation.head else f"peer {peer.short}"
        return Alone(peer, tpot_s, split_s, True, _better(f"{who}, which holds the whole model,", tpot_s, split_s, ""))
    if own is None or not own.fits:
        return None
    if own.us_per_layer is None:
        return Alone(
            None,
            None,
            split_s,
            False,
            f"this machine has room for the whole model ({in_words(own.needs_bytes)} of {in_words(own.free_bytes)}); "
            "`meshswarm bench MODEL` would say how fast it is alone",
        )
    assert best is not None
    sentence = (
        f"this machine alone would take {tpot_s * 1e3:.1f} ms a token ({own.basis}), the route "
        f"{best.predicted_tpot_s * 1e3:.1f}"
    )
    return Alone(None, tpot_s, split_s, False, sentence)


def _better(who: str, tpot_s: float, split_s: float | None, basis: str) -> str:
    how = f" ({basis})" if basis else ""
    if split_s is None:
        return f"run it alone: {who} takes {tpot_s * 1e3:.1f} ms a token{how}, and nobody could share the work"
    return (
        f"run it alone, splitting would be slower: {who} takes {tpot_s * 1e3:.1f} ms a token{how}, the best split "
        f"{split_s * 1e3:.1f}"
    )


def _best_split_s(n_layers: int, records: Sequence[CoverageRecord], situation: Situation) -> float | None:
    """Seconds a token of the best route over several peers, as far as it is among the best routes, or among those
    without holders of the whole model."""
    found = []
    parts = [record for record in records if len(record.span) < n_layers]
    for offered in (records, parts):
        try:
            routes = Planning.of(n_layers, offered, situation, _SEARCHED).routes
        except MissingLayersError:
            continue
        found += [route.predicted_tpot_s for route in routes if len(route.hops) > 1]
    return min(found, default=None)
