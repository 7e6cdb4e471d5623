"""Every architecture of the table, cut in every legal way: bit for bit what the unsplit model computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tests.stage.chain import Session
from tests.stage.family_parity import LONG_ANSWER, N_CTX, Proof, Row, Step, differences, prompt_of, route
from tests.stage.tiny_models import TINY
from tests.stage.unsplit import Unsplit

from meshswarm.stage.engine import grouping
from meshswarm.stage.engine.engine import EngineInputError
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.families.table import FAMILIES

ROWS = [Row(name, n_prompt=150 if name == "deepseek4" else 70) for name in TINY]

STATES = [row for row in ROWS if FAMILIES[TINY[row.name].architecture].rollback is Rollback.STATE]
WRONG_GUESSES = [3, 77, 130]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ROWS, ids=[row.id for row in ROWS])
async def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proof]:
    proof = Proof(request.param, tmp_path_factory.mktemp("family"))
    yield proof
    await proof.close()


@pytest_asyncio.fixture(loop_scope="module", params=STATES, ids=[row.id for row in STATES])
async def running_state(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Proof]:
    proof = Proof(request.param, tmp_path / "family")
    yield proof
    await proof.close()


async def test_every_chain_computes_the_unsplit_models_bits(proof: Proof) -> None:
    for profile in proof.profiles:
        expected = proof.conversation(profile)
        for spans in proof.span_chains():
            with Session(proof.hops(spans), profile) as session:
                assert not await differences(session, expected.steps), f"{profile}, through {route(spans)}"


async def test_a_long_answer_through_three_spans(proof: Proof) -> None:
    spans = proof.three_spans()
    for profile in proof.profiles:
        expected = proof.conversation(profile, n_steps=LONG_ANSWER)
        assert len(set(expected.answer)) > 20, "it repeats itself, so it proves little"
        with Session(proof.hops(spans), profile) as session:
            assert not await differences(session, expected.steps), f"{profile}, through {route(spans)}"


@pytest.fixture
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """First spans do not part two sessions into groups that alternate between the spans."""
    monkeypatch.setattr(grouping, "_MAX_GROUPS", 1)


@pytest.mark.usefixtures("one_group")
async def test_sessions_in_company_compute_what_each_computes_alone(proof: Proof) -> None:
    """In `EXACT`; first both in every run of the graph, then as it comes."""
    assert proof.profiles[-1] is Profile.EXACT
    talks = [proof.conversation(Profile.EXACT, n_steps=12, n_prompt=n_prompt).steps for n_prompt in (17, 43)]
    hops = proof.hops(proof.three_spans())
    with Session(hops, Profile.EXACT) as one, Session(hops, Profile.EXACT) as other:
        pair = (one, other)
        for session, talk in zip(pair, talks, strict=True):
            assert not await differences(session, talk[:1])
        for steps in zip(*(talk[1:7] for talk in talks), strict=True):
            rows = await Session.together(pair, [step.tokens[0] for step in steps])
            assert np.array_equal(rows, np.concatenate([step.logits for step in steps]))
        found = await asyncio.gather(
            *(differences(session, talk[7:]) for session, talk in zip(pair, talks, strict=True))
        )
    assert found == [[], []]


@pytest.mark.usefixtures("one_group")
async def test_sessions_in_company_compute_what_the_unsplit_model_does_in_the_same_company(proof: Proof) -> None:
    """In `FAST`, where company may change bits.

    Of the prompts two rows are wanted: a last span that ends in zero layers computes its last real one for all rows,
    the unsplit model for the wanted ones only, and one alone may differ.
    """
    unsplit = Unsplit(proof.path, N_CTX + 1, n_sequences=2)
    hops = proof.hops(proof.three_spans())
    with Session(hops, Profile.FAST) as one, Session(hops, Profile.FAST) as other:
        pair = (one, other)
        tokens = []
        for sequence, (session, n_prompt) in enumerate(zip(pair, (17, 43), strict=True)):
            prompt = prompt_of(n_prompt)
            wanted = [n_prompt - 2, n_prompt - 1]
            logits = unsplit.rows(prompt, 0, wanted, sequence=sequence)
            assert np.array_equal(await session.rows(prompt, wanted), logits)
            tokens.append(int(logits[-1].argmax()))
        for _ in range(6):
            logits = unsplit.together(tokens, [session.n_held for session in pair])
            assert np.array_equal(await Session.together(pair, tokens), logits)
            tokens = [int(row.argmax()) for row in logits]
    unsplit.close()


async def test_rejected_drafts_leave_no_trace(proof: Proof) -> None:
    profile = proof.profiles[-1]
    talks = [proof.conversation(profile, n_steps=10, n_prompt=n_prompt) for n_prompt in (70, 17)]
    hops = proof.hops(proof.three_spans())
    with Session(hops, profile) as one, Session(hops, profile) as other:
        await asyncio.gather(drafted(one, talks[0].steps, (0, 2, 1)), drafted(other, talks[1].steps, (1, 3)))


async def drafted(session: Session, steps: Sequence[Step], all_right: Sequence[int]) -> None:
    """Take the steps, the first lone ones in windows: one with each of `all_right` right guesses, and wrong ones."""
    at = next(index for index, step in enumerate(steps) if len(step.tokens) == 1)
    assert not await differences(session, steps[:at])
    for n_right in all_right:
        expected = steps[at : at + 1 + n_right]
        window = [*(step.tokens[0] for step in expected), *WRONG_GUESSES]
        truncate_to = expected[0].pos0 if expected[0].pos0 < session.n_held else None
        rows = await session.rows(window, range(len(expected)), truncate_to=truncate_to, is_window=True)
        assert np.array_equal(rows, np.concatenate([step.logits for step in expected]))
        at += len(expected)
    assert not await differences(session, steps[at:])


async def test_a_copied_session_goes_on_as_the_one_it_is_copied_from(proof: Proof) -> None:
    steps = proof.conversation(Profile.FAST).steps
    hops = proof.hops(proof.three_spans())
    with Session(hops, Profile.FAST) as one, Session(hops, Profile.FAST) as other:
        assert not await differences(one, steps[:3])
        await other.copy(one, one.n_held)
        for step in steps[3:]:
            assert not await differences(one, [step])
            assert not await differences(other, [step])


async def test_without_a_saved_state_going_back_is_refused_and_changes_nothing(running_state: Proof) -> None:
    proof = running_state
    steps = proof.conversation(Profile.FAST).steps
    with Session(proof.hops(proof.three_spans()), Profile.FAST) as session:
        assert not await differences(session, steps[:3])
        with pytest.raises(EngineInputError, match="this model cannot go back from position"):
            await session.rows([5], [0], truncate_to=session.n_held - 2)
        assert not await differences(session, steps[3:])
        assert not await differences(session, steps)  # from position 0 on, anything can start anew
