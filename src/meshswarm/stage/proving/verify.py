"""Proving a model file on this machine: that its parts compute what the whole does, and what narrower rows cost.

The rule this file keeps: both sides compute the same chunks of the same tokens, so that in F32 every bit must agree;
what a wire dtype changes is then the dtype's doing alone, and is judged by what the model's own arithmetic changes when
the same rows are computed in other company. What was not tried is not proved.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters
from meshswarm.artifacts.gguf.probe import probe
from meshswarm.artifacts.gguf.split import part_paths
from meshswarm.artifacts.merkle import model_id_text
from meshswarm.errors import ConfigError
from meshswarm.span import Span
from meshswarm.stage.engine.engine import MAX_OUTPUTS, SpanEngine
from meshswarm.stage.engine.llama import numclass
from meshswarm.stage.engine.llama_options import DEFAULT_OPTIONS, LlamaOptions
from meshswarm.stage.families.cuts import LegalCuts, legal_cuts
from meshswarm.stage.families.proofs import PROVED_BUILDS, CutProof, Proofs
from meshswarm.stage.families.table import FAMILIES
from meshswarm.stage.proving.span_chain import Chunk, SpanChain
from meshswarm.stage.proving.talk import TAIL, Known, first_difference, hold_talks, prompt_lengths, proved_context
from meshswarm.stage.proving.wire_proofs import Divergence, DtypeResult, Thresholds, WireProof
from meshswarm.stage.sessions.messages import Dtype
from meshswarm.stage.sessions.rows_codec import F16_MAX, RowsDoNotFitError
from meshswarm.stage.sizes.memory import Load, MemoryModel
from meshswarm.stage.slices.slicing import write_slice

MAX_SPANS = 6
MAX_TRIED_SPANS = 12
BUDGET_S = 1200.0
"""On a build that is not proved, cuts are tried for about so long, in one chain of up to `MAX_TRIED_SPANS` spans and in
all their unions."""
CHUNK_ROWS = 32
WIDE_ROWS = 96
"""Of a prompt, so many tokens are computed; and for the model's noise so many at a time, by the flash attention that
llama.cpp's CPU back-end has for 64 rows and more: by other kernels than `CHUNK_ROWS` in any case."""
N_ANSWER = 8
"""Tokens that the whole model continues each prompt with, one at a time, as an answer does."""
Say = Callable[[str], None]
Chain = tuple[Span, ...]
_THRESHOLDS = Thresholds()


class SplitDiffersError(ConfigError):
    """The parts of this file do not compute what the whole does: it must be served whole. `refusal`: as a clause."""

    def __init__(self, refusal: str, build: str) -> None:
        super().__init__(f"{refusal}; it is served whole here from now on: please report this with the build {build}")
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Material:
    """What is verified: the file at `path` with its checked header, under its id. `prompts`: token ids."""

    path: Path
    header: GgufHeader
    model_id: bytes
    prompts: Sequence[Sequence[int]]

    @property
    def n_layers(self) -> int:
        return check_hyperparameters(self.header).n_layers

    def long_prompt(self, n_tokens: int) -> list[int]:
        """All prompts behind each other, again and again."""
        return list(itertools.islice(itertools.cycle(itertools.chain(*self.prompts)), n_tokens))


@dataclass(frozen=True, slots=True)
class Verified:
    """What was proved: where the model may be cut, and how its rows may travel."""

    cuts: CutProof
    wire: WireProof


@dataclass(frozen=True, slots=True)
class _Whole:
    """What the whole model computed. `conversations`: one a prompt, for the wire dtypes; `talks`: for bits alone;
    `noise`: how far it is from itself; `talks_s`: how long the talks took."""

    conversations: list[list[Known]]
    talks: list[list[Known]]
    noise: Divergence
    talks_s: float


def chosen_chains(cuts: LegalCuts, n_spans: int) -> list[Chain]:
    """About equal legal spans behind each other, as many as there may be and not more than `n_spans`; then chains with
    which every union of neighbouring ones passes at least once."""
    starts = list(cuts.starts[1:])
    if n_spans < len(cuts.starts):
        wanted = [cuts.n_layers * part / n_spans for part in range(1, n_spans)]
        starts = sorted({min(starts, key=lambda start: (abs(start - at), start)) for at in wanted})
    edges = (0, *starts, cuts.n_layers)
    return _chains(edges)


def _chains(edges: Sequence[int]) -> list[Chain]:
    first, last = edges[0], edges[-1]
    chains = [_chain(edges)]
    left = {Span(*ends) for ends in itertools.combinations(edges, 2)} - {*chains[0], Span(first, last)}
    while left:
        # Those in the middle first: what is before and behind them passes along.
        span = min(left, key=lambda span: (span.start == first or span.stop == last, span.start, span.stop))
        chains.append(_chain(sorted({first, span.start, span.stop, last})))
        left -= set(chains[-1])
    return chains


