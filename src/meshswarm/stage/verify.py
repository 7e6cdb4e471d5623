"""Proving a model file on this machine: that its parts compute what the whole does, and what narrower rows cost.

The rule this file keeps: both sides compute the same chunks of the same tokens, so that in F32 every bit must agree;
what a wire dtype changes is then the dtype's doing alone, and is judged by what the model's own arithmetic changes when
the same rows are computed in other company.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshswarm.artifacts.gguf import GgufHeader, check_hyperparameters
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.artifacts.probe import probe
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine import MAX_OUTPUTS, Job, SpanEngine
from meshswarm.stage.families.cuts import legal_cuts
from meshswarm.stage.families.proofs import Proofs, installed_build
from meshswarm.stage.memory import Load, MemoryModel
from meshswarm.stage.messages import Dtype
from meshswarm.stage.profile import Profile
from meshswarm.stage.rows_codec import F16_MAX, RowsDoNotFitError, over_the_wire
from meshswarm.stage.slicing import write_slice
from meshswarm.stage.wire_proofs import Divergence, DtypeResult, Thresholds, WireProof

MAX_SPANS = 6
CHUNK_ROWS = 32
WIDE_ROWS = 96
"""Of a prompt, so many tokens are computed; and for the model's noise so many at a time, which from 64 on makes
llama.cpp's CPU back-end take another attention kernel than for `CHUNK_ROWS`."""
N_ANSWER = 8
"""Tokens that the whole model continues each prompt with, one at a time, as an answer does."""
Say = Callable[[str], None]
_THRESHOLDS = Thresholds()


class SplitDiffersError(ConfigError):
    """The parts of this file do not compute what the whole does: it must be served whole."""


@dataclass(frozen=True, slots=True)
class Material:
    """What is verified: the file at `path` with its checked header, under its id. `prompts`: token ids."""

    path: Path
    header: GgufHeader
    model_id: bytes
    prompts: Sequence[Sequence[int]]

    @property
    def n_ctx(self) -> int:
        return WIDE_ROWS + N_ANSWER


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens that are computed together, and the whole model's logits of each: float32 [n, n_vocab]."""

    pos0: int
    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]


def chosen_spans(header: GgufHeader, proofs: Proofs | None = None) -> tuple[Span, ...]:
    """About equal legal spans, as many as there may be and not more than `MAX_SPANS`. Raises ConfigError for a model
    that is not split."""
    cuts = legal_cuts(header, proofs)
    if cuts.refusal is not None or len(cuts.starts) < 2:
        raise ConfigError(f"there is nothing to verify: {cuts.sentence}")
    n_spans = min(MAX_SPANS, len(cuts.starts))
    wanted = [cuts.n_layers * part / n_spans for part in range(1, n_spans)]
    starts = sorted({min(cuts.starts[1:], key=lambda start: (abs(start - at), start)) for at in wanted})
    return tuple(Span(start, stop) for start, stop in pairwise([0, *starts, cuts.n_layers]))


async def verify(
    material: Material, *, folder: Path, n_threads: int = 1, available_bytes: int | None = None, say: Say | None = None
) -> WireProof:
    """Compute the prompts whole and in parts, in every dtype. Slices are written to `folder` and removed again.

    Raises SplitDiffersError when one bit of the parts' F32 logits is not the whole's, ConfigError for a model that is
    not split, or that takes more than `available_bytes`.
    """
    architecture = check_hyperparameters(material.header).architecture
    # What is to be proved is taken as proved here: on a new build nothing could be cut otherwise.
    proofs = Proofs(installed_build(), frozenset({architecture}))
    spans = chosen_spans(material.header, proofs)
    _check_room(material, proofs, available_bytes)
    tell = say or (lambda _: None)
    tell(f"computing {len(material.prompts)} prompts with the whole model")
    conversations, noise = await _whole(material, n_threads)
    with tempfile.TemporaryDirectory(dir=folder, prefix="verify-") as slices:
        tell("cutting it into " + ", ".join(map(str, spans)))
        engines = await asyncio.to_thread(_load, material, spans, Path(slices), proofs, n_threads)
        async with _Chain(engines, spans) as chain:
            tell("computing the prompts with the parts, in f32")
            await _check_split(chain, conversations)
            results = []
            for dtype in (Dtype.F16, Dtype.Q8):
                tell(f"computing the prompts with the parts, in {dtype}")
                results.append(await _judge(chain, conversations, dtype, noise))
    return WireProof(
        model_id_text(material.model_id),
        installed_build(),
        engines[0].numclass,
        tuple(map(str, spans)),
        sum(len(chunk.tokens) for chunks in conversations for chunk in chunks),
        chain.largest,
        noise,
        tuple(results),
    )


