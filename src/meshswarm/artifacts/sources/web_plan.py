"""Which pieces to ask an HTTP server for next, and when to have done with it.

The rule this file keeps: a server is used for what it gives and no longer. Wrong bytes, silence and refusals each
have a limit, and what a torrent's peers have brought meanwhile is not asked for again. No sockets and no clock here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from meshswarm.artifacts.sources.pace import Retries
from meshswarm.artifacts.torrent.content import Content


@dataclass(frozen=True, slots=True)
class WebLimits:
    """`max_bytes`: of one request, though never less than a piece. `max_lies`: pieces that failed their hash. A request
    may take `grace_s`, and a second more for every `min_bytes_s` of it."""

    max_in_flight: int = 4
    max_bytes: int = 8 << 20
    max_lies: int = 3
    grace_s: float = 20.0
    min_bytes_s: int = 16 << 10
    max_failures: int = 4
    first_wait_s: float = 0.5
    longest_asked_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """The pieces [first, stop), and how long they may take."""

    first: int
    stop: int
    deadline_s: float


class WebPlan:
    """What is known of one server. `dropped`: why it is not used any more."""

    def __init__(self, content: Content, accepts_ranges: bool, limits: WebLimits, rng: random.Random) -> None:
        self._content = content
        self.accepts_ranges = accepts_ranges
        self._limits = limits
        self._rng = rng
        self._retries = Retries(
            max_at_first=limits.max_failures,
            max_in_a_row=limits.max_failures,
            first_wait_s=limits.first_wait_s,
            longest_asked_s=limits.longest_asked_s,
        )
        self._in_flight: set[Request] = set()
        self._bad: set[int] = set()
        self._resume_at = 0.0
        self.dropped: str | None = None

    def next(self, wanted: Sequence[int], now: float) -> Request | None:
        """What to ask for now, of the pieces still `wanted`, the most urgent first; None: nothing now, see `wait_s`.
        Neighbours are asked for together."""
        if self.dropped is not None or now < self._resume_at or len(self._in_flight) >= self._limits.max_in_flight:
            return None
        if not self.accepts_ranges:
            return self._whole_file(wanted)
        taken = {index for request in self._in_flight for index in range(request.first, request.stop)} | self._bad
        first = next((index for index in wanted if index not in taken), None)
        if first is None:
            if not self._in_flight and wanted:
                self.dropped = "it gave wrong bytes for all that is still wanted"
            return None
        missing = set(wanted) - taken
        most = max(1, self._limits.max_bytes // self._content.piece_length)
        stop = first + 1
        while stop in missing and stop - first < most:
            stop += 1
        return self._begin(first, stop)

    def _whole_file(self, wanted: Sequence[int]) -> Request | None:
        """A server without ranges is of use for those alone who want everything from its start."""
        if self._in_flight:
            return None
        if len(set(wanted)) < self._content.n_pieces:
            self.dropped = "it does not give parts of a file, only all of it"
            return None
        return self._begin(0, self._content.n_pieces)

    def _begin(self, first: int, stop: int) -> Request:
        n_bytes = self._content.piece_range(stop - 1).stop - self._content.piece_range(first).start
        request = Request(first, stop, self._limits.grace_s + n_bytes / self._limits.min_bytes_s)
        self._in_flight.add(request)
        return request

    def wait_s(self, now: float) -> float:
        """How long `next` will say nothing in any case."""
        return max(0.0, self._resume_at - now)

    def took(self, index: int, is_good: bool) -> None:
        """A piece came, and was what it should be or was not."""
        if is_good:
            self._retries.progressed()
            return
        self._bad.add(index)
        if len(self._bad) >= self._limits.max_lies:
            self.dropped = f"it gave wrong bytes for {len(self._bad)} pieces: its file is another one, or it lies"

    def ended(self, request: Request) -> None:
        """All that was wanted of it came."""
        self._in_flight.discard(request)

    def failed(self, request: Request, why: str, now: float, *, may_pass: bool, asked_s: float | None = None) -> None:
        """It ended early. `asked_s`: the server wants to be left alone for so long."""
        self._in_flight.discard(request)
        if self.dropped is not None:
            return
        wait_s = self._retries.wait_s(asked_s, self._rng) if may_pass and self.accepts_ranges else None
        if wait_s is None:
            self.dropped = why
        else:
            self._resume_at = max(self._resume_at, now + wait_s)
