"""Which layers a peer should take: the first, simple rule.

The rule: take the whole model when it fits, otherwise the legal span that fewest others hold. Demand, speeds and
moving later are placement's next chapter.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshswarm.span import Span
from meshswarm.stage.memory import MemoryModel
from meshswarm.stage.memory_plan import longest_span


def choose_span(model: MemoryModel, memory_bytes: int, held: Iterable[Span]) -> Span | None:
    """The span of `model` to serve within `memory_bytes`, this program included.

    `held`: the spans other peers serve. Of the legal spans that fit and could not be longer, the one whose layers have
    the fewest holders on average wins, then the first. Length does not count beyond that: a model's first span and its
    last, which carry more than their layers, would never be taken. None when not even the smallest legal span fits.
    """
    holders = [0] * model.n_layers
    for span in held:
        for layer in range(span.start, min(span.stop, model.n_layers)):
            holders[layer] += 1
    windows: list[Span] = []
    for start in model.cuts.starts:
        window = longest_span(model, start, memory_bytes)
        if window is not None and not (windows and window.stop <= windows[-1].stop):  # not part of a longer one
            windows.append(window)
    return min(
        windows,
        key=lambda window: (sum(holders[window.start : window.stop]) / len(window), window.start),
        default=None,
    )
