"""Every architecture of the table, cut in every legal way: bit for bit what the unsplit model computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import pytest_asyncio
from tests.stage.chain import Session
from tests.stage.family_parity import LONG_ANSWER, Proof, Row, Step, differences, route
from tests.stage.tiny_models import TINY

from meshswarm.stage.engine import EngineInputError
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.profile import Profile

ROWS = [Row(name, n_prompt=150 if name == "deepseek4" else 70) for name in TINY]

WRONG_GUESSES = [3, 77, 130]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ROWS, ids=[row.id for row in ROWS])
async def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proof]:
    proof = Proof(request.param, tmp_path_factory.mktemp("family"))
    yield proof
    await proof.close()


async def test_every_chain_computes_the_unsplit_models_bits(proof: Proof) -> None:
    expected = proof.conversation(Profile.FAST)
    for spans in proof.span_chains():
        with Session(proof.hops(spans), Profile.FAST) as session:
            assert not await differences(session, expected.steps), f"through {route(spans)}"


async def test_a_long_answer_through_three_spans(proof: Proof) -> None:
    spans = proof.three_spans()
    for profile in proof.profiles:
        expected = proof.conversation(profile, n_steps=LONG_ANSWER)
        assert len(set(expected.answer)) > 20, "it repeats itself, so it proves little"
        with Session(proof.hops(spans), profile) as session:
            assert not await differences(session, expected.steps), f"{profile}, through {route(spans)}"


async def test_sessions_side_by_side_compute_what_each_computes_alone(proof: Proof) -> None:
    profile = proof.profiles[-1]
    talks = [proof.conversation(profile, n_steps=12, n_prompt=n_prompt) for n_prompt in (17, 43)]
    hops = proof.hops(proof.three_spans())
    with Session(hops, profile) as one, Session(hops, profile) as other:
        pairs = zip((one, other), talks, strict=True)
        found = await asyncio.gather(*(differences(session, talk.steps) for session, talk in pairs))
    assert found == [[], []]


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


async def test_without_a_saved_state_going_back_is_refused_and_changes_nothing(proof: Proof) -> None:
    if proof.rollback is Rollback.KV:
        return  # it can go back anywhere, which every second turn above does
    steps = proof.conversation(Profile.FAST).steps
    with Session(proof.hops(proof.three_spans()), Profile.FAST) as session:
        assert not await differences(session, steps[:3])
        with pytest.raises(EngineInputError, match="this model cannot go back from position"):
            await session.rows([5], [0], truncate_to=session.n_held - 2)
        assert not await differences(session, steps[3:])
        assert not await differences(session, steps)  # from position 0 on, anything can start anew
