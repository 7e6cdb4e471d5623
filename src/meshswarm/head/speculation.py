"""How many guessed tokens to send along with the next one: as many as pay, on this route, now.

A step that carries a window of k guessed tokens takes longer than a plain one and gives between 1 and k + 1 tokens. The
rule this file keeps: against no speculation, it may lose at most `ALLOWANCE` of the time, and a step or so at once. Two
things are learned to keep it. How often guesses come true is learned for nothing, by comparing every guess with what
was said, sent or not. What a window costs is learned by trying it: sizes are tried from small to large, only while the
guesses are good enough for it, only within what may be lost, and a size that did not pay is tried again after ever
longer pauses.

Nothing here reads a clock or draws a number: seconds come in.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshswarm.head.drafting import Draft, Source

WINDOWS = (0, 1, 2, 3, 5, 7, 11, 15)
"""Few sizes, so that each is measured often; with the row before them, whole multiples of 2 and 4 from 3 on."""
MAX_WINDOW = WINDOWS[-1]
ALLOWANCE = 0.01
"""Of the time. Half of the 2 % that are promised: what is known of a step's cost is an estimate."""
MARGIN = 1.03  # a window has to promise so much more speed than none, or its noise decides
PLAIN_TRIES = 2  # plain steps before anything is compared with them
REFRESH_STEPS = 96  # so often a plain step is measured again while windows pay
FIRST_PAUSE_STEPS = 32
FIRST_LISTENING_PAUSE_STEPS = 4
LONGEST_PAUSE_STEPS = 2048
MAX_ROUTES = 64
_SHORTEST_S = 1e-6
"""No step takes less, whatever a coarse clock says: what one takes is divided by."""
_COST_WEIGHT = 0.2  # of a new measurement; more while there are few
_STALE_WEIGHT = 0.5
_OUTLIER = 4.0  # times what is usual
_CHEAPEST_ROW = 0.03  # of a plain step: what a further row costs at least, as far as hope goes
_CLASSES = {Source.TEXT: (2, 3, 4, 6, 9, 13, 19, 27, 40), Source.MODEL: (0, 1, 2, 4, 8)}
"""Guesses that are alike: from the text by the length of their match, from a model by their place in the draft."""
_FIRST_CHANCES = {
    Source.TEXT: (0.15, 0.25, 0.4, 0.55, 0.65, 0.7, 0.8, 0.85, 0.9),
    Source.MODEL: (0.6, 0.6, 0.6, 0.6, 0.6),
}
"""Of a guess to come true, by class, before any was seen."""
_FIRST_TRIALS = 3.0  # what those beliefs weigh
_MEMORY_TRIALS = 40.0  # older trials than about so many are forgotten


class Outlook(NamedTuple):
    """What may come of a window: the tokens to expect, those of the guesses that come true before the first that does
    not and the one that every step gives; and the chance that some guess is rejected."""

    window: int
    tokens: float
    rejection: float


class Acceptance:
    """How often guesses from one source come true.

    `match`, of a guess from the text: how many tokens before it are the same at the place it was copied from. A guess
    further on in a draft has a longer one: it is only asked about when those before it came true. For a model's guesses
    it is the place in the draft.
    """

    def __init__(self, source: Source) -> None:
        classes = _CLASSES[source]
        self._class_of = [max(0, bisect_right(classes, match) - 1) for match in range(classes[-1] + 1)]
        self._chances = list(_FIRST_CHANCES[source])
        self._trials = [_FIRST_TRIALS] * len(self._chances)

    def chance(self, match: int) -> float:
        return self._chances[self._class(match)]

    def saw(self, match: int, came_true: bool) -> None:
        at = self._class(match)
        self._trials[at] = min(self._trials[at] + 1, _MEMORY_TRIALS)
        self._chances[at] += (came_true - self._chances[at]) / self._trials[at]

    def outlooks(self, match: int, limit: int) -> Iterator[Outlook]:
        """What steps with a window of each size up to `limit` give, the smallest first."""
        tokens, reach, ahead = 1.0, 1.0, 0
        for window in WINDOWS[1:]:
            if window > limit:
                return
            while ahead < window:
                reach *= self.chance(match + ahead)
                tokens += reach
                ahead += 1
            yield Outlook(window, tokens, 1 - reach)

    def _class(self, match: int) -> int:
        return self._class_of[min(match, len(self._class_of) - 1)]


