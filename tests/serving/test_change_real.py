"""A real peer goes over to another model: its endpoint answers for the new one, and the old one is let go."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from meshswarm.commands.control import RunningPeer
from meshswarm.commands.throwaway import Where, endpoint_of, throwaway_peer
from meshswarm.config import Home
from meshswarm.routing.choice import Choice
from meshswarm.serving import ServingSettings, serving
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
