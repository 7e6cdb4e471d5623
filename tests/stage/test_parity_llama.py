"""Every feature the table lets a llama model have, cut everywhere: bit for bit what the unsplit model computes.

`test_parity` proves the cuts on one real model. Here are tiny random ones with what it lacks, and for each feature a
model without it, whose slice in one place of the chain must change the answer, or the comparison would prove nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from gguf import GGMLQuantizationType as Encoding
from numpy.typing import NDArray
from tests.stage.chain import Session, job, stop_all
from tests.stage.conftest import Cut
from tests.stage.llama_models import HEADS, KV_HEADS, N_LAYERS, N_VOCAB, TinyLlama
from tests.stage.unsplit import Unsplit

from meshswarm.span import Span
from meshswarm.stage.engine.engine import EngineInputError, SpanEngine
from meshswarm.stage.engine.profile import EXACT_ENCODINGS, EXACT_MAX_ROWS, EXACT_MIN_ROWS, Profile

N_CTX = 128
PROMPT = [(7 * n * n + 13 * n + 11) % N_VOCAB for n in range(70)]
SECOND_TURN = [(5 * n * n + 3 * n + 2) % N_VOCAB for n in range(13)]
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.attn_factor": 0.8,
    "rope.scaling.finetuned": True,
}
WHOLE_ARRAYS = {
    "attention.head_count": [HEADS] * N_LAYERS,
    "attention.head_count_kv": [KV_HEADS] * N_LAYERS,
    "feed_forward_length": [192] * N_LAYERS,
}
PLAIN = TinyLlama()
MOE = TinyLlama(n_experts=8, n_ff=64)
MOE_Q4_0 = replace(MOE, encoding=Encoding.Q4_0)
MOE_Q4_K = replace(MOE, encoding=Encoding.Q4_K, n_ff=256)
HEAD_KEYS = {"attention.key_length": 32, "attention.value_length": 32}
SMALL_HEADS = TinyLlama(head_size=32, keys=HEAD_KEYS)
AS_IN_Q4_K_M = {"ffn_down.weight": Encoding.Q6_K, "output.weight": Encoding.Q6_K}
OTHER_K_QUANTS = {
    "ffn_down.weight": Encoding.Q3_K,
    "ffn_up.weight": Encoding.Q2_K,
    "attn_k.weight": Encoding.IQ4_XS,
    "attn_q.weight": Encoding.IQ3_S,
    "attn_output.weight": Encoding.IQ3_XXS,
}
SMALL_BLOCKS = {
    "ffn_down.weight": Encoding.Q5_0,
    "ffn_up.weight": Encoding.IQ4_NL,
    "attn_k.weight": Encoding.MXFP4,
    "attn_q.weight": Encoding.TQ2_0,
    "attn_output.weight": Encoding.Q4_1,
}
Q4_K_MEDIUM = TinyLlama(encoding=Encoding.Q4_K, mixed=AS_IN_Q4_K_M)
MODELS: dict[str, tuple[TinyLlama, tuple[TinyLlama, ...]]] = {
    "untied output": (PLAIN, (replace(PLAIN, is_tied=True),)),
    "rope_freqs": (replace(PLAIN, rope_tensors=("rope_freqs.weight",)), (PLAIN,)),
    "linear rope": (replace(PLAIN, keys=LINEAR), (PLAIN, replace(PLAIN, keys=LINEAR | {"rope.scaling.factor": 8.0}))),
    "linear rope, old key": (replace(PLAIN, keys={"rope.scale_linear": 4.0}), (PLAIN,)),
    "yarn rope": (
        replace(PLAIN, keys=YARN),
        (
            PLAIN,
            replace(PLAIN, keys=YARN | {"rope.scaling.type": "linear"}),
            replace(PLAIN, keys=YARN | {"rope.scaling.original_context_length": 32}),
            replace(PLAIN, keys=YARN | {"rope.scaling.attn_factor": 1.0}),
        ),
    ),
    "rope scaling off": (
        replace(PLAIN, keys=LINEAR | {"rope.scaling.type": "none"}),
        (replace(PLAIN, keys=LINEAR),),
    ),
    "heads of their own size": (SMALL_HEADS, (replace(SMALL_HEADS, keys=HEAD_KEYS | {"rope.freq_base": 1e5}),)),
    "keys as arrays": (TinyLlama(keys=WHOLE_ARRAYS, n_ff=192), (TinyLlama(keys=LINEAR, n_ff=192),)),
    "biases": (replace(PLAIN, has_biases=True), (PLAIN,)),
    "fused qkv": (replace(PLAIN, has_fused_qkv=True), (PLAIN,)),
    "F16": (TinyLlama(encoding=Encoding.F16), (PLAIN,)),
    "BF16": (TinyLlama(encoding=Encoding.BF16), (PLAIN,)),
    "Q8_0": (TinyLlama(encoding=Encoding.Q8_0), (PLAIN,)),
    "Q4_0": (TinyLlama(encoding=Encoding.Q4_0), (TinyLlama(encoding=Encoding.Q4_1),)),
    "Q4_K and Q6_K": (Q4_K_MEDIUM, (replace(Q4_K_MEDIUM, mixed={}), TinyLlama(encoding=Encoding.Q5_K))),
    "Q5_K and others": (TinyLlama(encoding=Encoding.Q5_K, mixed=OTHER_K_QUANTS), (TinyLlama(encoding=Encoding.Q5_K),)),
    "Q5_1 and others": (TinyLlama(encoding=Encoding.Q5_1, mixed=SMALL_BLOCKS), (TinyLlama(encoding=Encoding.Q5_1),)),
    "experts": (MOE, (replace(MOE, swapped_experts=True), replace(MOE, keys={"expert_used_count": 3}))),
    "experts in Q4_0": (MOE_Q4_0, (replace(MOE_Q4_0, swapped_experts=True),)),
    "experts in Q4_K": (MOE_Q4_K, (replace(MOE_Q4_K, swapped_experts=True),)),
}
CHAINS = [[Span(0, at), Span(at, N_LAYERS)] for at in range(1, N_LAYERS)]
SINGLES = [Span(at, at + 1) for at in range(N_LAYERS)]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("unmeasured")]


def chunks(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@dataclass(frozen=True)
class Step:
    """One chunk of a conversation: what goes in from `pos0` on, and the logits of all its rows."""

    pos0: int
    tokens: Sequence[int]
    logits: NDArray[np.float32]


class Oracle:
    """Conversations with the unsplit model, at the row counts `profile` computes."""

    def __init__(self, unsplit: Unsplit, profile: Profile) -> None:
        self._unsplit = unsplit
        self._profile = profile
        self.steps: list[Step] = []
        self.answer: list[int] = []

    def turn(self, prompt: Sequence[int], pos0: int, *, n_steps: int, size: int) -> None:
        """Forget what stands at `pos0` and after; a prompt in chunks of up to `size`, then greedy single steps."""
        for chunk in chunks(prompt, size):
            pos0 = self._step(chunk, pos0)
        for _ in range(n_steps):
            self.answer.append(int(self.steps[-1].logits[-1].argmax()))
            pos0 = self._step(self.answer[-1:], pos0)

    def _step(self, tokens: Sequence[int], pos0: int) -> int:
        n_dummies = max(0, EXACT_MIN_ROWS - len(tokens)) if self._profile is Profile.EXACT else 0
        computed = [*tokens, *[tokens[-1]] * n_dummies]
        self._unsplit.forget(pos0)
        logits = self._unsplit.rows(computed, pos0, range(len(computed)))[: len(tokens)]
        self.steps.append(Step(pos0, tokens, logits))
        return pos0 + len(tokens)


@dataclass(frozen=True)
class Served:
    """A model unsplit, and engines on spans of it."""

    path: Path
    impostors: list[Path]
    unsplit: Unsplit
    engines: dict[Span, SpanEngine]

    @property
    def profiles(self) -> list[Profile]:
        """Those in which this model is served."""
        has_exact = self.engines[SINGLES[1]].exact_obstacle is None
        return [Profile.FAST, Profile.EXACT] if has_exact else [Profile.FAST]

    def conversation(self, profile: Profile) -> Oracle:
        """Chunked prefill, greedy steps, and a second turn that takes back most of the first answer."""
        oracle = Oracle(self.unsplit, profile)
        oracle.turn(PROMPT, 0, n_steps=8, size=64 if profile is Profile.FAST else EXACT_MAX_ROWS)
        oracle.turn(SECOND_TURN, len(PROMPT) + 3, n_steps=6, size=9)
        return oracle

    def hops(self, spans: Sequence[Span]) -> list[tuple[SpanEngine, int]]:
        return [(self.engines[span], span.stop) for span in spans]


def start(path: Path, span: Span) -> SpanEngine:
    engine = SpanEngine.load(path, span, N_LAYERS, n_ctx=N_CTX, n_slots=1, n_threads=1)
    engine.start(asyncio.get_running_loop())
    return engine


@pytest.fixture(scope="module", params=MODELS.values(), ids=list(MODELS))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model, and the models that lack what it is about."""
    model, impostors = request.param
    folder = tmp_path_factory.mktemp("llama")
    paths = [impostor.write(folder / f"impostor-{index}.gguf") for index, impostor in enumerate(impostors)]
    return model.write(folder / "model.gguf"), paths


