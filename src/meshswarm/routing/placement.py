"""Which layers a peer that comes should take: those that need it most, of the spans that fit.

The rule this file keeps: a newcomer takes the whole model when it fits, otherwise a legal span around the layer that
needs a holder most. Moving later is decided in `rebalance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshswarm.span import Span
from meshswarm.stage.sizes.memory import MemoryModel
from meshswarm.stage.sizes.plan import longest_span


def choose_span(
    model: MemoryModel, memory_bytes: int, held: Iterable[Span], levels: Sequence[int] | None = None
) -> Span | None:
    """The span of `model` to serve within `memory_bytes`, this program included.

    `held`: the spans other peers serve; `levels`, where they are known: what each layer can do, which counts instead.
    None when not even the smallest legal span fits.
    """
    if model.span(model.whole).total <= memory_bytes:
        return model.whole
    longest = [longest_span(model, start, memory_bytes) for start in model.cuts.starts]
    windows = [window for window in longest if window is not None]
    return neediest(windows, holders(held, model.n_layers) if levels is None else levels)


def holders(held: Iterable[Span], n_layers: int) -> list[int]:
    """How many of the spans `held` have each layer."""
    counts = [0] * n_layers
    for span in held:
        for layer in range(span.start, min(span.stop, n_layers)):
            counts[layer] += 1
    return counts


def neediest(windows: Sequence[Span], levels: Sequence[int]) -> Span | None:
    """The window that should be served next; `levels`: what is there for each layer, in any unit.

    It has the first of the weakest layers, so that peers who come one after the other tile the model; of the windows
    that have it the one with most of the weakest layers wins, then the one whose layers are weakest, then the first.
    """
    for weakest in sorted(range(len(levels)), key=lambda layer: (levels[layer], layer)):
        having = [window for window in windows if weakest in window]
        if having:
            return min(having, key=lambda window: _rank(levels[window.start : window.stop], levels[weakest]))
    return None


def _rank(levels: Sequence[int], weakest: int) -> tuple[int, float]:
    """How good a window is whose layers have these levels: the lower, the better."""
    return -sum(each <= weakest for each in levels), sum(levels) / len(levels)
