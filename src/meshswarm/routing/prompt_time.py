"""How long a prompt takes over a route, and the steps that are fastest: spans and links as stages of one pipe.

With S spans and n steps, the last span ends after n + S - 1 turns instead of n * S, so small steps overlap best; but
every step costs a span one more reading of its weights, and the transport one more frame. A link is a stage as a span
is: while it carries one step, its ends compute others. The rule this file keeps: the size that the measured speeds of
this very route make fastest, in whole multiples of 16 rows, which llama.cpp's kernels are built for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshswarm.dht.records import CoverageRecord
from meshswarm.routing.cost import layer_us
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile
from meshswarm.stage.sessions.messages import MAX_ROWS_PER_STEP

MIN_CHUNK_ROWS = 32
CHUNK_MULTIPLE = 16
FRAME_S = 1e-3  # one more frame through the transport and to an engine's thread and back


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a span works on a prompt: `row_s` for each row of a step, `step_s` for each step whatever its size (it
    reads all its weights once, as for a single row)."""

    row_s: float
    step_s: float

    def turn_s(self, n_rows: int) -> float:
        """How long a step of so many rows occupies the span."""
        return self.step_s + n_rows * self.row_s + FRAME_S


def pace(record: CoverageRecord, n_layers: int, measured_us: float | None = None) -> Pace:
    """How fast the peer says it is, or by how much slower a lone row turned out to be there (`measured_us` a layer). A
    step reads all weights once, which is about what a lone row costs."""
    slower = 1.0 if measured_us is None else measured_us / record.us_per_layer
    row_us = record.prefill_us_per_row_layer * slower
    return Pace(row_us * n_layers / 1e6, layer_us(record, 1, measured_us) * n_layers / 1e6)


def max_chunk_rows(profile: Profile) -> int:
    """The largest step any session of this profile sends."""
    return EXACT_MAX_ROWS if profile is Profile.EXACT else MAX_ROWS_PER_STEP


def prompt_s(n_rows: int, size: int, route: Sequence[Pace]) -> float:
    """How long `n_rows` take through the whole route in steps of `size`: the first one fills the pipe, the others
    follow at the pace of the slowest span before them, and the last one may be shorter."""
    n_full, rest = divmod(n_rows, size)
    filled = slowest = last = 0.0
    for pace in route:
        turn = pace.turn_s(size)
        slowest = max(slowest, turn)
        filled += turn
        free = filled + (n_full - 1) * slowest if n_full else 0.0
        last = max(last, free) + (pace.turn_s(rest) if rest else 0.0)
    return last


def with_links(route: Sequence[Pace], row_s: float) -> list[Pace]:
    """The route with its links, over each of which a row takes `row_s`: they work at the same time as the spans do. A
    link that takes no time is none."""
    if not row_s:
        return list(route)
    link = Pace(row_s, 0.0)
    return [stage for pace in route for stage in (link, pace)][1:]


def chunk_rows(n_rows: int, route: Sequence[Pace], profile: Profile) -> int:
    """Rows per step for a prompt of `n_rows`, over a `route` of spans and links. An unmeasured route, or one of a
    single span, where nothing overlaps, gets the largest."""
    top = max_chunk_rows(profile)
    if n_rows <= MIN_CHUNK_ROWS or len(route) < 2:
        return top
    sizes = range(MIN_CHUNK_ROWS, top + 1, CHUNK_MULTIPLE)
    return min(reversed(sizes), key=lambda size: prompt_s(n_rows, size, route))
