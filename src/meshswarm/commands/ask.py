"""`meshswarm run`: one question, one answer on the terminal.

The rule this file keeps: a model given as a file is asked for by its id, which is the same wherever it is served; and
whoever gets no answer since nobody serves the model reads what would change that.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshswarm.artifacts.sources import is_remote, is_source, pypi_model
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import RunningPeer, find_running
from meshswarm.commands.serve import run_in_loop
from meshswarm.commands.throwaway import Where, endpoint_of, throwaway_peer
from meshswarm.config import DEFAULT_MODEL
from meshswarm.errors import MeshswarmError, NoRouteError, UnknownModelError, printable
from meshswarm.membership.swarms import Swarms
from meshswarm.serving import ServingSettings


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask, and of whom: the peer that runs in the folder, or one started for it."""

    where: Where
    model: str | None
    body: dict[str, Any]


def ask(question: Question, *, as_json: bool) -> None:
    """Print the answer as it comes, or the whole of it as one JSON object."""
    running = find_running(question.where.home)
    try:
        if running is None:
            run_in_loop(_ask_own_peer(question, as_json))
        else:
            _ask(question.where.leave_to(running, "run"), by_id(question).body, as_json)
    except (NoRouteError, UnknownModelError) as error:
        raise MeshswarmError(f"{error}{what_would_help(error, question)}") from error


async def _ask_own_peer(question: Question, as_json: bool) -> None:
    """A peer for one question. Alone it serves the default model itself; with peers to join, that were named here or in
    the invite to a private swarm, it only asks."""
    where = question.where
    membership = Swarms(where.home).open(where.swarm, private=where.private, now_ms=int(time.time() * 1000))
    only_asks = bool(where.join or membership.invited)
    serving = None if only_asks else ServingSettings(question.model or DEFAULT_MODEL, n_sessions=1)
    body = (await asyncio.to_thread(by_id, question)).body if only_asks else {**question.body, "model": None}
    async with throwaway_peer(where, serving=serving, say=lambda text: print(text, file=sys.stderr)) as peer:
        await asyncio.to_thread(_ask, endpoint_of(peer), body, as_json)


def by_id(question: Question) -> Question:
    """`question`, of a model given as a file by that model's id: others do not know the path. Raises MeshswarmError."""
    model = question.model
    if model is None or not is_source(model) or is_remote(model) or pypi_model(model) is not None:
        return question
    known = Store(question.where.home.create().root).obtain(model)
    return replace(question, model=known.id_text, body={**question.body, "model": known.id_text})


def what_would_help(error: MeshswarmError, question: Question) -> str:
    """To be added to `error`: what a person can do when nobody serves the model, or some of its layers."""
    where = question.where
    missing = re.search(r"serves layers (\d+:\d+)", str(error))
    if missing is None:
        not_met = ". Is a peer missing here that serves it? --join PEERID@HOST:PORT names one"
        return not_met if isinstance(error, UnknownModelError) and "--join" not in str(error) else ""
    command = ["meshswarm", "serve", "--model", question.model or "MODEL", "--layers", missing[1]]
    command += [] if where.swarm is None else ["--swarm", where.swarm]
    peer = [f"{peer}@{address}" for peer, address in where.join[:1]] or ["PEERID@HOST:PORT"]
    return (
        f". On a machine with room for them: `{shlex.join([*command, '--join', *peer])}`. Or is a peer missing here "
        "that serves them? --join names one"
    )


def _ask(peer: RunningPeer, body: Mapping[str, Any], as_json: bool) -> None:
    asked = {**{name: value for name, value in body.items() if value is not None}, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    text: list[str] = []
    last: dict[str, Any] = {}
    try:
        for chunk in peer.stream("/v1/chat/completions", asked):
            for choice in chunk.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                text.append(piece)
                if not as_json:
                    print(printable(piece), end="", flush=True)  # others computed it
            last = {**last, **{key: chunk[key] for key in ("model", "usage", "timings", "meshswarm") if chunk.get(key)}}
    finally:
        if text and not as_json:
            print()  # an error has a line of its own
    if as_json:
        print(json.dumps({"text": "".join(text), **last}))
