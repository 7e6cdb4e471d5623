"""Which layers a peer should take: the first, simple rule.

The rule: take the whole model when it fits, otherwise the window of layers that fewest others hold. Demand, speeds and
moving later are placement's next chapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshswarm.span import Span


def choose_span(layer_bytes: Sequence[int], fixed_bytes: int, memory_bytes: int, held: Iterable[Span]) -> Span | None:
    """The span to serve of a model whose layer i costs `layer_bytes[i]` (weights and KV) within `memory_bytes`.

    `fixed_bytes` come on top of any span (buffers, embeddings). `held`: the spans other peers serve. Among the windows
    of the greatest length that fits, the one whose rarest layers have the fewest holders wins, then the first. None
    when not even one layer fits.
    """
    n_layers = len(layer_bytes)
    room = memory_bytes - fixed_bytes
    holders = [0] * n_layers
    for span in held:
        for layer in range(span.start, min(span.stop, n_layers)):
            holders[layer] += 1
    windows = [window for start in range(n_layers) if (window := _longest(layer_bytes, start, room)) is not None]
    if not windows:
        return None
    longest = max(len(window) for window in windows)
    return min(
        (window for window in windows if len(window) == longest),
        key=lambda window: (sum(holders[window.start : window.stop]), window.start),
    )


def _longest(layer_bytes: Sequence[int], start: int, room: int) -> Span | None:
    """The longest span from `start` that fits into `room` bytes."""
    stop, used = start, 0
    while stop < len(layer_bytes) and used + layer_bytes[stop] <= room:
        used += layer_bytes[stop]
        stop += 1
    return Span(start, stop) if stop > start else None
