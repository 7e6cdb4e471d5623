"""`meshswarm run`: one question, one answer on the terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshswarm.commands.control import RunningPeer, find_running
from meshswarm.commands.serve import run_in_loop
from meshswarm.commands.story import what_to_check
from meshswarm.config import DEFAULT_MODEL, Address, Home
from meshswarm.discovery.settings import DiscoverySettings, Use
from meshswarm.errors import ConfigError
from meshswarm.identity import PeerId
from meshswarm.membership.swarms import Swarms
from meshswarm.peer import Peer, PeerSettings
from meshswarm.serving import ServingSettings


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask, and of whom: the peer that runs in `home`, or one started for it that joins `join`."""

    home: Home
    swarm: str | None  # None: the running peer's, or what this folder belongs to
    join: tuple[tuple[PeerId, Address], ...]
    model: str | None
    body: dict[str, Any]
    private: bool = False


def ask(question: Question, *, as_json: bool) -> None:
    """Print the answer as it comes, or the whole of it as one JSON object."""
    running = find_running(question.home)
    if running is not None and (question.join or question.swarm is not None or question.private):
        raise ConfigError(
            f"a peer is running in the folder {question.home.root} and would be asked, in its own swarm; leave "
            "--swarm, --private and --join out, or name another folder with `meshswarm --home DIR run ...`"
        )
    if running is not None:
        _ask(running, question.body, as_json)
        return
    run_in_loop(_ask_own_peer(question, as_json))


async def _ask_own_peer(question: Question, as_json: bool) -> None:
    """A peer for one question. Alone it serves the default model itself; with peers to join, that were named here or in
    the invite to a private swarm, it only asks."""
    membership = Swarms(question.home).open(question.swarm, private=question.private, now_ms=int(time.time() * 1000))
    only_asks = bool(question.join or membership.invited)
    ready = asyncio.Event()
    unreached: list[Mapping[str, Any]] = []
    n_reached = 0

    def report(event: Mapping[str, Any]) -> None:
        nonlocal n_reached
        match event["event"]:
            case "ready":
                ready.set()
            case "model":
                print(event["message"], file=sys.stderr)
            case "join-failed":
                unreached.append(event)
            case "joined":
                n_reached = event["peers"]

    settings = PeerSettings(
        home=question.home,
        swarm=question.swarm,
        private=question.private,
        listen=Address("0.0.0.0" if only_asks else "127.0.0.1", 0),
        api=Address("127.0.0.1", 0),
        join=question.join,
        serving=None if only_asks else ServingSettings(question.model or DEFAULT_MODEL, n_sessions=1),
        discovery=DiscoverySettings(lan=Use.NO, rendezvous=Use.NO),
    )
    body = question.body if only_asks else {**question.body, "model": None}
    peer = Peer(settings, report)
    living = asyncio.create_task(peer.run())
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((living, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not living.done():
            if unreached and not n_reached:
                peers = " or ".join(f"{event['peer']} at {event['address']}" for event in unreached)
                raise ConfigError(f"nobody can be asked: no way in through {peers}. {what_to_check(unreached[0])}")
            await asyncio.to_thread(_ask, RunningPeer(0, peer.api.base_url, None), body, as_json)
    finally:
        waiting.cancel()
        peer.stop()
        await living  # its own error, when it could not start or live on, says more than the question's


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
                    print(piece, end="", flush=True)
            last = {**last, **{key: chunk[key] for key in ("model", "usage", "timings", "meshswarm") if chunk.get(key)}}
    finally:
        if text and not as_json:
            print()  # an error has a line of its own
    if as_json:
        print(json.dumps({"text": "".join(text), **last}))