def _check_room(material: Material, proofs: Proofs, available_bytes: int | None) -> None:
    model = MemoryModel(material.header, Load(material.n_ctx, 1), proofs=proofs)
    needed = model.span(model.whole).total
    if available_bytes is not None and needed > available_bytes:
        raise ConfigError(
            f"verifying takes the whole model into memory, {needed / 1e9:.1f} GB, and {available_bytes / 1e9:.1f} GB "
            "are free here; its rows go over the wire in f32"
        )


def _load(material: Material, spans: Sequence[Span], folder: Path, proofs: Proofs, n_threads: int) -> list[SpanEngine]:
    n_layers = check_hyperparameters(material.header).n_layers
    engines: list[SpanEngine] = []
    for span in spans:
        path = folder / f"{span.start}-{span.stop}.gguf"
        write_slice(material.path, material.header, span, path, proofs=proofs)
        probe(path)
        engines.append(_engine(path, span, n_layers, material.n_ctx, n_threads))
    return engines


def _engine(path: Path, span: Span, n_layers: int, n_ctx: int, n_threads: int) -> SpanEngine:
    return SpanEngine.load(path, span, n_layers, n_ctx=n_ctx, n_slots=1, n_threads=n_threads, max_rows=WIDE_ROWS)


async def _whole(material: Material, n_threads: int) -> tuple[list[list[_Chunk]], Divergence]:
    """Each prompt's chunks with the tokens that the model went on with, and how far it is from itself."""
    n_layers = check_hyperparameters(material.header).n_layers
    await asyncio.to_thread(probe, material.path)
    whole = Span(0, n_layers)
    engine = await asyncio.to_thread(_engine, material.path, whole, n_layers, material.n_ctx, n_threads)
    async with _Chain([engine], [whole]) as chain:
        conversations = [await _converse(chain, prompt[:WIDE_ROWS]) for prompt in material.prompts]
        return conversations, await _divergence(chain, [_widened(chunks) for chunks in conversations], Dtype.F32)


async def _converse(chain: _Chain, prompt: Sequence[int]) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    with chain.session():
        for start in range(0, len(prompt), CHUNK_ROWS):
            tokens = np.array(prompt[start : start + CHUNK_ROWS], np.int32)
            chunks.append(_Chunk(start, tokens, await chain.logits(start, tokens)))
        for position in range(len(prompt), len(prompt) + N_ANSWER):
            tokens = chunks[-1].logits[-1:].argmax(axis=1).astype(np.int32)
            chunks.append(_Chunk(position, tokens, await chain.logits(position, tokens)))
    return chunks


