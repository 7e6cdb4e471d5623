"""Servers on loopback, and a model to fetch from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.artifacts.sources.web_server import HubServer, WebServer


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def cdn() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.fixture
def hub(cdn: WebServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that `huggingface_hub` asks in this process, without anybody's token."""
    server = HubServer(cdn)
    monkeypatch.setattr(constants, "ENDPOINT", server.origin)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.origin + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


@pytest.fixture(scope="session")
def model(gguf_recipe: Any) -> bytes:
    """A whole model file of some 3.4 MB: 14 pieces of 256 KiB, the last one short."""
    return bytes(gguf_recipe(n_layers=16, n_embd=96).file())
