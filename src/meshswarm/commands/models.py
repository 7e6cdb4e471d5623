"""`meshswarm models ...`: the store of this folder, and what the running peer sees in the swarm."""

from __future__ import annotations

import shutil
from typing import Any

from meshswarm.artifacts.merkle import Progress, model_id_text
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.ranges import n_bytes_of
from meshswarm.artifacts.sources import artifact_folder
from meshswarm.artifacts.store.disk import Disk, Kind
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import find_running
from meshswarm.config import Home
from meshswarm.errors import ConfigError, UnknownModelError


def known_models(home: Home) -> list[dict[str, Any]]:
    """One entry a model: what lies in this folder, whole or in part, and what the swarm serves when a peer is
    running."""
    store = Store(home.create().root)
    disk = Disk(home.root, store)
    entries = {info.id_text: entry_of(store, disk, info) for info in _stored(store)}
    running = find_running(home)
    if running is not None:
        for listing in running.get("/v1/models")["data"]:
            meta = listing["meta"]
            entry = entries.setdefault(
                meta["model_id"], {"name": listing["id"], "model_id": meta["model_id"], "local": False}
            )
            entry.update({key: meta[key] for key in ("n_ctx", "layers", "covered", "holders", "ready") if key in meta})
    return sorted(entries.values(), key=lambda entry: (entry["name"], entry["model_id"]))


def pull(home: Home, ref: str, progress: Progress | None) -> dict[str, Any]:
    """Get the model behind `ref` into this folder's store."""
    store = Store(home.create().root)
    return entry_of(store, Disk(home.root, store), store.obtain(ref, progress=progress))


def entry_of(store: Store, disk: Disk, info: ModelInfo) -> dict[str, Any]:
    """A model on this disk, for `--json`. Sizes are in bytes; `local`: it is here whole."""
    held = held_bytes(store, info.model_id, sum(info.file_lengths))
    used = disk.used(info.model_id)
    return {
        "name": info.name,
        "model_id": info.id_text,
        "local": held == sum(info.file_lengths),
        "architecture": info.architecture,
        "encoding": info.encoding,
        "layers": info.n_layers,
        "bytes": sum(info.file_lengths),
        "n_ctx": info.n_ctx_train,
        "files": len(info.file_lengths),
        "held_bytes": held,
        "disk": {"pieces": used[Kind.PIECES], "slices": used[Kind.SLICE]},
    }


def held_bytes(store: Store, model_id: bytes, n_bytes: int) -> int:
    """How much of a model is here. A whole one is not hashed again for that, whatever became of its files since."""
    if store.noted_paths(model_id) is not None:
        return n_bytes
    return sum(map(n_bytes_of, store.ranges(model_id)))


def disk_facts(home: Home, model_id: bytes) -> dict[str, Any]:
    """Where a model lies and what it takes, for `models show`."""
    store = Store(home.root)
    paths = store.noted_paths(model_id)
    holdings = [holding for holding in Disk(home.root, store).holdings() if holding.model_id == model_id]
    return {
        "files": [str(path) for path in paths or ()],
        "held_bytes": held_bytes(store, model_id, sum(length for length, _root in store.files(model_id))),
        "pieces": sum(holding.n_bytes for holding in holdings if holding.kind is Kind.PIECES),
        "slices": [
            {"layers": holding.path.stem.replace("-", ":"), "path": str(holding.path), "bytes": holding.n_bytes}
            for holding in holdings
            if holding.kind is Kind.SLICE
        ],
    }


def verify(home: Home, ref: str | None, progress: Progress | None) -> list[dict[str, Any]]:
    """Hash what is here of one model, or of all, again. Damage to fetched files is noted: it can be fetched again."""
    store = Store(home.create().root)
    infos = _stored(store) if ref is None else [_find(store, ref)]
    return [_verified(store, info, progress) for info in infos]


def _verified(store: Store, info: ModelInfo, progress: Progress | None) -> dict[str, Any]:
    checks = store.check(info.model_id, progress)
    files = [
        {
            "path": str(check.path),
            "checked_bytes": n_bytes_of(check.checked),
            "bad_bytes": n_bytes_of(check.bad),
            "bad_pieces": list(check.bad_pieces),
        }
        for check in checks
    ]
    is_good = not any(check.bad for check in checks)
    return {"name": info.name, "model_id": info.id_text, "good": is_good, "files": files}


def remove(home: Home, ref: str) -> dict[str, Any]:
    """Forget a model: remove what this peer fetched and cut of it. Files that were imported in place stay, and so do
    downloads that all peers of this user share (`shared_files` among `kept_files`).

    Raises ConfigError while the running peer serves it, UnknownModelError when it is not here.
    """
    store = Store(home.create().root)
    info = _find(store, ref)
    _refuse_served(home, info)
    n_bytes = sum(Disk(home.root, store).used(info.model_id).values())
    kept = store.remove(info.model_id)
    shutil.rmtree(home.root / "slices" / info.id_text, ignore_errors=True)
    return {
        "name": info.name,
        "model_id": info.id_text,
        "freed_bytes": n_bytes,
        "kept_files": [str(path) for path in kept],
        "shared_files": [str(path) for path in kept if artifact_folder() in path.parents],
    }


def _refuse_served(home: Home, info: ModelInfo) -> None:
    running = find_running(home)
    if running is None:
        return
    status = running.get("/meshswarm/status")
    if status.get("model_id") == info.id_text:
        raise ConfigError(
            f"the peer that runs in the folder {home.root} serves the layers {status['layers']} of {info.name}: "
            "stop it first"
        )


def _stored(store: Store) -> list[ModelInfo]:
    """Models that are here, whole or in part."""
    parts = [store.describe(model_id, store.name_of(model_id)) for model_id in store.parts()]
    return [*store.models(), *parts]


def _find(store: Store, ref: str) -> ModelInfo:
    info = store.find_any(ref)
    if info is None:
        names = ", ".join(f"{each.name} ({model_id_text(each.model_id)[:8]})" for each in _stored(store)) or "none"
        raise UnknownModelError(f"no model {ref[:80]!r} is stored here (stored: {names})", param="model")
    return info