def _chain(edges: Sequence[int]) -> Chain:
    return tuple(Span(start, stop) for start, stop in itertools.pairwise(edges))


def affordable_spans(n_starts: int, whole_s: float, budget_s: float) -> int:
    """Of how many spans all unions can be tried in about `budget_s`, where the whole model takes `whole_s`."""
    n_spans = 2
    while n_spans < min(n_starts, MAX_TRIED_SPANS) and len(_chains(range(n_spans + 2))) * whole_s <= budget_s:
        n_spans += 1
    return n_spans


async def verify(
    material: Material,
    *,
    folder: Path,
    n_threads: int = 1,
    available_bytes: int | None = None,
    budget_s: float = BUDGET_S,
    say: Say | None = None,
) -> Verified:
    """Compute the prompts whole and in parts, in every dtype. Slices are written to `folder` and removed again.

    Raises SplitDiffersError when one bit of the parts' F32 logits is not the whole's, ConfigError for a model that is
    not split, or that takes more than `available_bytes`.
    """
    # What is to be proved is taken as proved here: on a new build nothing could be cut otherwise.
    proofs = Proofs.trial()
    cuts = legal_cuts(material.header, proofs)
    if cuts.refusal is not None or len(cuts.starts) < 2:
        raise ConfigError(f"there is nothing to verify: {cuts.sentence}")
    n_prompt = _fitting_prompt(material, proofs, available_bytes)
    bench = _Bench(material, n_prompt + TAIL, n_threads, folder, proofs)
    tell = say or (lambda _: None)
    tell(f"computing {len(material.prompts)} prompts and a talk of {n_prompt} tokens with the whole model")
    whole = await _whole(bench, n_prompt)
    is_proved = proofs.build in PROVED_BUILDS
    attentions = _attentions(material.header)
    whole_s = whole.talks_s * len(attentions)
    n_spans = MAX_SPANS if is_proved else affordable_spans(len(cuts.starts), whole_s, budget_s)
    chains = chosen_chains(cuts, n_spans)
    finest = chains[0]
    tell("cutting it into " + ", ".join(map(str, finest)))
    async with await bench.parts(finest) as chain:
        tell("computing the prompts with the parts, in f32")
        await _check(chain, [*whole.talks, *whole.conversations], proofs.build)
        results = []
        for dtype in (Dtype.F16, Dtype.Q8):
            tell(f"computing the prompts with the parts, in {dtype}")
            results.append(await _judge(chain, whole.conversations, dtype, whole.noise))
    if not is_proved:
        for options in attentions:
            await _check_all(replace(bench, options=options), n_prompt, chains, tell)
    wire = WireProof(
        model_id_text(material.model_id),
        proofs.build,
        chain.numclass,
        tuple(map(str, finest)),
        sum(len(known.chunk.tokens) for talk in whole.conversations for known in talk),
        chain.largest,
        whole.noise,
        tuple(results),
    )
    starts = tuple(span.start for span in finest)
    return Verified(CutProof(numclass(), starts, proved_context(material.header, n_prompt)), wire)


def _attentions(header: GgufHeader) -> tuple[LlamaOptions, ...]:
    """Both ways in which engines with the default options may compute attention, as memory allows."""
    family = FAMILIES[check_hyperparameters(header).architecture]
    ways = (True,) if family.needs_flash_attention else (False, True)
    return tuple(replace(DEFAULT_OPTIONS, flash_attn=is_on) for is_on in ways)


async def _check_all(bench: _Bench, n_prompt: int, chains: Sequence[Chain], tell: Say) -> None:
    async with await bench.whole() as whole:
        talks = await hold_talks(whole, bench.material.long_prompt(n_prompt))
    for spans in chains:
        tell("computing the talk with the parts " + ", ".join(map(str, spans)))
        async with await bench.parts(spans) as chain:
            await _check(chain, talks, bench.proofs.build)


