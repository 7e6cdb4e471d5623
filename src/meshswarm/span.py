"""A span: the half-open range of layers `[start, stop)` of one model, counted from 0."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LAYERS = 512


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Layers `start` up to, not including, `stop`. Raises ValueError for an empty or impossible range."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= MAX_LAYERS:
            raise ValueError(f"{self.start}:{self.stop} is not a range of layers: it must be A:B with 0 <= A < B")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    @classmethod
    def parse(cls, text: str) -> Span:
        """The span written as `A:B`. Raises ValueError with a sentence for a person."""
        match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text.strip())
        if match is None:
            raise ValueError(f"{text[:40]!r} is not a range of layers: write A:B, for example 0:10")
        return cls(int(match[1]), int(match[2]))


def missing_layers(spans: Iterable[Span], n_layers: int) -> tuple[Span, ...]:
    """The maximal ranges of `[0, n_layers)` that no span covers, in order."""
    gaps = []
    reached = 0
    for span in sorted(spans):
        if span.start > reached:
            gaps.append(Span(reached, min(span.start, n_layers)))
        reached = max(reached, span.stop)
        if reached >= n_layers:
            return tuple(gaps)
    if reached < n_layers:
        gaps.append(Span(reached, n_layers))
    return tuple(gaps)
