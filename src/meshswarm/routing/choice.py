"""Which layers a peer serves, decided from the model's header and the memory there is, before anything is written.

The rule this file keeps: what was asked for is done or refused, and a refusal says what would fit. Where nobody asked
for certain layers, a peer takes what fits, with everything resident; layers that somebody asked for, or a model that
cannot be cut, may also push other programs' file pages out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshswarm.errors import OutOfMemoryError
from meshswarm.routing.placement import choose_span
from meshswarm.span import Span
from meshswarm.stage.engine.kv_layers import CELLS_STEP
from meshswarm.stage.engine.memory import Room, at_most, in_words, sessions_in_words
from meshswarm.stage.sizes.memory import PROCESS_BYTES, MemoryModel


@dataclass(frozen=True, slots=True)
class Limits:
    """What a span may take: `room` of this machine, and with the program around it `allowed` bytes (None: no limit but
    the machine's). `gpu_bytes`: free on GPUs, which compute whole models only. `is_mapped`: weights stay in their file,
    and the system may drop and read them again."""

    room: Room
    allowed: int | None = None
    gpu_bytes: int = 0
    is_mapped: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """The layers to serve, with sessions of `n_ctx` positions. `notice`: why they are not all, empty where that was
    asked for or goes without saying."""

    span: Span
    n_ctx: int
    notice: str = ""


def choose(
    model: MemoryModel,
    asked: Span | None,
    limits: Limits,
    held: Sequence[Span],
    name: str,
    levels: Sequence[int] | None = None,
) -> Choice:
    """The layers `asked` for, or the whole model when it fits, or those that do and are needed most. `held`: the spans
    other peers serve; `levels`: what each layer can do already, where that is known. Raises OutOfMemoryError for layers
    that do not fit, and when none do."""
    return _Chooser(model, limits, held, name, levels).choose(asked)


def has_room(model: MemoryModel, span: Span, limits: Limits, *, taken: int, beside: bool) -> bool:
    """Whether `span` can be loaded by a program whose layers take `taken` bytes now: `beside` those, or instead."""
    needed, free = model.span(span).total, limits.room.free
    if beside:
        return needed - PROCESS_BYTES <= free and (limits.allowed is None or needed + taken <= limits.allowed)
    return needed - PROCESS_BYTES <= free + taken and (limits.allowed is None or needed <= limits.allowed)


class _Chooser:
    def __init__(
        self, model: MemoryModel, limits: Limits, held: Sequence[Span], name: str, levels: Sequence[int] | None
    ) -> None:
        self._model = model
        n_ctx = model.load.n_ctx
        self._parts = model.under(replace(model.load, n_ctx=min(n_ctx, model.cuts.max_ctx or n_ctx)))
        self._limits = limits
        self._held = held
        self._levels = levels
        self._name = name

    def choose(self, asked: Span | None) -> Choice:
        whole = self._model.whole
        if asked is not None:
            return self._asked(asked)
        if self._is_resident(self._model, whole):
            return Choice(whole, self._of(whole).load.n_ctx)
        if self._model.cuts.refusal is not None:
            return self._asked(whole)
        span = self._best_part()
        if span is None:
            raise OutOfMemoryError(self._refusal(min(self._model.smallest_spans, key=self._bytes), self._is_resident))
        notice = f"{self._takes(whole)}: serving the layers {span}, which fit" if self._limits.allowed is None else ""
        return Choice(span, self._of(span).load.n_ctx, notice)

    def _asked(self, span: Span) -> Choice:
        # Layers that may not be cut out are let through: cutting them says why.
        if (span == self._model.whole or self._model.cuts.allow(span)) and not self._fits(self._of(span), span):
            raise OutOfMemoryError(self._refusal(span, self._fits))
        return Choice(span, self._of(span).load.n_ctx)

    def _of(self, span: Span) -> MemoryModel:
        return self._model if span == self._model.whole else self._parts

    def _bytes(self, span: Span) -> int:
        return self._of(span).span(span).total

    def _room(self, span: Span) -> Room:
        room, gpu_bytes = self._limits.room, self._limits.gpu_bytes if span == self._model.whole else 0
        return Room(room.free + gpu_bytes, room.total + gpu_bytes)

    def _fits(self, model: MemoryModel, span: Span) -> bool:
        memory, allowed = model.span(span), self._limits.allowed
        mapped = memory.weights if self._limits.is_mapped else 0
        if allowed is not None and memory.total > allowed:
            return False
        # What is only estimated is not refused: the engine asks llama.cpp itself before it loads.
        return self._room(span).holds(memory.total - PROCESS_BYTES, mapped) or not model.is_exact

    def _is_resident(self, model: MemoryModel, span: Span) -> bool:
        """Whether all of it has room without pushing anything out."""
        return model.span(span).total <= self._least_of(self._room(span).free)

    def _least_of(self, n_bytes: int) -> int:
        return n_bytes if self._limits.allowed is None else min(n_bytes, self._limits.allowed)

    def _best_part(self) -> Span | None:
        return choose_span(self._parts, self._least_of(self._limits.room.free), self._held, self._levels)

    # -- in words

    def _takes(self, span: Span) -> str:
        """What a span takes, and that it is too much."""
        model, limits = self._of(span), self._limits
        load = model.load
        subject = self._name if span == self._model.whole else f"the layers {span} of {self._name}"
        verb = "takes" if span == self._model.whole else "take"
        with_load = f"with {sessions_in_words(load.n_sessions)} of {load.n_ctx} positions"
        if limits.allowed is not None and self._bytes(span) > limits.allowed:
            limit = f"more than the {in_words(limits.allowed)} allowed"
        else:
            limit = f"and {in_words(limits.room.free)} are free"
        return f"{subject} {verb} {in_words(self._bytes(span))} {with_load}, {limit}"

    def _refusal(self, span: Span, fits: Callable[[MemoryModel, Span], bool]) -> str:
        """What `span` takes, and what would fit instead, by the rule that it did not."""
        load = self._of(span).load

        def does_fit(n_sessions: int, n_ctx: int) -> bool:
            return fits(self._model.under(replace(load, n_sessions=n_sessions, n_ctx=n_ctx)), span)

        n_sessions, n_ctx = at_most(does_fit, load.n_sessions, load.n_ctx)
        options = [f"--sessions {n_sessions}"] if n_sessions else []
        options += [f"--ctx {n_ctx}"] if n_ctx else []
        part = self._best_part() if self._model.cuts.refusal is None else None
        fitting = [f"the layers {part} would fit"] if part is not None and part != span else []
        them = "it" if span == self._model.whole else "these" if fitting else "they"
        fitting += [f"{them} would fit with {' or '.join(options)}"] if options else []
        return f"{self._takes(span)}; {', or '.join(fitting) or self._least()}"

    def _least(self) -> str:
        """What the smallest part of the model takes at least."""
        least = self._model.under(replace(self._model.load, n_sessions=1, n_ctx=CELLS_STEP - 1))
        spans = [self._model.whole] if self._model.cuts.refusal is not None else self._model.smallest_spans
        smallest = min(spans, key=lambda span: least.span(span).total)
        what = "all of it" if smallest == self._model.whole else f"the layers {smallest}"
        return f"at least {in_words(least.span(smallest).total)} are needed, for {what} and one short session"
