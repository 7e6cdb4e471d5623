"""A real peer goes over to another model: its endpoint answers for the new one, and the old one is let go."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import RunningPeer
from meshswarm.commands.throwaway import Where, endpoint_of, throwaway_peer
from meshswarm.config import Home
from meshswarm.peer import Peer
from meshswarm.routing import change, restraint
from meshswarm.routing.choice import Choice
from meshswarm.serving import ServingSettings, moving, serving
from meshswarm.serving.layers import known_model
from meshswarm.span import Span


def models(api: RunningPeer) -> dict[str, bool]:
    """Which models are known, and whether they can be asked for."""
    return {model["id"]: model["meta"]["ready"] for model in api.get("/v1/models")["data"]}


def answering(api: RunningPeer) -> set[str]:
    """Which model answers a request that names none."""
    asked = {"prompt": "!", "max_tokens": 2, "stream": True}
    return {chunk["model"] for chunk in api.stream("/v1/completions", asked)}


@pytest.mark.parametrize("beside", [True, False])
async def test_the_endpoint_answers_for_the_other_model(
    tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr(serving, "OLD_LAYERS_S", 0.0)
    first = gguf_recipe(n_layers=4).write(tmp_path / "first.gguf", seed=1)
    other = gguf_recipe(n_layers=6).write(tmp_path / "other.gguf", seed=2)
    settings = ServingSettings(str(first), n_ctx=64, n_sessions=1)
    where = Where(Home(tmp_path / "home"), f"test-{secrets.token_hex(4)}")
    async with throwaway_peer(where, serving=settings) as peer:
        now = peer._serving
        assert now is not None and now.model.n_layers == 4
        old = now.model
        chosen = ServingSettings(str(other), n_ctx=64, n_sessions=1)
        info = await known_model(chosen, peer._around())
        assert await now.change_model(chosen, info, Choice(Span(0, 6), 64), beside=beside)
        async with asyncio.timeout(30):
            while now.is_changing:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        api = endpoint_of(peer)
        status = await asyncio.to_thread(api.get, "/meshswarm/status")
        assert status["layers"] == "0:6" and status["model_id"] == info.id_text
        assert [record.span for record in await peer.dht.coverage(info.model_id, 6)] == [Span(0, 6)]
        assert await peer.dht.coverage(old.model_id, 4) == []
        assert await asyncio.to_thread(models, api) == {"first": False, "other": True}
        assert await asyncio.to_thread(answering, api) == {"other"}


async def test_real_peers_help_a_model_that_is_asked_for_by_themselves(
    tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three have the first model, one the other, which a client asks for: a second holder comes by itself, one only.
    Minutes are made moments."""
    for module, name, value in (
        (restraint, "SETTLE_S", 0.0), (restraint, "TRUST_S", 0.0), (change, "STEADY_S", 1.0),
        (change, "CHANGE_ROUND_S", 2.0), (change, "MAX_CHANGE_WAIT_S", 0.2), (moving, "ROUND_S", 1.0),
        (moving, "LOOK_S", 0.2), (moving, "START_SPREAD_S", 0.2), (serving, "OLD_LAYERS_S", 0.1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    first = gguf_recipe(n_layers=4).write(tmp_path / "first.gguf", seed=1)
    other = gguf_recipe(n_layers=6).write(tmp_path / "other.gguf", seed=2)
    swarm = f"test-{secrets.token_hex(4)}"
    async with contextlib.AsyncExitStack() as stack:
        peers: list[Peer] = []
        for number, model in enumerate((other, first, first, first)):
            home = Home(tmp_path / f"peer{number}").create()
            for path in (first, other):
                Store(home.root).import_file(path)
            settings = ServingSettings(str(model), n_ctx=64, n_sessions=1, is_mobile=True, changes_model=True)
            join = tuple((peer.identity.peer_id, peer.endpoint.addresses[0]) for peer in peers[:1])
            where = Where(home, swarm, join=join)
            peers.append(await stack.enter_async_context(throwaway_peer(where, serving=settings)))
        api = endpoint_of(peers[0])
        async with asyncio.timeout(90):
            while [*map(named, peers)].count("other") < 2:
                assert await asyncio.to_thread(answering, api) == {"other"}
        for _ in range(10):  # nobody follows, and nobody goes back
            await asyncio.to_thread(answering, api)
            await asyncio.sleep(0.3)
        assert sorted(map(named, peers)) == ["first", "first", "other", "other"]


def named(peer: Peer) -> str:
    assert peer._serving is not None
    return peer._serving.model.name