def _fitting_prompt(material: Material, proofs: Proofs, available_bytes: int | None) -> int:
    """The longest prompt of the talk that there is memory for. Raises ConfigError when there is for none."""
    lengths = prompt_lengths(material.header)
    if available_bytes is None:
        return lengths[0]
    for n_prompt in lengths:
        model = MemoryModel(material.header, Load(n_prompt + TAIL, 1), proofs=proofs)
        needed = model.span(model.whole).total
        if needed <= available_bytes:
            return n_prompt
    raise ConfigError(
        f"verifying takes the whole model into memory, {needed / 1e9:.1f} GB, and {available_bytes / 1e9:.1f} GB "
        "are free here; its rows go over the wire in f32"
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """Loads the model, whole and in parts. `n_ctx`: positions of a session."""

    material: Material
    n_ctx: int
    n_threads: int
    folder: Path
    proofs: Proofs
    options: LlamaOptions = DEFAULT_OPTIONS

    async def whole(self) -> SpanChain:
        span = Span(0, self.material.n_layers)
        await asyncio.to_thread(probe, self.material.path)
        engine = await asyncio.to_thread(self._engine, self.material.path, span)
        return SpanChain([engine], [span])

    async def parts(self, spans: Chain) -> SpanChain:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="verify-") as slices:
            engines = [await asyncio.to_thread(self._part, Path(slices), span) for span in spans]
        return SpanChain(engines, spans)

    def _part(self, folder: Path, span: Span) -> SpanEngine:
        path = folder / f"{span.start}-{span.stop}.gguf"
        write_slice(part_paths(self.material.path), self.material.header, span, path, proofs=self.proofs)
        probe(path)
        return self._engine(path, span)

    def _engine(self, path: Path, span: Span) -> SpanEngine:
        return SpanEngine.load(
            path,
            span,
            self.material.n_layers,
            n_ctx=self.n_ctx,
            n_slots=1,
            n_threads=self.n_threads,
            max_rows=WIDE_ROWS,
            llama_options=self.options,
        )


async def _whole(bench: _Bench, n_prompt: int) -> _Whole:
    async with await bench.whole() as chain:
        conversations = [await _converse(chain, prompt[:WIDE_ROWS]) for prompt in bench.material.prompts]
        begun = time.monotonic()
        talks = await hold_talks(chain, bench.material.long_prompt(n_prompt))
        talks_s = time.monotonic() - begun
    async with await replace(bench, options=replace(DEFAULT_OPTIONS, flash_attn=True)).whole() as chain:
        noise = await _divergence(chain, [_widened(known) for known in conversations], Dtype.F32)
    return _Whole(conversations, talks, noise, talks_s)


async def _converse(chain: SpanChain, prompt: Sequence[int]) -> list[Known]:
    """The prompt's chunks, and the tokens that the model went on with."""
    talk: list[Known] = []
    with chain.session():
        for start in range(0, len(prompt), CHUNK_ROWS):
            chunk = Chunk(start, np.array(prompt[start : start + CHUNK_ROWS], np.int32))
            talk.append(Known(chunk, await chain.logits(chunk)))
        for position in range(len(prompt), len(prompt) + N_ANSWER):
            chunk = Chunk(position, talk[-1].logits[-1:].argmax(axis=1).astype(np.int32))
            talk.append(Known(chunk, await chain.logits(chunk)))
    return talk


def _widened(talk: Sequence[Known]) -> list[Known]:
    """The same tokens, the prompt's all at a time; logits of as many as an engine gives at a time."""
    prompt = talk[:-N_ANSWER]
    tokens = np.concatenate([known.chunk.tokens for known in prompt])
    logits = np.concatenate([known.logits for known in prompt])
    return [Known(Chunk(0, tokens), logits[-MAX_OUTPUTS:]), *talk[-N_ANSWER:]]


async def _check(chain: SpanChain, talks: Sequence[Sequence[Known]], build: str) -> None:
    for talk in talks:
        difference = await first_difference(chain, talk)
        if difference is not None:
            raise SplitDiffersError(
                f"the parts {', '.join(map(str, difference.spans))} of this model do not compute what the whole does: "
                f"at position {difference.position} a logit differs by {difference.size:g}",
                build,
            )


async def _judge(
    chain: SpanChain, conversations: Sequence[Sequence[Known]], dtype: Dtype, noise: Divergence
) -> DtypeResult:
    try:
        divergence = await _divergence(chain, conversations, dtype)
    except RowsDoNotFitError as error:
        return DtypeResult(dtype, None, str(error))
    return DtypeResult(dtype, divergence, obstacle(dtype, divergence, noise, chain.largest))


async def _divergence(chain: SpanChain, conversations: Sequence[Sequence[Known]], dtype: Dtype) -> Divergence:
    """How far the logits of rows that go over the wire in `dtype` are from those known."""
    divergences: list[NDArray[np.float64]] = []
    agreements: list[NDArray[np.bool_]] = []
    for talk in conversations:
        with chain.session():
            for known in talk:
                logits = await chain.logits(known.chunk, dtype)
                divergences.append(kl_divergence(known.logits, logits))
                agreements.append(logits.argmax(axis=1) == known.logits.argmax(axis=1))
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