def _widened(chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """The same tokens, the prompt's all at a time; logits of as many as an engine gives at a time."""
    prompt = chunks[:-N_ANSWER]
    tokens = np.concatenate([chunk.tokens for chunk in prompt])
    logits = np.concatenate([chunk.logits for chunk in prompt])
    return [_Chunk(0, tokens, logits[-MAX_OUTPUTS:]), *chunks[-N_ANSWER:]]


async def _check_split(chain: _Chain, conversations: Sequence[Sequence[_Chunk]]) -> None:
    for chunks in conversations:
        with chain.session():
            for chunk in chunks:
                logits = await chain.logits(chunk.pos0, chunk.tokens)
                if not np.array_equal(logits, chunk.logits):
                    difference = float(np.abs(logits - chunk.logits).max())
                    raise SplitDiffersError(
                        f"the parts {', '.join(map(str, chain.spans))} of this model do not compute what the whole "
                        f"does: at position {chunk.pos0} a logit differs by {difference:g}; serve it whole, and report "
                        f"this with the build {installed_build()}"
                    )


async def _judge(
    chain: _Chain, conversations: Sequence[Sequence[_Chunk]], dtype: Dtype, noise: Divergence
) -> DtypeResult:
    try:
        divergence = await _divergence(chain, conversations, dtype)
    except RowsDoNotFitError as error:
        return DtypeResult(dtype, None, str(error))
    return DtypeResult(dtype, divergence, obstacle(dtype, divergence, noise, chain.largest))


async def _divergence(chain: _Chain, conversations: Sequence[Sequence[_Chunk]], dtype: Dtype) -> Divergence:
    """How far the logits of rows that go over the wire in `dtype` are from those in the chunks."""
    divergences: list[NDArray[np.float64]] = []
    agreements: list[NDArray[np.bool_]] = []
    for chunks in conversations:
        with chain.session():
            for chunk in chunks:
                logits = await chain.logits(chunk.pos0, chunk.tokens, dtype)
                divergences.append(kl_divergence(chunk.logits, logits))
                agreements.append(logits.argmax(axis=1) == chunk.logits.argmax(axis=1))
    kl = np.concatenate(divergences)
    return Divergence(float(np.concatenate(agreements).mean()), float(kl.mean()), float(np.quantile(kl, 0.99)))


def obstacle(
    dtype: Dtype, found: Divergence, noise: Divergence, largest: float, thresholds: Thresholds = _THRESHOLDS
) -> str | None:
    """Why a dtype that diverges so far is not used; None when it is."""
    limit = thresholds.within(noise)
    if dtype is Dtype.F16 and largest * thresholds.f16_headroom > F16_MAX:
        return f"hidden states reach {largest:g}, too near the {F16_MAX:g} where {dtype} ends"
    if not found.agreement >= limit.agreement:
        return f"the best token is the same at {found.agreement:.1%} of the rows only, below {limit.agreement:.1%}"
    if not found.mean_kl <= limit.mean_kl:
        return f"the distributions diverge by {found.mean_kl:.2g} nats on average, above {limit.mean_kl:.2g}"
    if not found.p99_kl <= limit.p99_kl:
        return f"at one row in a hundred the distributions diverge by {found.p99_kl:.2g} nats, above {limit.p99_kl:.2g}"
    return None


def kl_divergence(logits: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float64]:
    """In nats, of the distributions that two sets of rows stand for: float64 [n] for logits [n, n_vocab]."""
    ours, theirs = _log_softmax(logits), _log_softmax(others)
    divergence: NDArray[np.float64] = (np.exp(ours) * (ours - theirs)).sum(axis=1)
    return divergence


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normalised


class _Chain:
    """Engines behind each other, started and stopped together.

    `largest`: the largest |x| that has left an engine for the next one.
    """

    def __init__(self, engines: Sequence[SpanEngine], spans: Sequence[Span]) -> None:
        self._engines = engines
        self.spans = spans
        self.largest = 0.0
        self._slots: list[int] = []

    async def __aenter__(self) -> Self:
        for engine in self._engines:
            engine.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines))

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """One session on all of them, at a time."""
        slots = [engine.acquire_slot() for engine in self._engines]
        self._slots = [slot for slot in slots if slot is not None]
        try:
            yield
        finally:
            for engine, slot in zip(self._engines, self._slots, strict=True):
                engine.release_slot(slot)

    async def logits(self, pos0: int, tokens: NDArray[np.int32], dtype: Dtype = Dtype.F32) -> NDArray[np.float32]:
        """The logits of the last `MAX_OUTPUTS` rows, float32 [n, n_vocab]; between engines rows take `dtype`."""
        hidden: NDArray[np.float32] | None = None
        outputs = tuple(range(max(0, len(tokens) - MAX_OUTPUTS), len(tokens)))
        last = self._engines[-1]
        for engine, span, slot in zip(self._engines, self.spans, self._slots, strict=True):
            job = Job(
                slot=slot,
                pos0=pos0,
                truncate_to=None,
                tokens=tokens if hidden is None or engine.needs_tokens else None,
                hidden=hidden,
                stop_layer=span.stop,
                outputs=outputs if engine is last else (),
                top_k=1,
                temperature=0.0,
                profile=Profile.FAST,
            )
            result = await engine.run(job)
            if result.hidden is not None:
                self.largest = max(self.largest, float(np.abs(result.hidden).max()))
                hidden = over_the_wire(result.hidden, dtype)
        return np.stack([last.full_row(self._slots[-1], row).copy() for row in range(len(outputs))])
