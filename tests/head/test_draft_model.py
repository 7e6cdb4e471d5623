"""A draft model at the head: what it guesses, what it may guess for, and that nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.head.engine_route import EngineRoute
from tests.stage.tiny_models import write_tiny

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.artifacts.gguf.tokenizer import token_list_mark
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ConfigError
from meshswarm.head.answer import Answer, Limits
from meshswarm.head.draft_model import MAX_SESSIONS, DraftModel, DraftSession
from meshswarm.head.drafting import SuffixDrafter
from meshswarm.head.lookahead import Lookahead
from meshswarm.head.request import Finished
from meshswarm.head.sampler import Sampler
from meshswarm.head.sampling_params import SamplingParams
from meshswarm.head.speculation import Learned, WindowChooser
from meshswarm.head.text_stream import TextStream
from meshswarm.head.vocabulary import Vocabulary
from meshswarm.stage.engine.engine import Job, SpanEngine
from meshswarm.stage.slices.store import Slices

pytestmark = pytest.mark.usefixtures("unmeasured")

N_CTX = 255
PROMPT = "The capital of France is Paris. The capital of Italy is"


@pytest.fixture(scope="module")
def store(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("store"))
    made.import_file(smollm2)
    return made


@pytest.fixture(scope="module")
def slices(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Slices:
    """One for all tests: a file is tried in a child process once."""
    return Slices(store, tmp_path_factory.mktemp("slices"))


@pytest.fixture
async def model(store: Store, slices: Slices) -> AsyncIterator[DraftModel]:
    (info,) = store.models()
    loaded = await DraftModel.load(info.id_text, store, slices, n_ctx=N_CTX, n_threads=1)
    try:
        yield loaded
    finally:
        await loaded.stop()


async def drafted(session: DraftSession, n_tokens: int) -> tuple[int, ...]:
    made: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()
    session.draft(n_tokens, lambda tokens, seconds: made.set_result(tokens))
    async with asyncio.timeout(60):
        return await made


def begun(model: DraftModel, text: list[int]) -> DraftSession:
    session = model.begin(text)
    assert session is not None
    return session


async def test_a_draft_is_the_models_own_greedy_answer(model: DraftModel, vocabulary: Vocabulary) -> None:
    prompt = vocabulary.encode(PROMPT)
    session = begun(model, prompt)
    tokens = await drafted(session, 6)
    assert vocabulary.token_bytes(tokens[0]) == b" Rome"
    session.close()
    fresh = begun(model, [*prompt, *tokens[:3]])
    assert await drafted(fresh, 3) == tokens[3:], "what was guessed is what would be said"
    fresh.close()


async def test_a_text_that_goes_on_otherwise_takes_the_guesses_back(model: DraftModel, vocabulary: Vocabulary) -> None:
    prompt = vocabulary.encode(PROMPT)
    session = begun(model, prompt)
    await drafted(session, 8)
    said = vocabulary.encode(" big. The capital of Spain is")
    session.said(said)
    after = await drafted(session, 3)
    session.close()
    fresh = begun(model, [*prompt, *said])
    assert await drafted(fresh, 3) == after
    fresh.close()


async def test_the_last_wish_counts_and_the_one_before_is_never_answered(
    model: DraftModel, vocabulary: Vocabulary
) -> None:
    session = begun(model, vocabulary.encode(PROMPT))
    given_up: list[Any] = []
    session.draft(15, lambda tokens, seconds: given_up.append(tokens))
    await asyncio.sleep(0)
    assert len(await drafted(session, 2)) == 2
    assert not given_up
    session.close()


async def test_a_long_prompt_is_read_in_pieces_and_a_full_context_gives_no_draft(
    model: DraftModel, vocabulary: Vocabulary
) -> None:
    text = vocabulary.encode("one two three four five six seven eight nine ten " * 40)[: N_CTX - 4]
    session = begun(model, text)
    assert len(await drafted(session, 4)) == 4
    assert session.n_unread <= 1
    assert await drafted(session, 5) == ()
    session.close()


async def test_an_answer_that_ends_gives_its_room_back_also_in_mid_draft(
    model: DraftModel, vocabulary: Vocabulary
) -> None:
    text = vocabulary.encode(PROMPT)
    sessions = [begun(model, text) for _ in range(MAX_SESSIONS)]
    assert model.begin(text) is None, "no room: that answer goes without"
    for session in sessions:
        session.draft(15, lambda tokens, seconds: pytest.fail("a closed session was answered"))
        session.close()
        session.close()
    again = begun(model, text)
    assert len(await drafted(again, 2)) == 2
    again.close()


async def test_an_engine_that_fails_gives_no_draft_and_the_next_one_starts_afresh(vocabulary: Vocabulary) -> None:
    jobs: list[tuple[Job, Any]] = []

    class Failing:
        def acquire_slot(self) -> int:
            return 0

        def release_slot(self, slot: int) -> None: ...

        def submit(self, job: Job, on_done: Any) -> None:
            jobs.append((job, on_done))

    session = DraftSession(Failing(), 0, 30, N_CTX, [1, 2, 3], lambda: 0.0)
    drafts: list[Any] = []
    session.draft(2, lambda tokens, seconds: drafts.append(tokens))
    jobs[-1][1](RuntimeError("out of order"))
    assert drafts == [()]
    session.said((4,))
    session.draft(2, lambda tokens, seconds: drafts.append(tokens))
    assert (jobs[-1][0].pos0, jobs[-1][0].truncate_to) == (0, None)
    assert jobs[-1][0].tokens is not None and jobs[-1][0].tokens.tolist() == [1, 2, 3, 4]


async def test_a_model_with_a_running_state_is_refused_and_its_engine_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[SpanEngine] = []
    stop = SpanEngine.stop

    async def noted_stop(engine: SpanEngine) -> None:
        await stop(engine)
        stopped.append(engine)

    monkeypatch.setattr(SpanEngine, "stop", noted_stop)
    store = Store(tmp_path)
    model = store.import_file(write_tiny("qwen35", tmp_path / "tiny.gguf"))
    with pytest.raises(ConfigError, match=r"\(qwen35\) cannot be a draft model: .* keys and values only"):
        await DraftModel.load(model.id_text, store, Slices(store, tmp_path), n_ctx=N_CTX, n_threads=1)
    assert len(stopped) == 1


def test_another_vocabulary_is_refused_and_both_models_are_named(
    smollm2_header: GgufHeader, sentencepiece: Any
) -> None:
    engine: Any = None
    draft = DraftModel("SmolLM2", token_list_mark(smollm2_header), engine, 30, N_CTX, lambda: 0.0)
    draft.check_vocabulary(token_list_mark(smollm2_header), "SmolLM2 itself")
    other = token_list_mark(sentencepiece(("hello", 1)))
    with pytest.raises(ConfigError, match=r"SmolLM2 cannot guess for Tiny Llama.*vocabularies differ"):
        draft.check_vocabulary(other, "Tiny Llama")


async def answered(model: DraftModel, vocabulary: Vocabulary, *, with_drafts: bool) -> tuple[list[int], Finished]:
    prompt = vocabulary.encode("Once upon a time there was a fox who")
    route = EngineRoute(model._engine, 30, delay_s=0.15)
    session = begun(model, prompt) if with_drafts else None
    lookahead = Lookahead(
        SuffixDrafter(prompt), WindowChooser(Learned()), vocabulary.is_end_of_generation, session,
        asyncio.get_running_loop().time,
    )  # fmt: skip
    sampler = Sampler(SamplingParams(temperature=0.0), vocabulary.n_vocab, prompt)
    limits = Limits(40, N_CTX, False, False)
    answer = Answer(prompt, route, vocabulary, sampler, TextStream(), limits, "fp", lookahead if with_drafts else None)
    route.listener = answer
    answer.start()
    async with asyncio.timeout(120):
        events = [event async for event in answer.events()]
    lookahead.close()
    route.close()
    assert isinstance(events[-1], Finished)
    return answer.tokens, events[-1]


async def test_free_prose_over_a_long_way_is_guessed_by_the_model_and_says_the_same(
    model: DraftModel, vocabulary: Vocabulary
) -> None:
    plain, _ = await answered(model, vocabulary, with_drafts=False)
    guessed, finished = await answered(model, vocabulary, with_drafts=True)
    assert guessed == plain
    assert finished.timings.draft_n_accepted > 0
    assert finished.timings.flights < len(plain)