@pytest.fixture(scope="module")
def unsplit(written: tuple[Path, list[Path]]) -> Iterator[Unsplit]:
    model = Unsplit(written[0], N_CTX)
    yield model
    model.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(cut: Cut, written: tuple[Path, list[Path]], unsplit: Unsplit) -> AsyncIterator[Served]:
    spans = {span for spans in [*CHAINS, SINGLES] for span in spans}
    engines = {span: start(cut(written[0], span), span) for span in spans}
    yield Served(*written, unsplit, engines)
    await stop_all(list(engines.values()))


async def test_every_chain_computes_the_unsplit_models_bits(served: Served) -> None:
    for profile in served.profiles:
        oracle = served.conversation(profile)
        assert len(set(oracle.answer)) > 6, "it repeats itself, so it proves little"
        for spans in [*CHAINS, SINGLES]:
            with Session(served.hops(spans), profile) as session:
                for step in oracle.steps:
                    truncate_to = step.pos0 if step.pos0 < session.n_held else None
                    rows = await session.rows(step.tokens, range(len(step.tokens)), truncate_to=truncate_to)
                    where = f"{profile}, through {', '.join(map(str, spans))} at {step.pos0}"
                    assert np.array_equal(rows, step.logits), where


async def test_the_comparison_notices_a_slice_without_the_feature(cut: Cut, served: Served) -> None:
    expected = served.conversation(Profile.FAST).steps[0]
    last = Span(2, N_LAYERS)
    for path in served.impostors:
        impostor = start(cut(path, last), last)
        with Session([(served.engines[Span(0, 2)], 2), (impostor, N_LAYERS)], Profile.FAST) as session:
            assert not np.array_equal(await session.rows(expected.tokens, range(len(expected.tokens))), expected.logits)
        await impostor.stop()


