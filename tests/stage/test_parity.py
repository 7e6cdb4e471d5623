"""A split model computes the unsplit model's logits, bit for bit, at equal chunking: what everything else rests on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from tests.stage.chain import Session, stop_all
from tests.stage.conftest import Cut
from tests.stage.unsplit import Unsplit

from meshswarm.artifacts.gguf.check import read_header
from meshswarm.span import Span
from meshswarm.stage.engine.engine import SpanEngine
from meshswarm.stage.engine.profile import EXACT_MAX_ROWS, Profile
from meshswarm.stage.slices.slicing import write_slice

N_LAYERS = 30
N_CTX = 512
PROMPT = [1, 4093, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2]
LONG_PROMPT = [(7 * n * n + 13 * n + 11) % 40_000 for n in range(60)]
QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
ASKED = (
    "A lighthouse keeper finds a bottle with a map of an island that is not on any chart. She has a small boat, three "
    "days before the supply ship comes, and a cat that hates water. Tell me the story of those three days in vivid "
    "words: what the island looks like, what lives there, what she leaves behind and why she never tells anybody.",
    "Now list ten short titles for that story, each with a colour in it.",
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("unmeasured")]


@pytest.fixture(scope="module")
def unsplit(smollm2: Path) -> Iterator[Unsplit]:
    model = Unsplit(smollm2, N_CTX)
    yield model
    model.close()


def load(
    cut: Cut, model: Path, *spans: Span, pads: tuple[int, ...] | None = None, n_slots: int = 2, **options: bool
) -> list[SpanEngine]:
    """One running engine for each span."""
    return [start(cut(model, span, pads), span, n_slots, **options) for span in spans]


def start(path: Path, span: Span, n_slots: int, **options: bool) -> SpanEngine:
    engine = SpanEngine.load(path, span, N_LAYERS, n_ctx=N_CTX, n_slots=n_slots, n_threads=1, **options)
    engine.start(asyncio.get_running_loop())
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thirds(cut: Cut, smollm2: Path) -> AsyncIterator[list[SpanEngine]]:
    """The layers 0:10, 10:20 and 20:30."""
    engines = load(cut, smollm2, Span(0, 10), Span(10, 20), Span(20, 30))
    yield engines
    await stop_all(engines)


def through(engines: Sequence[SpanEngine], *stops: int) -> list[tuple[SpanEngine, int]]:
    return list(zip(engines, stops, strict=True))


def chunks(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def unsplit_rows(unsplit: Unsplit, pieces: Sequence[Sequence[int]], pos0: int = 0) -> list[NDArray[np.float32]]:
    """All logits of every piece, decoded one after the other from `pos0` on."""
    unsplit.forget(pos0)
    rows = []
    for piece in pieces:
        rows.append(unsplit.rows(piece, pos0, range(len(piece))))
        pos0 += len(piece)
    return rows


async def greedy(session: Session, token: int, n_steps: int) -> tuple[list[int], list[NDArray[np.float32]]]:
    """Decode from `token` on; the tokens that went in, and the logits that came out."""
    tokens, rows = [], []
    for _ in range(n_steps):
        tokens.append(token)
        rows.append(await session.rows([token], [0]))
        token = int(rows[-1][0].argmax())
    return tokens, rows


SHORT_RUN = [PROMPT[:8], PROMPT[8:11], PROMPT[11:12], PROMPT[12:13]]


@pytest.fixture(scope="module")
def short_run(unsplit: Unsplit) -> list[NDArray[np.float32]]:
    return unsplit_rows(unsplit, SHORT_RUN)


async def assert_short_run(hops: Sequence[tuple[SpanEngine, int]], expected: Sequence[NDArray[np.float32]]) -> None:
    with Session(hops, Profile.FAST) as session:
        for piece, rows in zip(SHORT_RUN, expected, strict=True):
            assert np.array_equal(await session.rows(piece, range(len(piece))), rows)


@pytest.mark.parametrize("at", range(1, N_LAYERS))
async def test_every_cut_in_two_is_exact(
    at: int, smollm2: Path, short_run: list[NDArray[np.float32]], tmp_path: Path
) -> None:
    engines = []
    for span in (Span(0, at), Span(at, N_LAYERS)):
        path = tmp_path / "slice.gguf"
        write_slice(smollm2, read_header(smollm2), span, path)
        engines.append(start(path, span, n_slots=1))
        path.unlink()
    await assert_short_run(through(engines, at, N_LAYERS), short_run)
    await stop_all(engines)


@pytest.mark.parametrize("profile", Profile)
async def test_a_chain_of_three_stays_exact_through_a_second_turn(
    profile: Profile, thirds: list[SpanEngine], unsplit: Unsplit
) -> None:
    """Chunked prefill, 64 greedy steps and a second turn. The exact profile is held to more: its single steps must
    equal the unsplit model's rows of a large chunk, since no bit may depend on the row count."""
    size = 64 if profile is Profile.FAST else EXACT_MAX_ROWS
    turns = []
    with Session(through(thirds, 10, 20, 30), profile) as session:
        for asked, n_steps in zip(ASKED, (64, 16), strict=True):
            prompt = unsplit.tokens(QUESTION.format(asked))
            prefill = [await session.rows(piece, range(len(piece))) for piece in chunks(prompt, size)]
            tokens, rows = await greedy(session, int(prefill[-1][-1].argmax()), n_steps)
            turns.append((prompt, prefill, tokens, rows))
    pos0 = 0
    for prompt, prefill, tokens, rows in turns:
        steps = chunks(tokens, 1) if profile is Profile.FAST else chunks(tokens, EXACT_MAX_ROWS)
        expected = unsplit_rows(unsplit, [*chunks(prompt, size), *steps], pos0)
        assert np.array_equal(np.concatenate(prefill + rows), np.concatenate(expected))
        pos0 += len(prompt) + len(tokens)
    assert len({token for _, _, tokens, _ in turns for token in tokens}) > 16, "it repeats itself, so it proves little"


