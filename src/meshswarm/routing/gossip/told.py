"""What several peers say together of who holds a model: enough to list it, or to know where looking is worth it.

The rule this file keeps: one opinion is none, and of several the lower middle counts for each layer, so of two the one
that claims less, and of three no liar alone. A route is never made of it: that takes the table's records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from meshswarm.routing.gossip.summary import Summary
from meshswarm.span import Span, missing_layers

MIN_AUTHORS = 2


@dataclass(frozen=True, slots=True)
class Told:
    """`holders`: how many hold each layer. `n_peers`: how many hold any. The weakest layer can compute `tokens_per_s`,
    all its holders together. `requests_per_s`: how often the model is asked for."""

    model_id: bytes
    holders: tuple[int, ...]
    n_peers: int
    tokens_per_s: float
    requests_per_s: float
    n_authors: int

    @property
    def n_layers(self) -> int:
        return len(self.holders)

    @property
    def covered(self) -> tuple[Span, ...]:
        """The layers that somebody holds, merged and in order."""
        return missing_layers(self.missing, self.n_layers)

    @property
    def missing(self) -> tuple[Span, ...]:
        held = [Span(layer, layer + 1) for layer, count in enumerate(self.holders) if count]
        return missing_layers(held, self.n_layers)

    @property
    def is_whole(self) -> bool:
        return all(self.holders)


def together(summaries: Sequence[Summary], n_layers: int) -> Told | None:
    """What these say of one model of `n_layers`; None when fewer than two speak of that many."""
    fitting = [summary for summary in summaries if summary.n_layers == n_layers]
    if len({summary.author for summary in fitting}) < MIN_AUTHORS:
        return None
    return Told(
        model_id=fitting[0].model_id,
        holders=tuple(median_low(counts) for counts in zip(*(each.holders() for each in fitting), strict=True)),
        n_peers=median_low(each.n_peers for each in fitting),
        tokens_per_s=median_low(each.tokens_per_s for each in fitting),
        requests_per_s=median_low(each.requests_per_s for each in fitting),
        n_authors=len(fitting),
    )
