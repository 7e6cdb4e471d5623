"""Going back to a checkpoint over two spans, real sockets and engines: the rows are those of a session that never went
on from there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.head.tiny_swarm import Model, tiny_swarm
from tests.stage.tiny_models import N_VOCAB

from meshswarm.errors import RemoteError
from meshswarm.head.chunking import TAIL_ROWS
from meshswarm.head.session_actions import Origin
from meshswarm.stage.engine.checkpoints import MAX_CHECKPOINTS
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.families.table import FAMILIES

pytestmark = pytest.mark.usefixtures("unmeasured")

PROMPT = [(7 * n * n + 3) % N_VOCAB for n in range(48)]  # one step in either profile, but for its tail
REWRITTEN = [*PROMPT[:-3], 3, 1, 4, 1]
KEPT = len(PROMPT) - TAIL_ROWS


@pytest.fixture(params=["qwen35moe", "lfm2", "nemotron_h", "deepseek4"])
async def model(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Model]:
    async with tiny_swarm(request.param, tmp_path) as running:
        yield running


@pytest.mark.parametrize("profile", Profile)
async def test_a_turn_with_another_tail_gives_the_rows_of_a_session_that_never_had_the_first(
    model: Model, profile: Profile
) -> None:
    talk = await model.open(model.parts, profile=profile)
    await talk.push(PROMPT)
    assert talk.session.history.checkpoints == [KEPT]
    said: list[np.ndarray] = []
    for _ in range(2):
        at = talk.session.length
        await talk.push([5, 6, 7, 8], n_draft=3)
        await talk.push([9, 1], truncate_to=at + 2, n_draft=1)
        await talk.push([2], truncate_to=at + 3)
        await talk.push([4])
        talk.session.park()
        talk.session.resume(0.0, N_VOCAB, 60_000)
        assert talk.session.history.reusable(REWRITTEN, talk.session.rollback) == KEPT
        said += await talk.push(REWRITTEN[KEPT:], truncate_to=KEPT)
        said += await talk.push([6])
    straight = await model.open(model.parts, profile=profile)
    straight.session.core._outbox.n_checkpoints = 0  # steps as they are pushed
    await straight.push(REWRITTEN[:KEPT])
    expected = [*await straight.push(REWRITTEN[KEPT:]), *await straight.push([6])]
    assert not np.array_equal(said[0], said[1]), "a comparison that sees a row more"
    for ours, theirs in zip(said, [*expected, *expected], strict=True):
        assert np.array_equal(ours, theirs)
    for each in (talk, straight):
        each.session.cancel()


async def test_a_copy_begins_at_a_checkpoint_or_is_refused_where_the_family_cannot(model: Model) -> None:
    source = await model.open(model.parts)
    await source.push(PROMPT)
    (after,) = await source.push([5])
    source.session.park()
    origin = Origin(source.session.core.session, source.session.history.beginning(KEPT))
    copies = FAMILIES[model.architecture].copies_checkpoints
    try:
        copy = await model.open(model.parts, origin=origin)
    except RemoteError:
        assert not copies
    else:
        assert copies
        fresh = await model.open(model.whole)
        for ours, theirs in zip(await copy.push(REWRITTEN[KEPT:]), await fresh.push(REWRITTEN), strict=True):
            assert np.array_equal(ours, theirs)
        copy.session.cancel()
        fresh.session.cancel()
    source.session.resume(0.0, N_VOCAB, 60_000)
    (again,) = await source.push([5], truncate_to=KEPT)
    (straight,) = await source.push([*PROMPT[KEPT:], 5], truncate_to=KEPT)
    assert np.array_equal(straight, after), "the original is what it was"
    assert not np.array_equal(again, after)
    source.session.cancel()


async def test_short_turns_that_go_on_do_not_cost_the_place_where_they_began(model: Model) -> None:
    """An agent's: once the user speaks again, what was thought in all of them may be gone from the prompt."""
    talk = await model.open(model.parts)
    await talk.push(PROMPT)
    for n in range(MAX_CHECKPOINTS + 1):
        await talk.push([(n + token) % N_VOCAB for token in range(20)])
    places = list(talk.session.history.checkpoints)
    assert len(places) == MAX_CHECKPOINTS
    assert places[0] == KEPT
    for place in reversed(places):
        await talk.push([3], truncate_to=place)
    with pytest.raises(RemoteError, match="cannot go back"):
        await talk.push([3], truncate_to=KEPT - 1)