@dataclass(slots=True)
class _Cost:
    """What steps of one size take. `tried_at`: the step count when last measured; `pause`: until it may be tried again
    although it did not pay."""

    seconds: float = 0.0
    n: int = 0
    tried_at: int = 0
    pause: int = FIRST_PAUSE_STEPS

    def measured(self, seconds: float, step: int) -> None:
        if self.n == 0:
            self.seconds = seconds
        else:
            weight = _STALE_WEIGHT if self.is_stale(step) else max(_COST_WEIGHT, 1 / (self.n + 1))
            self.seconds += weight * (seconds - self.seconds)
        self.n += 1
        self.tried_at = step

    def is_stale(self, step: int) -> bool:
        return step - self.tried_at > self.pause


@dataclass(slots=True)
class Learned:
    """What is known of one route, kept from answer to answer: seconds per step by window size, and how often guesses
    come true."""

    acceptance: dict[Source, Acceptance] = field(default_factory=lambda: {each: Acceptance(each) for each in Source})
    costs: dict[int, _Cost] = field(default_factory=lambda: {window: _Cost() for window in WINDOWS})
    rollback_s: float = 0.0
    """How much longer a step takes that first has to undo rejected rows, where that needs computing."""
    drafting_s: float | None = None
    """What a model needs for each token of a draft and for reading the one before; None before any draft of one."""
    listen_at: int = 0
    listen_pause: int = FIRST_LISTENING_PAUSE_STEPS
    steps: int = 0
    last_plain: int = 0
    lost_s: float = 0.0
    """By speculation, beyond the allowance for the time since. What one answer saved is no licence to lose it in the
    next: never below 0."""


class Choice(NamedTuple):
    """A window to send, and the tokens a second to expect from it; 0 guesses where nothing pays."""

    window: int
    rate: float


NOTHING = Choice(0, 0.0)


class _Offer(NamedTuple):
    """What a size promises: so many tokens, for `beside_s` seconds beside its step."""

    window: int
    tokens: float
    beside_s: float


class LearnedRoutes:
    """What is learned, by route; the routes used longest ago are forgotten."""

    def __init__(self) -> None:
        self._routes: OrderedDict[Hashable, Learned] = OrderedDict()

    def on(self, route: Hashable) -> Learned:
        """What is known of `route`, to be used and added to."""
        learned = self._routes.setdefault(route, Learned())
        self._routes.move_to_end(route)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)
        return learned


