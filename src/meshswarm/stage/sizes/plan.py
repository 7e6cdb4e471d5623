"""Which machines could hold a model together, and what would have to change where they cannot.

The rule this file keeps: a plan uses legal spans only and counts everything a span takes. It says what fits, not what
is fast: routes are planned by measured speed, elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.span import Span
from meshswarm.stage.engine.kv_layers import CELLS_STEP
from meshswarm.stage.engine.memory import in_words
from meshswarm.stage.families.proofs import Proofs
from meshswarm.stage.sizes.memory import Load, MemoryModel, SpanMemory

MAX_CHOICES = 256
"""Choices of peers that are followed further, after each peer: all there are, up to eight peers of different sizes."""


@dataclass(frozen=True, slots=True)
class PeerSpan:
    """`peer` counts from 0, in the order the peers were given; it has `room` bytes."""

    peer: int
    room: int
    span: Span
    memory: SpanMemory


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`spans`, from the first layer to the last, or `refusal`: why there are none, and what would fit."""

    spans: tuple[PeerSpan, ...]
    refusal: str | None = None


def plan_memory(header: GgufHeader, rooms: Sequence[int], load: Load, *, proofs: Proofs | None = None) -> MemoryPlan:
    """Spans for peers that may use `rooms[i]` bytes each; the fewest peers that can hold the model."""
    model = MemoryModel(header, load, proofs=proofs)
    spans = _fill(model, rooms)
    if spans is not None:
        return MemoryPlan(spans)
    return MemoryPlan((), _why_not(model, rooms))


def longest_span(model: MemoryModel, start: int, room: int) -> Span | None:
    """The longest legal span from `start` that fits into `room` bytes."""
    if model.cuts.refusal is not None:
        return model.whole if start == 0 and model.span(model.whole).total <= room else None
    stops = [*(at for at in model.cuts.starts if at > start), model.n_layers]
    # The last span carries the output head, and short spans may take more zero layers: longer is not always more.
    for stop in reversed(stops):
        span = Span(start, stop)
        if model.span(span).total <= room:
            return span
    return None


def _fill(model: MemoryModel, rooms: Sequence[int]) -> tuple[PeerSpan, ...] | None:
    """The fewest peers that reach the last layer.

    Whoever reaches further with the same peers leaves less to the others, and peers of one size are alike: so for each
    number of peers of each size only the furthest reach is kept, instead of every order of every choice.
    """
    limit = model.cuts.max_ctx
    is_split = limit is None or model.load.n_ctx <= limit
    sizes = sorted(set(rooms), reverse=True)
    of_size = {size: [peer for peer, room in enumerate(rooms) if room == size] for size in sizes}
    reaches: dict[tuple[int, ...], tuple[PeerSpan, ...]] = {(0,) * len(sizes): ()}
    for _ in rooms:
        further: dict[tuple[int, ...], tuple[PeerSpan, ...]] = {}
        for used, spans in reaches.items():
            start = spans[-1].span.stop if spans else 0
            for at, size in enumerate(sizes):
                if used[at] == len(of_size[size]):
                    continue
                span = longest_span(model, start, size)
                if span is None or not (is_split or span == model.whole):
                    continue
                longer = (*spans, PeerSpan(of_size[size][used[at]], size, span, model.span(span)))
                if span.stop == model.n_layers:
                    return longer
                now = (*used[:at], used[at] + 1, *used[at + 1 :])
                if now not in further or further[now][-1].span.stop < span.stop:
                    further[now] = longer
        best = sorted(further.items(), key=lambda reach: -reach[1][-1].span.stop)
        reaches = dict(best[:MAX_CHOICES])
    return None


def _why_not(model: MemoryModel, rooms: Sequence[int]) -> str:
    load, have = model.load, _listed(rooms)
    asked = f"{_sessions(load.n_sessions)} of {load.n_ctx} positions"
    smaller = _smaller_load(model, rooms)
    if smaller is not None:
        return (
            f"peers of {have} cannot hold this model with {asked}; they could with {_sessions(smaller.n_sessions)} "
            f"of {smaller.n_ctx} positions"
        )
    if model.cuts.refusal is not None:
        needed = _least(model, model.whole)
        return (
            f"{model.cuts.refusal}; one peer needs {in_words(needed)} for it, with one session of {CELLS_STEP - 1} "
            f"positions, and these have {have}"
        )
    largest = max(model.smallest_spans, key=lambda span: _least(model, span))
    needed = _least(model, largest)
    if max(rooms, default=0) < needed:
        return (
            f"peers of {have} cannot hold this model: its layers {largest} alone, which cannot be cut further, take "
            f"{in_words(needed)} with one session of {CELLS_STEP - 1} positions"
        )
    whole = _least(model, model.whole)
    return (
        f"peers of {have} cannot hold this model, not even for one session of {CELLS_STEP - 1} positions: it takes "
        f"{in_words(whole)} and more, the more peers share it"
    )


def _smaller_load(model: MemoryModel, rooms: Sequence[int]) -> Load | None:
    """The most that fits: first fewer sessions, then shorter ones."""
    for n_sessions in _halved(model.load.n_sessions):
        smaller = replace(model.load, n_sessions=n_sessions)
        if _fits(model, smaller, rooms):
            return smaller
    shortest = replace(model.load, n_sessions=1, n_ctx=CELLS_STEP - 1)
    if model.load.n_ctx < shortest.n_ctx or not _fits(model, shortest, rooms):
        return None
    low, high = 1, -(-model.load.n_ctx // CELLS_STEP)  # in steps of cells: low fits, high does not
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        if _fits(model, replace(shortest, n_ctx=middle * CELLS_STEP - 1), rooms):
            low = middle
        else:
            high = middle
    return replace(shortest, n_ctx=low * CELLS_STEP - 1)


def _halved(n_sessions: int) -> list[int]:
    counts = []
    while n_sessions > 1:
        n_sessions //= 2
        counts.append(n_sessions)
    return counts


def _fits(model: MemoryModel, load: Load, rooms: Sequence[int]) -> bool:
    return _fill(model.under(load), rooms) is not None


def _least(model: MemoryModel, span: Span) -> int:
    """Bytes of a span with the smallest load there is."""
    smallest = replace(model.load, n_sessions=1, n_ctx=CELLS_STEP - 1)
    return model.under(smallest).span(span).total


def _listed(rooms: Sequence[int]) -> str:
    counts = Counter(rooms)
    return ", ".join(f"{f'{n} x ' if n > 1 else ''}{in_words(room)}" for room, n in counts.items())


def _sessions(n: int) -> str:
    return "one session" if n == 1 else f"{n} sessions"
