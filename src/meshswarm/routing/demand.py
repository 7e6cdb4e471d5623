"""Which model a peer should serve that was not told: what the swarm lacks most, else the best that runs here alone.

The rule this file keeps: a peer joins what others serve before it starts something of its own, and says in one clause
why it chose as it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from meshswarm.artifacts.manifests.catalogue import SizeClass
from meshswarm.routing.view import ENOUGH_HOLDERS, ROWS_PER_REQUEST, View, rows_per_s
from meshswarm.span import Span

HEADROOM = 2.0
"""A model can take this many times the rows that are asked of it, or it needs more."""


class Fit(IntEnum):
    """How much of a model this machine has room for."""

    NOTHING = 0
    PART = 1
    WHOLE = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """A model this peer can get. `ref`: how. `model_id` None: of a file that nobody here has seen. `n_bytes`: its size.
    `view`: who serves it, None for nobody. `to_fetch`: how many bytes of it would come over the network, at most.
    `warning`: what a person should know first, as a sentence; empty where there is nothing."""

    ref: str
    name: str
    model_id: bytes | None
    n_bytes: int
    is_verified: bool
    fit: Fit
    view: View | None = None
    to_fetch: int = 0
    warning: str = ""

    @property
    def is_served(self) -> bool:
        return self.view is not None and bool(self.view.holders)

    @property
    def is_sure(self) -> bool:
        """Whether it is here already, or was run by those who list it: not something fetched in good faith."""
        return self.is_verified or not self.to_fetch

    @property
    def size_class(self) -> SizeClass:
        return SizeClass.of(self.n_bytes)

    @property
    def weakest(self) -> float:
        """Rows a second of the weakest layer, 0 where one has no holder."""
        return 0.0 if self.view is None else rows_per_s(min(self.view.rates))

    @property
    def demand(self) -> float:
        """Requests a second."""
        return 0.0 if self.view is None else self.view.demand

    @property
    def need(self) -> int:
        """How much others are missed there: 3 where it is asked for and layers are without a holder, 2 where it is
        asked for and has too few or too slow holders, 1 where it is incomplete, else 0."""
        if self.view is None:
            return 0
        is_incomplete = min(self.view.counts) == 0
        is_thin = min(self.view.counts) < ENOUGH_HOLDERS or self.weakest < HEADROOM * self.demand * ROWS_PER_REQUEST
        if self.demand:
            return 3 if is_incomplete else 2 if is_thin else 0
        return int(is_incomplete)


@dataclass(frozen=True, slots=True)
class Pick:
    """The model to serve; `because`: why, as a clause."""

    offer: Offer
    because: str


def pick(offers: Sequence[Offer]) -> Pick | None:
    """The model to serve; None where no part of any fits."""
    possible = [offer for offer in offers if offer.fit is not Fit.NOTHING]
    served = [offer for offer in possible if offer.is_served]
    if served:
        best = min(served, key=by_need)
        return Pick(best, why(best))
    whole = [offer for offer in possible if offer.fit is Fit.WHOLE]
    if whole:
        best = max(whole, key=_by_worth)
        of_which = " of those that are here or were run by this project" if larger(offers, best) else ""
        return Pick(
            best, f"nobody serves a model that this peer could join, and it is the best that fits whole{of_which}"
        )
    if possible:
        best = min(possible, key=lambda offer: (not offer.is_sure, offer.n_bytes, not offer.is_verified, offer.name))
        return Pick(best, "nobody serves a model that this peer could join, none fits whole, and it is the smallest")
    return None


def larger(offers: Sequence[Offer], chosen: Offer) -> Offer | None:
    """The best that would fit whole, of a larger size class than `chosen` and not taken only because nobody here ran
    it; None where there is none."""
    unsure = [offer for offer in offers if offer.fit is Fit.WHOLE and not offer.is_sure]
    better = [offer for offer in unsure if offer.size_class > chosen.size_class]
    return max(better, key=_by_worth, default=None)


def _by_worth(offer: Offer) -> tuple[bool, SizeClass, bool, int, str]:
    """The better a model is to serve alone, the more: what is sure before all else."""
    return offer.is_sure, offer.size_class, offer.is_verified, offer.n_bytes, offer.name


def by_need(offer: Offer) -> tuple[int, float, float, int, str, int]:
    """The more an offer that somebody serves or asks for is in need, the less."""
    assert offer.view is not None
    return -offer.need, -offer.demand, offer.weakest, -len(offer.view.holders), offer.name, offer.to_fetch


def why(offer: Offer) -> str:
    """What speaks for an offer that somebody serves or asks for, as a clause."""
    view = offer.view
    assert view is not None
    n = len(view.holders)
    serve = f"{n} {'peer serves' if n == 1 else 'peers serve'} it"
    asked = f", {offer.demand:.2g} requests/s ask for it" if offer.demand else ""
    if offer.need in (1, 3):
        return f"{serve}{asked}, and the layers {_listed(view.unheld)} have no holder"
    if offer.need == 2:
        return f"{serve}{asked}, and its weakest layer does {offer.weakest:.0f} rows/s"
    return f"{serve}{asked}"


def _listed(spans: Sequence[Span]) -> str:
    return ", ".join(map(str, spans[:4])) + (" and more" if len(spans) > 4 else "")
