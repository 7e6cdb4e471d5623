"""How fast rows travel between the spans of a route, learned from the prompts that went over it.

The rule this file keeps: what a prompt took beyond what its spans say they compute is the links', in equal parts. A
head sees nothing else of a link between two other peers. Spans that were busy with others make links look slow, and
nothing makes them look fast: so the fastest of the last few prompts counts.

Sans-IO: seconds are passed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from meshswarm.routing.prompt_time import Pace, prompt_s, with_links

MEMORY = 4
"""Prompts after which a link that became slower is believed to be."""
_PRECISION = 0.01
_NOTHING = 1e-4  # of all that a link could take at most: less is none, and is not searched for


class LinkSpeed:
    """Of one route. `byte_s`: seconds that a byte of rows takes from one span to the next, 0 while nothing says so."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=MEMORY)

    @property
    def byte_s(self) -> float:
        return min(self._seen, default=0.0)

    def note(self, seconds: float, n_rows: int, size: int, route: Sequence[Pace], row_bytes: int) -> None:
        """A prompt of `n_rows` in steps of `size` took so long, from its first step to its result. Nothing is learned
        where not every span has said how fast it is."""
        if len(route) < 2 or not all(pace.row_s for pace in route):
            return
        self._seen.append(_row_s(seconds, n_rows, size, route) / row_bytes)


def _row_s(seconds: float, n_rows: int, size: int, route: Sequence[Pace]) -> float:
    """How long a row takes over each link if the whole prompt took `seconds`."""

    def took(row_s: float) -> float:
        return prompt_s(n_rows, size, with_links(route, row_s))

    high = seconds / n_rows  # a link alone would take as long
    least = _NOTHING * high
    # A link that is there takes a frame's time, however fast: from none to the fastest there is a leap.
    if took(least) >= seconds:
        return 0.0
    low = least
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if took(middle) < seconds else (low, middle)
    return low
