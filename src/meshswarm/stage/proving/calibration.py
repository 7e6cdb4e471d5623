"""How far honest computations of the same rows are apart: what audits judge differences by.

The rule this file keeps: all ways compute the same rows from the same input, and differ only as honest machines may: by
how many rows they compute at a time, and by flash attention. From 64 rows on llama.cpp's CPU back-end takes other
kernels than for one, which stands for other machines' arithmetic. The figures are those of this very file on this
machine; equal seeds take equal texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshswarm.artifacts.gguf.check import check_hyperparameters
from meshswarm.artifacts.gguf.probe import probe
from meshswarm.artifacts.gguf.split import part_paths
from meshswarm.artifacts.manifests.facts import PARTS_PER_BILLION, Calibration
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.engine import Job, SpanEngine
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.cuts import LegalCuts, legal_cuts
from meshswarm.stage.families.family import Family
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving.verify import Material
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sessions.rows_codec import RowsDoNotFitError, over_the_wire
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.slices.slicing import write_slice

DEPTHS = (1, 2, 5, 10, 20, 40, 80)
N_POSITIONS = 256
LEAST_POSITIONS = 96
"""Enough for one pass to be computed by the kernels for many rows."""
BUDGET_S = 300.0
"""About how long the rows that are computed one by one may take. A slow machine takes fewer positions, then depths."""
SEED = 1
_TRIED_POSITIONS = 8
_INPUT_ROWS = 32
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Layers [start, stop), of which each exit is a depth. `rows` float32 [n, row_width] enter, None for a first span;
    `tokens` int32 [n] are those of the rows."""

    span: Span
    tokens: NDArray[np.int32]
    rows: Rows | None


def stage_spans(cuts: LegalCuts) -> tuple[Span, ...]:
    """Where depths are measured: from the first layer that a span may start at behind the model's first, and from one
    about in the middle; each as far as a span without the output head goes. From layer 0 where nothing can be cut."""
    starts = [start for start in cuts.starts if start < cuts.n_layers - 1]
    if len(starts) < 2:
        return (Span(0, cuts.n_layers),)
    middle = min(starts[1:], key=lambda start: (abs(start - cuts.n_layers / 2), start))
    spans = []
    for start in sorted({starts[1], middle}):
        last = cuts.starts[-1]
        spans.append(Span(start, last if last > start + 1 else cuts.n_layers))
    return tuple(spans)


def affordable(
    depths: Sequence[int], n_runs: int, layer_position_s: float, budget_s: float
) -> tuple[tuple[int, ...], int]:
    """Of `depths`, those that can be measured `n_runs` times each in about `budget_s`, and on how many positions."""
    kept = list(depths)
    while True:
        a_position_s = sum(kept) * n_runs * layer_position_s
        n_positions = N_POSITIONS if a_position_s <= 0 else int(budget_s / a_position_s)
        if n_positions >= LEAST_POSITIONS or len(kept) == 1:
            return tuple(kept), min(N_POSITIONS, max(LEAST_POSITIONS, n_positions))
        kept.pop()