async def test_the_comparison_notices_layers_in_the_wrong_order(served: Served) -> None:
    expected = served.conversation(Profile.FAST).steps[0]
    first, second, third, last = served.hops(SINGLES)
    with Session([first, third, second, last], Profile.FAST) as session:
        assert not np.array_equal(await session.rows(expected.tokens, range(len(expected.tokens))), expected.logits)


@pytest.mark.parametrize("n_experts", [0, 8])
@pytest.mark.parametrize("encoding", sorted(EXACT_ENCODINGS))
async def test_in_the_encodings_of_the_exact_profile_no_bit_depends_on_the_number_of_rows(
    encoding: str, n_experts: int, tmp_path: Path
) -> None:
    model = TinyLlama(encoding=Encoding[encoding], n_experts=n_experts, n_layers=2)
    unsplit = Unsplit(model.write(tmp_path / "model.gguf"), N_CTX)
    expected = unsplit.rows(PROMPT[:EXACT_MAX_ROWS], 0, range(EXACT_MAX_ROWS))
    for n_rows in (2, 3, 5, 7, 8, 12, 13, 16, 24, 31, 47):
        unsplit.forget(0)
        assert np.array_equal(unsplit.rows(PROMPT[:n_rows], 0, range(n_rows)), expected[:n_rows]), f"{n_rows} rows"
    unsplit.close()


async def test_a_model_in_other_encodings_has_no_exact_profile(cut: Cut, tmp_path: Path) -> None:
    middle = Span(1, 2)
    engine = start(cut(Q4_K_MEDIUM.write(tmp_path / "model.gguf"), middle), middle)
    slot = engine.acquire_slot()
    assert slot is not None
    rows = np.zeros((2, engine.n_embd), np.float32)
    with pytest.raises(EngineInputError, match="no exact profile: it has weights in Q4_K, Q6_K, and"):
        await engine.run(job(slot, 0, middle.stop, hidden=rows, profile=Profile.EXACT))
    assert (await engine.run(job(slot, 0, middle.stop, hidden=rows))).hidden is not None
    await engine.stop()
