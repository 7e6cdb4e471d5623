"""Every architecture of the table, cut in every legal way: bit for bit what the unsplit model computes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.stage.chain import Session
from tests.stage.family_parity import LONG_ANSWER, Proof, Row, differences, route
from tests.stage.tiny_models import TINY

from meshswarm.stage.profile import Profile

ROWS = [Row(name, n_prompt=150 if name == "deepseek4" else 70) for name in TINY]

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
