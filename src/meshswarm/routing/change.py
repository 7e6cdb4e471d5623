"""Whether a peer should serve another model than it does, because that one is asked for and lacks holders.

A peer leaves only a model that then still lacks nothing, with a quarter to spare, and goes only to one that is asked
for and lacks something. No change therefore makes work for another one: while what is asked for stays the same, the
models that lack something only ever become fewer, and everybody comes to rest.

The rule this file keeps: nobody leaves a layer that not at least two others have loaded whose claims have stood for
minutes and who do not say that they are about to go; of those whom a model can do without, the lot says who goes first.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshswarm.routing.demand import HEADROOM, Fit, Offer, by_need, why
from meshswarm.routing.rebalance import Own
from meshswarm.routing.restraint import settle_s
from meshswarm.routing.view import ENOUGH_HOLDERS, ROWS_PER_REQUEST, View, lot, rows_per_s

CHANGE_ROUND_S = 60.0
"""For so long the same peer of a model goes first, then another."""
STEADY_S = 120.0
"""A model must have been asked for so long, as heard here, before anybody goes over to it."""
MAX_CHANGE_WAIT_S = 20.0
"""Jitter: peers of other models may be about to go to the same one."""
MARGIN = 1.25
"""What a model must still do without the peer, of what makes it one that lacks nothing."""
LACKING = 2
"""Whose `Offer.need` is this or more is asked for and lacks holders or speed."""
_OWN_LOTS = 1 << 40  # these lots are others than those for moves


@dataclass(frozen=True, slots=True)
class Change:
    """Serve the model of `offer` instead, after `wait_s` if it still holds then. `reason`: a sentence."""

    offer: Offer
    reason: str
    wait_s: float


class Wishes:
    """Since when each model has been asked for, as heard here. Times in seconds."""

    def __init__(self) -> None:
        self._since: dict[bytes, float] = {}

    def hear(self, demand: Mapping[bytes, float], now: float) -> None:
        """What is asked for at this moment, in requests a second by model."""
        self._since = {model_id: self._since.get(model_id, now) for model_id, per_s in demand.items() if per_s > 0}

    def lasting(self, now: float) -> frozenset[bytes]:
        """The models that have been asked for all the while."""
        return frozenset(model_id for model_id, since in self._since.items() if now - since >= STEADY_S)


def may_leave(view: View, own: Own, now: float) -> bool:
    """Whether the model of `view` can do without this peer, and it is this peer's turn in the round of `now`."""
    me = view.by_peer.get(own.peer)
    if me is None or not me.stays or not me.is_mobile or own.is_pinned or own.peer not in view.spare:
        return False
    if now - own.moved_s < settle_s(own.n_moves, is_urgent=False):
        return False
    number = _OWN_LOTS + int(now // CHANGE_ROUND_S)
    if own.peer != min(view.spare, key=lambda peer: lot(peer, number)):
        return False
    others = replace(view, holders=tuple(holder for holder in view.holders if holder is not me), memo={})
    reliable = [h for h in others.holders if h.stays and (own.trusted is None or h.peer in own.trusted)]
    firm = replace(view, holders=tuple(reliable), memo={}).firm
    if min(firm[me.span.start : me.span.stop]) < ENOUGH_HOLDERS or min(others.counts) < ENOUGH_HOLDERS:
        return False
    return rows_per_s(min(others.rates)) >= MARGIN * HEADROOM * view.demand * ROWS_PER_REQUEST


def choose_change(
    view: View, name: str, own: Own, offers: Sequence[Offer], rng: random.Random, now: float
) -> Change | None:
    """Which of `offers` to serve instead of the model called `name` that `view` shows; None to stay."""
    if not may_leave(view, own, now):
        return None
    lacking = [offer for offer in offers if offer.fit is not Fit.NOTHING and offer.need >= LACKING]
    if not lacking:
        return None
    best = min(lacking, key=by_need)
    reason = f"Going over to {best.name} from {name}, which can do without this peer: {why(best)}."
    return Change(best, reason, rng.uniform(0, MAX_CHANGE_WAIT_S))