async def calibrate(
    material: Material,
    encoding: str,
    *,
    folder: Path,
    n_threads: int = 1,
    available_bytes: int | None = None,
    budget_s: float = BUDGET_S,
    seed: int = SEED,
    say: Callable[[str], None] | None = None,
) -> tuple[Calibration, ...]:
    """Compute a text through parts of the model in every way and tell how far apart the ways are, by depth and pair of
    numclasses. `encoding`: how most of its weights are stored. Slices are written to `folder` and removed again.

    Raises ConfigError for an architecture that is not known here, or what takes more than `available_bytes`.
    """
    tell = say or (lambda _: None)
    family = FAMILIES.get(check_hyperparameters(material.header).architecture)
    if family is None or material.n_layers < 2:
        raise ConfigError("there is nothing to calibrate: rows cannot be read within this model")
    ways = tuple(replace(DEFAULT_OPTIONS, flash_attn=is_on) for is_on in _attentions(family))
    spans = stage_spans(legal_cuts(material.header))
    tokens = _text(material, seed)
    widest: dict[tuple[int, str, str], _Widest] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="calibrate-") as slices:
        bench = _Bench(material, Path(slices), n_threads, available_bytes)
        for span in spans:
            stage = _Stage(span, tokens, await bench.input_of(span, tokens))
            deepest = min(len(span), material.n_layers - 1 - span.start)
            pace_s = await bench.layer_position_s(stage)
            depths, n_positions = affordable(
                [depth for depth in DEPTHS if depth <= deepest], len(ways) * len(spans), pace_s, budget_s
            )
            n_positions = min(n_positions, len(tokens))
            tell(f"computing {n_positions} positions through up to {depths[-1]} of the layers {span}, one by one")
            outcomes: dict[int, dict[tuple[str, int], Rows]] = {depth: {} for depth in depths}
            for options in ways:
                await bench.compute(stage, options, n_positions, outcomes)
            for depth, computed in outcomes.items():
                for pair, errors in _pairs(computed):
                    widest.setdefault((depth, *pair), _Widest()).add(errors)
    return tuple(
        Calibration(depth, encoding, one, other, found.n, _ppb(found.h50), _ppb(found.h99))
        for (depth, one, other), found in sorted(widest.items(), key=lambda each: each[0])
    )


def _attentions(family: Family) -> tuple[bool, ...]:
    return (True,) if family.needs_flash_attention else (False, True)


