"""Which layers a peer should take: the first, simple rule.

The rule: take the whole model when it fits, otherwise a legal span of the layers that fewest others hold. Demand,
speeds and moving later are placement's next chapter.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshswarm.span import Span
from meshswarm.stage.sizes.memory import MemoryModel
from meshswarm.stage.sizes.plan import longest_span


def choose_span(model: MemoryModel, memory_bytes: int, held: Iterable[Span]) -> Span | None:
    """The span of `model` to serve within `memory_bytes`, this program included.

    `held`: the spans other peers serve. A part has the first of the layers with the fewest holders, so that peers who
    come one after the other tile the model; of the legal spans that do and fit, the one with most of the rarest layers
    wins, then the one whose layers have the fewest holders, then the first. None when not even the smallest legal span
    fits.
    """
    if model.span(model.whole).total <= memory_bytes:
        return model.whole
    holders = [0] * model.n_layers
    for span in held:
        for layer in range(span.start, min(span.stop, model.n_layers)):
            holders[layer] += 1
    longest = [longest_span(model, start, memory_bytes) for start in model.cuts.starts]
    windows = [window for window in longest if window is not None]
    for rarest in sorted(range(model.n_layers), key=lambda layer: (holders[layer], layer)):
        having = [window for window in windows if rarest in window]
        if having:
            return min(having, key=lambda window: _rank(holders[window.start : window.stop], holders[rarest]))
    return None


def _rank(holders: list[int], fewest: int) -> tuple[int, float]:
    """How good a span is whose layers have these holders: the lower, the better."""
    return -sum(n <= fewest for n in holders), sum(holders) / len(holders)