class WindowChooser:
    """Decides for one answer, with what is learned on its route. `undoing_costs`: whether the route computes rows again
    to undo rejected ones (families with a recurrent state)."""

    def __init__(self, learned: Learned, *, undoing_costs: bool = False) -> None:
        self._learned = learned
        self._undoing_costs = undoing_costs
        self._must_undo = False  # the next step undoes rejected rows of the last one
        self._credit_s = 0.0  # what this answer saved, or was allowed and did not use; at most one lost window's worth

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step without guesses; None while too few were seen."""
        plain = self._learned.costs[0]
        return plain.seconds if plain.n >= PLAIN_TRIES else None

    def choose(self, source: Source, match: int, limit: int) -> Choice:
        """How many tokens of a draft from `source` to send, at most `limit`."""
        learned, plain_s = self._learned, self.plain_s
        if plain_s is None or learned.steps - learned.last_plain >= REFRESH_STEPS:
            return NOTHING
        if source is Source.MODEL and learned.drafting_s is None:
            return NOTHING
        offers = [
            _Offer(outlook.window, outlook.tokens, self._beside_s(source, outlook))
            for outlook in learned.acceptance[source].outlooks(match, limit)
        ]
        best = Choice(0, MARGIN / plain_s)
        for offer in offers:
            cost = learned.costs[offer.window]
            if cost.n and (rate := offer.tokens / (cost.seconds + offer.beside_s)) > best.rate:
                best = Choice(offer.window, rate)
        if not self._must_undo and (tried := self._worth_a_try(offers, best)):
            return tried
        return best if best.window and self._can_lose(0.0) else NOTHING

    def _worth_a_try(self, offers: list[_Offer], best: Choice) -> Choice | None:
        """The smallest size whose cost is not known, or not any more, that could be better than the best known one and
        would lose little enough at worst."""
        learned, below = self._learned, 0
        plain_s = learned.costs[0].seconds
        for offer in offers:
            cost = learned.costs[offer.window]
            if offer.window != best.window and (not cost.n or cost.is_stale(learned.steps)):
                base_s, more = learned.costs[below].seconds, offer.window - below
                at_best = base_s + _CHEAPEST_ROW * plain_s * more + offer.beside_s
                # A row costs no more in a window than in a step of its own.
                at_worst = max(base_s + plain_s * more, cost.seconds) + offer.beside_s
                if offer.tokens / at_best > best.rate and self._can_lose(at_worst - offer.tokens * plain_s):
                    return Choice(offer.window, offer.tokens / at_best)
            if not cost.n:
                return None
            below = offer.window
        return None

    def _beside_s(self, source: Source, outlook: Outlook) -> float:
        """What a window takes beside its own step: making the draft, and undoing what is rejected."""
        undoing_s = self._learned.rollback_s * outlook.rejection
        if source is Source.TEXT:
            return undoing_s
        return undoing_s + (self._learned.drafting_s or 0.0) * (outlook.window + 1)

    def _can_lose(self, seconds: float) -> bool:
        return self._learned.lost_s + max(0.0, seconds) <= self._learned.costs[0].seconds + self._credit_s

    def stepped(self, window: int, seconds: float, n_tokens: int, *, drafting_s: float = 0.0) -> None:
        """A step with `window` guesses, which took `drafting_s` to make, took `seconds` and gave `n_tokens` tokens."""
        learned = self._learned
        learned.steps += 1
        cost = learned.costs[window]
        seconds = min(max(seconds, _SHORTEST_S), self._longest_s(window))  # one stalled step says little about the next
        undid, self._must_undo = self._must_undo, self._undoing_costs and n_tokens <= window
        if undid and cost.n:
            learned.rollback_s += _COST_WEIGHT * (max(0.0, seconds - cost.seconds) - learned.rollback_s)
        elif not undid:
            was_stale = cost.is_stale(learned.steps)
            cost.measured(seconds, learned.steps)
            self._note_trial(window, cost, was_stale, n_tokens)
        if window == 0:
            learned.last_plain = learned.steps
        lost_s = seconds - n_tokens * learned.costs[0].seconds if window or undid else 0.0
        self._book(lost_s + drafting_s - ALLOWANCE * seconds)

    def _longest_s(self, window: int) -> float:
        """What is believed of a step of this size: some times what is usual, or at first what so many steps take. A
        first try that stalls would otherwise be paid off over hundreds of steps."""
        cost, plain_s = self._learned.costs[window], self.plain_s
        if cost.n:
            return _OUTLIER * cost.seconds
        return math.inf if plain_s is None else (window + 1) * plain_s

    def _book(self, lost_s: float) -> None:
        learned = self._learned
        balance_s = learned.lost_s + lost_s - self._credit_s
        learned.lost_s = max(0.0, balance_s)
        self._credit_s = min(max(0.0, -balance_s), MAX_WINDOW * learned.costs[0].seconds)

    def _note_trial(self, window: int, cost: _Cost, was_stale: bool, n_tokens: int) -> None:
        """A size that pays is no longer paused; one that did not when tried again waits twice as long."""
        plain_s = self.plain_s
        if window == 0 or plain_s is None:
            return
        if n_tokens * plain_s > cost.seconds:
            cost.pause = FIRST_PAUSE_STEPS
        elif was_stale or cost.n == 1:
            cost.pause = min(2 * cost.pause, LONGEST_PAUSE_STEPS)

    def judge(self, draft: Draft, said: Sequence[int]) -> None:
        """Compare a draft, sent or not, with the tokens that were said."""
        acceptance = self._learned.acceptance[draft.source]
        for ahead, (guess, token) in enumerate(zip(draft.tokens, said, strict=False)):
            acceptance.saw(draft.match + ahead, guess == token)
            if guess != token:
                return

    # -- a model's drafts

    def drafted(self, seconds: float, n_tokens: int) -> None:
        """A model took `seconds` for a draft of `n_tokens`."""
        learned, each_s = self._learned, seconds / (n_tokens + 1)
        known_s = learned.drafting_s
        if known_s is None:
            learned.drafting_s = each_s
        else:
            learned.drafting_s = known_s + _COST_WEIGHT * (min(each_s, _OUTLIER * known_s) - known_s)

    def wants_to_listen(self) -> bool:
        """Whether a model should make a draft that is not sent, only compared: ever more rarely while none is worth
        sending."""
        learned = self._learned
        if learned.steps < learned.listen_at:
            return False
        learned.listen_pause = min(2 * learned.listen_pause, LONGEST_PAUSE_STEPS)
        learned.listen_at = learned.steps + learned.listen_pause
        return True

    def model_pays(self) -> None:
        """A model's draft was worth sending: it has been heard, and is soon again should that change."""
        learned = self._learned
        learned.listen_pause = FIRST_LISTENING_PAUSE_STEPS
        learned.listen_at = learned.steps + learned.listen_pause
