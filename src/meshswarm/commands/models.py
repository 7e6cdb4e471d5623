"""`meshswarm models ...`: the store of this folder, and what the running peer sees in the swarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.store import Store
from meshswarm.commands.control import find_running
from meshswarm.config import Home


def known_models(home: Home) -> list[dict[str, Any]]:
    """One entry a model: what lies in this folder, and what the swarm serves when a peer is running."""
    entries = {info.id_text: _local_entry(info) for info in Store(home.create().root).models()}
    running = find_running(home)
    if running is not None:
        for listing in running.get("/v1/models")["data"]:
            meta = listing["meta"]
            entry = entries.setdefault(
                meta["model_id"], {"name": listing["id"], "model_id": meta["model_id"], "local": False}
            )
            entry.update({key: meta[key] for key in ("n_ctx", "layers", "covered", "holders", "ready") if key in meta})
    return sorted(entries.values(), key=lambda entry: (entry["name"], entry["model_id"]))


def pull(home: Home, ref: str, progress: Callable[[int, int], None] | None) -> dict[str, Any]:
    """Get the model behind `ref` into this folder's store."""
    return _local_entry(Store(home.create().root).obtain(ref, progress=progress))


def _local_entry(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "model_id": info.id_text,
        "local": True,
        "architecture": info.architecture,
        "encoding": info.encoding,
        "layers": info.n_layers,
        "bytes": sum(info.file_lengths),
        "n_ctx": info.n_ctx_train,
    }