async def test_an_early_exit_joins_overlapping_spans(
    cut: Cut, smollm2: Path, short_run: list[NDArray[np.float32]]
) -> None:
    engines = load(cut, smollm2, Span(0, 20), Span(10, 30), n_slots=1)
    await assert_short_run(through(engines, 10, 30), short_run)
    await stop_all(engines)


async def test_a_padding_layer_changes_nothing(cut: Cut, smollm2: Path, short_run: list[NDArray[np.float32]]) -> None:
    engines = load(cut, smollm2, Span(0, 12), Span(12, 30), pads=(29,), n_slots=1)
    await assert_short_run(through(engines, 12, 30), short_run)
    await stop_all(engines)


async def test_the_native_tap_and_the_python_one_agree(
    cut: Cut, smollm2: Path, short_run: list[NDArray[np.float32]]
) -> None:
    engines = load(cut, smollm2, Span(0, 10), Span(10, 30), n_slots=1, native=False)
    await assert_short_run(through(engines, 10, 30), short_run)
    await stop_all(engines)


async def test_two_sessions_side_by_side_compute_what_each_computes_alone(thirds: list[SpanEngine]) -> None:
    async def run(prompt: Sequence[int], pace: int) -> list[NDArray[np.float32]]:
        with Session(through(thirds, 10, 20, 30), Profile.EXACT) as session:
            rows = [await session.rows(piece, range(len(piece))) for piece in chunks(prompt, pace)]
            return rows + (await greedy(session, int(rows[-1][-1].argmax()), 12))[1]

    prompts = ((PROMPT, 7), (LONG_PROMPT, 30))
    alone = [await run(*prompt) for prompt in prompts]
    together = await asyncio.gather(*(run(*prompt) for prompt in prompts))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(np.concatenate(one), np.concatenate(other))


@pytest.mark.parametrize("profile", Profile)
async def test_rejected_drafts_leave_no_trace(profile: Profile, thirds: list[SpanEngine]) -> None:
    hops = through(thirds, 10, 20, 30)
    with Session(hops, profile) as plain, Session(hops, profile) as drafted:
        for session in (plain, drafted):
            await session.rows(PROMPT, [len(PROMPT) - 1])
        for token in (8, 15, 1000):
            expected = await plain.rows([token], [0])
            n_held = drafted.n_held
            await drafted.rows([token, 30_000, 77, 4], [0, 1, 2, 3])
            assert np.array_equal(await drafted.rows([token], [0], truncate_to=n_held), expected)


async def test_the_comparison_notices_a_wrong_number(
    thirds: list[SpanEngine], short_run: list[NDArray[np.float32]]
) -> None:
    with Session(through(thirds, 10, 20, 30), Profile.FAST) as session:
        rows = await session.rows(SHORT_RUN[0], range(8), bend=0.1)
    assert np.array_equal(rows[:7], short_run[0][:7])
    assert not np.array_equal(rows[7], short_run[0][7])


async def test_the_comparison_notices_a_missing_span(
    thirds: list[SpanEngine], short_run: list[NDArray[np.float32]]
) -> None:
    with Session([(thirds[0], 10), (thirds[2], 30)], Profile.FAST) as session:
        assert not np.array_equal(await session.rows(SHORT_RUN[0], range(8)), short_run[0])


async def test_the_comparison_notices_spans_in_the_wrong_order(
    cut: Cut, smollm2: Path, short_run: list[NDArray[np.float32]]
) -> None:
    engines = load(cut, smollm2, Span(0, 8), Span(8, 16), Span(16, 24), Span(24, 30), n_slots=1)
    first, second, third, last = through(engines, 8, 16, 24, 30)
    with Session([first, second, third, last], Profile.FAST) as session:
        assert np.array_equal(await session.rows(SHORT_RUN[0], range(8)), short_run[0])
    with Session([first, third, second, last], Profile.FAST) as session:
        assert not np.array_equal(await session.rows(SHORT_RUN[0], range(8)), short_run[0])
    await stop_all(engines)
