"""Which model a peer takes that was told none."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.routing.balance import cuts_of, peer_id

from meshswarm.routing.demand import Fit, Offer, larger, pick
from meshswarm.routing.view import Holder, View
from meshswarm.span import Span

OWN_LARGE = Offer("large", "large", bytes([1]) * 32, 5 * 10**9, False, Fit.WHOLE)
OWN_SMALL = Offer("small", "small", bytes([2]) * 32, 10**8, True, Fit.WHOLE)
TOO_LARGE = Offer("huge", "huge", bytes([3]) * 32, 10**11, True, Fit.PART)


def served(name: str, *spans: tuple[int, int], demand: float = 0.0, us: int = 1000, **other: object) -> Offer:
    """A model of 12 layers with these holders."""
    holders = tuple(Holder(peer_id(n), Span(*span), us) for n, span in enumerate(spans))
    offer = Offer(name, name, bytes([len(name)]) * 32, 100, False, Fit.PART, View(cuts_of(12), holders, demand))
    return replace(offer, **other)  # type: ignore[arg-type]


def picked(*offers: Offer) -> str:
    found = pick(offers)
    assert found is not None
    return found.offer.name


def test_alone_it_takes_the_best_that_fits_whole_else_the_smallest_there_is() -> None:
    assert picked(OWN_SMALL, OWN_LARGE, TOO_LARGE) == "large"
    assert picked(TOO_LARGE, replace(TOO_LARGE, name="vast", n_bytes=10**12)) == "huge"
    unproved = replace(OWN_SMALL, name="like it", is_verified=False, n_bytes=2 * OWN_SMALL.n_bytes)
    assert picked(OWN_SMALL, unproved) == "small", "of one size class the one that is verified"
    assert picked(OWN_SMALL, replace(OWN_LARGE, fit=Fit.NOTHING)) == "small"
    assert pick([replace(TOO_LARGE, fit=Fit.NOTHING)]) is None


def test_what_nobody_here_ran_is_fetched_only_where_nothing_sure_fits_and_else_named() -> None:
    unsure = replace(OWN_LARGE, name="new", to_fetch=OWN_LARGE.n_bytes, n_bytes=9 * 10**9)
    verified = replace(OWN_SMALL, to_fetch=OWN_SMALL.n_bytes)
    assert picked(unsure, verified) == "small"
    assert picked(unsure, verified, OWN_LARGE) == "large", "what lies on this disk is sure"
    assert picked(unsure, replace(verified, fit=Fit.PART)) == "new"
    assert picked(replace(unsure, fit=Fit.PART), replace(verified, fit=Fit.PART)) == "small"
    assert larger([unsure, verified, OWN_LARGE], verified) == unsure
    assert larger([unsure, verified], OWN_LARGE) is None, "it is of the same class"
    assert larger([replace(unsure, fit=Fit.PART), OWN_LARGE], verified) is None


def test_joining_beats_starting_another() -> None:
    found = pick([OWN_LARGE, served("there", (0, 12), (0, 12), (0, 12))])
    assert found is not None and found.offer.name == "there"
    assert found.because == "3 peers serve it"


def test_what_is_asked_for_and_incomplete_comes_first() -> None:
    wanted = served("wanted", (0, 6), demand=0.5)
    incomplete = served("incomplete", (0, 3), (0, 3), (0, 4), (0, 3))
    busy = served("busy", (0, 12), (0, 12), demand=9.0)
    assert picked(incomplete, busy, wanted, OWN_LARGE) == "wanted"
    assert picked(incomplete, busy) == "busy", "2 x 83 rows/s for 9 requests a second"
    assert picked(incomplete, replace(busy, view=replace(busy.view, demand=0.1))) == "incomplete"  # type: ignore[type-var]
    found = pick([wanted])
    assert found is not None
    assert found.because == "1 peer serves it, 0.5 requests/s ask for it, and the layers 6:12 have no holder"


def test_what_does_not_fit_is_not_joined() -> None:
    assert picked(OWN_SMALL, served("there", (0, 6), demand=9.0, fit=Fit.NOTHING)) == "small"


OFFERS = (
    OWN_LARGE,
    OWN_SMALL,
    TOO_LARGE,
    served("a", (0, 6)),
    served("ab", (0, 12), (0, 12), demand=1),
    served("abc", (0, 12), fit=Fit.NOTHING),
    served("abcd", (4, 12), demand=0.1),
    replace(OWN_LARGE, fit=Fit.NOTHING),
)


@given(st.lists(st.sampled_from(OFFERS), max_size=6), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_and_fits(drawn: list[Offer], rng: object) -> None:
    found = pick(drawn)
    rng.shuffle(drawn)  # type: ignore[attr-defined]
    again = pick(drawn)
    assert (found is None) == all(offer.fit is Fit.NOTHING for offer in drawn)
    if found is not None:
        assert again is not None and again.offer == found.offer
        assert found.offer.fit is not Fit.NOTHING
        assert found.offer.is_served or not any(each.is_served and each.fit is not Fit.NOTHING for each in drawn)