def position_errors(rows: Rows, others: Rows) -> NDArray[np.float64]:
    """|row - other| / |other| of each position but the first: float64 [n - 1]."""
    ours, theirs = rows[1:].astype(np.float64), others[1:].astype(np.float64)
    lengths = np.linalg.norm(theirs, axis=1)
    errors: NDArray[np.float64] = np.linalg.norm(ours - theirs, axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    if not np.isfinite(errors).all():
        raise ConfigError("there is nothing to calibrate: this model computes numbers that are not finite")
    return errors


def _pairs(computed: Mapping[tuple[str, int], Rows]) -> Iterator[tuple[tuple[str, str], NDArray[np.float64]]]:
    """The errors between each two ways, with their numclasses. `computed`: by numclass and rows at a time."""
    for (one, rows), (other, others) in itertools.combinations(sorted(computed.items(), key=lambda each: each[0]), 2):
        yield (one[0], other[0]), position_errors(rows, others)


class _Widest:
    """Honest machines may differ as far as the widest of all comparisons. `n`: positions compared."""

    def __init__(self) -> None:
        self.h50 = self.h99 = 0.0
        self.n = 0

    def add(self, errors: NDArray[np.float64]) -> None:
        self.h50 = max(self.h50, float(np.median(errors)))
        self.h99 = max(self.h99, float(np.quantile(errors, 0.99)))
        self.n += len(errors)


def _ppb(share: float) -> int:
    return round(share * PARTS_PER_BILLION)


def _text(material: Material, seed: int) -> NDArray[np.int32]:
    """The prompts behind each other in an order that the seed decides, again and again."""
    order = np.random.default_rng(seed).permutation(len(material.prompts))
    tokens = itertools.cycle(itertools.chain.from_iterable(material.prompts[index] for index in order))
    longest = min(N_POSITIONS, check_hyperparameters(material.header).n_ctx_train)
    return np.array(list(itertools.islice(tokens, longest)), np.int32)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Loads parts of the model, cut into `folder`."""

    material: Material
    folder: Path
    n_threads: int
    available_bytes: int | None

    async def input_of(self, span: Span, tokens: NDArray[np.int32]) -> Rows | None:
        """What enters the span, as the wire would bring it: in halves where they fit."""
        if span.start == 0:
            return None
        before = Span(0, span.start)
        async with self._engine(before, DEFAULT_OPTIONS, len(tokens)) as engine:
            rows = await _run(engine, _Stage(before, tokens, None), span.start, len(tokens), _INPUT_ROWS)
        try:
            return over_the_wire(rows, Dtype.F16)
        except RowsDoNotFitError:
            return rows

    async def layer_position_s(self, stage: _Stage) -> float:
        """Seconds that a row takes in a layer, alone."""
        n_positions = min(_TRIED_POSITIONS, len(stage.tokens))
        async with self._engine(stage.span, DEFAULT_OPTIONS, len(stage.tokens)) as engine:
            exit_layer = stage.span.start + 1
            await _run(engine, stage, exit_layer, 1, 1)  # touches the weights
            began = time.perf_counter()
            await _run(engine, stage, exit_layer, n_positions, 1)
            return (time.perf_counter() - began) / n_positions

    async def compute(
        self,
        stage: _Stage,
        options: LlamaOptions,
        n_positions: int,
        outcomes: Mapping[int, dict[tuple[str, int], Rows]],
    ) -> None:
        """Add, for each depth, the rows that leave the stage when they are computed one by one and all at once."""
        async with self._engine(stage.span, options, len(stage.tokens)) as engine:
            for depth, computed in outcomes.items():
                for n_rows in (1, n_positions):
                    exit_layer = stage.span.start + depth
                    computed[engine.numclass, n_rows] = await _run(engine, stage, exit_layer, n_positions, n_rows)

    @contextlib.asynccontextmanager
    async def _engine(self, span: Span, options: LlamaOptions, n_ctx: int) -> AsyncIterator[SpanEngine]:
        engine = await asyncio.to_thread(self._load, span, options, n_ctx)
        engine.start(asyncio.get_running_loop())
        try:
            yield engine
        finally:
            await engine.stop()

    def _load(self, span: Span, options: LlamaOptions, n_ctx: int) -> SpanEngine:
        needed = MemoryModel(self.material.header, Load(n_ctx, 1)).span(span).total
        if self.available_bytes is not None and needed > self.available_bytes:
            raise ConfigError(
                f"calibrating takes the layers {span} into memory, {needed / 1e9:.1f} GB, and "
                f"{self.available_bytes / 1e9:.1f} GB are free here"
            )
        return SpanEngine.load(
            self._path(span),
            span,
            self.material.n_layers,
            n_ctx=n_ctx,
            n_slots=1,
            n_threads=self.n_threads,
            max_rows=max(2, n_ctx),
            llama_options=options,
        )

    def _path(self, span: Span) -> Path:
        """The span's file, cut and tried in a child process at its first use."""
        is_whole = len(span) == self.material.n_layers
        path = self.material.path if is_whole else self.folder / f"{span.start}-{span.stop}.gguf"
        if is_whole or not path.exists():
            if not is_whole:
                write_slice(part_paths(self.material.path), self.material.header, span, path)
            probe(path)
        return path


async def _run(engine: SpanEngine, stage: _Stage, exit_layer: int, n_positions: int, n_rows: int) -> Rows:
    """Rows float32 [n_positions, row_width] that leave before `exit_layer`, computed `n_rows` at a time."""
    slot = engine.acquire_slot()
    assert slot is not None
    parts = []
    try:
        for start in range(0, n_positions, n_rows):
            stop = min(start + n_rows, n_positions)
            job = Job(
                slot=slot,
                pos0=start,
                truncate_to=None,
                tokens=stage.tokens[start:stop] if stage.rows is None or engine.needs_tokens else None,
                hidden=None if stage.rows is None else stage.rows[start:stop],
                stop_layer=exit_layer,
                outputs=(),
                top_k=1,
                temperature=0.0,
                profile=Profile.FAST,
            )
            result = await engine.run(job)
            assert result.hidden is not None
            parts.append(result.hidden.copy())
    finally:
        engine.release_slot(slot)
    return np.concatenate(parts)
