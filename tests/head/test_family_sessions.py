"""Sessions of several families over real sockets and engines: what each needs travels, in every turn.

A model in two spans must give the rows that it gives as one, whatever is taken back, parked, copied or sent in another
dtype on the way: wider rows, token ids beside them, running states.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.head.tiny_swarm import Model, Talk, tiny_swarm
from tests.stage.tiny_models import N_VOCAB

from meshswarm.errors import RemoteError
from meshswarm.head.session_actions import Origin
from meshswarm.ledger.receipt import Outcome
from meshswarm.stage.families.family import Rollback
from meshswarm.stage.sessions.messages import Dtype

pytestmark = pytest.mark.usefixtures("unmeasured")

PROMPT = [(7 * n * n + 3) % N_VOCAB for n in range(40)]
FAMILIES_TO_TRY = ["llama", "deepseek4", "qwen35"]  # plain; wider rows with tokens beside them; a running state


@pytest.fixture(params=FAMILIES_TO_TRY)
async def model(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Model]:
    async with tiny_swarm(request.param, tmp_path) as running:
        yield running


async def conversation(talk: Talk) -> list[np.ndarray]:
    """Two turns: a draft of which one token comes true, and another that nobody settles before the second turn."""
    said = await talk.push(PROMPT)
    said += await talk.push([5, 6, 7, 8], n_draft=3)
    said += (await talk.push([9, 1], truncate_to=len(PROMPT) + 2, n_draft=1))[:1]
    talk.session.park()
    talk.session.resume(0.0, N_VOCAB, 60_000)
    n_kept = talk.session.history.reusable([*PROMPT, 5, 6, 9, 3, 4], talk.session.rollback)
    assert n_kept == len(PROMPT) + 3, "all but the guess that nobody settled"
    said += await talk.push([3, 4], truncate_to=n_kept)
    return said


async def test_two_turns_with_drafts_give_the_whole_models_rows_and_the_rows_of_a_run_without_either(
    model: Model,
) -> None:
    split, whole = await model.open(model.parts), await model.open(model.whole)
    assert split.session.rollback is model.rollback
    said = await conversation(split)
    for ours, theirs in zip(said, await conversation(whole), strict=True):
        assert np.array_equal(ours, theirs)
    straight = await model.open(model.parts)
    (last,) = await straight.push([*PROMPT, 5, 6, 9, 3, 4])
    assert np.array_equal(last, said[-1])
    for talk in (split, whole, straight):
        talk.session.close()
        await talk.session.ended()
    async with asyncio.timeout(10):
        while len(kept := model.receipts.newest(10)) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [receipt.outcome for receipt in kept] == [Outcome.AGREED] * 5, "both ends counted alike"


async def test_a_copy_goes_on_as_if_it_had_been_computed_or_is_refused_where_the_family_cannot(model: Model) -> None:
    source = await model.open(model.parts)
    await source.push(PROMPT)
    await source.push([5])
    source.session.park()
    for n_positions in (len(PROMPT) + 1, len(PROMPT)):
        origin = Origin(source.session.core.session, source.session.history.beginning(n_positions))
        try:
            copy = await model.open(model.parts, origin=origin)
        except RemoteError:
            assert model.rollback is Rollback.STATE
            continue
        fresh = await model.open(model.whole)
        (ours,) = await copy.push([3, 4])
        (theirs,) = await fresh.push([*PROMPT, 5, 3, 4] if n_positions > len(PROMPT) else [*PROMPT, 3, 4])
        assert np.array_equal(ours, theirs)
        for talk in (copy, fresh):
            talk.session.cancel()
    source.session.resume(0.0, N_VOCAB, 60_000)
    (ours,) = await source.push([3, 4])
    fresh = await model.open(model.whole)
    (theirs,) = await fresh.push([*PROMPT, 5, 3, 4])
    assert np.array_equal(ours, theirs), "the original is what it was"
    for talk in (source, fresh):
        talk.session.cancel()


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.Q8])
async def test_another_dtype_carries_nearly_the_same_rows_and_both_ends_count_its_bytes(
    model: Model, dtype: Dtype
) -> None:
    exact, other = await model.open(model.parts), await model.open(model.parts, dtype=dtype)
    (expected,), (logits,) = await exact.push(PROMPT), await other.push(PROMPT)
    assert not np.array_equal(expected, logits), "a comparison that sees the dtype"
    assert np.corrcoef(expected, logits)[0, 1] > 0.95
    exact.session.cancel()
    other.session.close()
    await other.session.ended()
    async with asyncio.timeout(10):
        while len(kept := model.receipts.newest(10)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert [receipt.outcome for receipt in kept] == [Outcome.AGREED] * 2
