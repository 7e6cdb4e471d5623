"""The manifests this peer has, whose they are, and which files sources gave: trust on first use.

The rule this file keeps: what was seen first under a name is what it means here until a person says otherwise. A name
belongs to the publisher whose manifest was first accepted under it; another's is refused loudly, a newer edition by the
same one replaces the older. A source that gave one model never silently gives another. Under `home/manifests`:
`names/PUBLISHER.NAME.json`, where the file's name alone is the pin and survives its content; `models/ID.PUBLISHER.
manifest`, what publishers say of a model under whatever name; `sources/DIGEST.ID.json`. Several processes may use it at
once.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshswarm.artifacts.files import read_json, write_json, write_whole
from meshswarm.artifacts.gguf.container import GgufHeader
from meshswarm.artifacts.manifests.catalogue import CATALOGUE, CatalogueEntry
from meshswarm.artifacts.manifests.manifest import MAX_MANIFEST_BYTES, SignedManifest
from meshswarm.artifacts.merkle import model_id_text, parse_model_id
from meshswarm.artifacts.names import NAME_PATTERN
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.identity import PeerId

MAX_KEPT = 1024
"""Manifests of models that were asked for by id; the oldest go."""
_PUBLISHER_CHARS = len(str(PeerId(bytes(32))))
_log = logging.getLogger(__name__)


class ManifestChangedError(ArtifactError):
    """Another publisher than before claims a name. Nothing was changed; a person decides."""


class SourceChangedError(ArtifactError):
    """A source gives another model than it did. Nothing was changed; a person decides."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A name's publisher, since when, and its newest manifest; None where that is lost or was never seen."""

    name: str
    publisher: PeerId
    since_ms: int
    signed: SignedManifest | None

    @property
    def since(self) -> str:
        """The day, as a clause."""
        return "for an unknown time" if self.since_ms <= 0 else f"since {_day(self.since_ms)}"


class Manifests:
    """The folder `home/manifests`. Every method blocks for some small files. They raise ArtifactError when the disk
    refuses."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = home / "manifests"
        self._clock = clock

    # -- by name

    def accept(self, signed: SignedManifest, *, header: GgufHeader | None = None) -> SignedManifest:
        """Take the manifest as what its name means here; returns the edition in force, which an older one is not.

        Raises ManifestChangedError when the name belongs to another publisher, ArtifactError when the model's proved
        `header` says otherwise than the manifest.
        """
        if header is not None:
            signed.manifest.check_header(header)
        name = signed.manifest.name
        with self._locked():
            pin = self.pin(name)
            if pin is not None and pin.publisher != signed.publisher:
                raise _changed(pin, signed)
            if pin is not None and pin.signed is not None and pin.signed.manifest.number >= signed.manifest.number:
                return pin.signed
            self._write_pin(name, signed.publisher, self._now_ms() if pin is None else pin.since_ms, signed.wire)
            self._keep(signed)
        return signed

    def pin(self, name: str) -> Pin | None:
        """Whose the name is; None when it is nobody's yet."""
        if not NAME_PATTERN.fullmatch(name):
            return None
        found = [pin for path in self._names.glob(f"*.{name}.json") if (pin := _read_pin(path)) and pin.name == name]
        return min(found, key=lambda pin: (pin.since_ms, str(pin.publisher)), default=None)

    def pins(self) -> list[Pin]:
        """Every name that belongs to somebody, in order."""
        names = {pin.name for path in self._names.glob("*.json") if (pin := _read_pin(path))}
        return [pin for name in sorted(names) if (pin := self.pin(name))]

    def by_name(self, name: str) -> SignedManifest | None:
        """The manifest that the name stands for."""
        pin = self.pin(name)
        return None if pin is None else pin.signed

    def pinned(self, name: str) -> bytes | None:
        """The id of the model that the name stands for."""
        signed = self.by_name(name)
        return None if signed is None else signed.manifest.model_id

    def trust(self, name: str, publisher: PeerId) -> None:
        """From now on the name is this publisher's: a person's word. Raises ValueError for what is no name."""
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a model's name")
        with self._locked():
            pin = self.pin(name)
            if pin is not None and pin.publisher == publisher:
                return
            self._drop_pins(name)
            self._write_pin(name, publisher, self._now_ms(), b"")

    def forget(self, name: str) -> bool:
        """The name is nobody's again; False when it was nobody's."""
        with self._locked():
            return NAME_PATTERN.fullmatch(name) is not None and self._drop_pins(name)

    def next_number(self, name: str) -> int:
        """The number of the next edition of what is published here under `name`."""
        signed = self.by_name(name)
        return self._now_ms() if signed is None else max(self._now_ms(), signed.manifest.number + 1)

    # -- by id

    def keep(self, signed: SignedManifest, *, header: GgufHeader | None = None) -> None:
        """Remember what a publisher says of a model; the name in it gets no meaning by that. Raises ArtifactError when
        the model's proved `header` says otherwise."""
        if header is not None:
            signed.manifest.check_header(header)
        with self._locked():
            self._keep(signed)

    def by_id(self, model_id: bytes, *, header: GgufHeader | None = None) -> SignedManifest | None:
        """What is said of this model, before others by whom its name belongs to. One that contradicts the proved
        `header` is removed."""
        found = []
        for path in self._models.glob(f"{model_id_text(model_id)}.*.manifest"):
            signed = _read_manifest(path)
            if signed is None or signed.manifest.model_id != model_id:
                continue
            try:
                if header is not None:
                    signed.manifest.check_header(header)
            except ArtifactError as error:
                _log.warning("%s; its publisher is %s", error, signed.publisher)
                path.unlink(missing_ok=True)
                continue
            pin = self.pin(signed.manifest.name)
            is_owner = pin is not None and pin.publisher == signed.publisher
            found.append((is_owner, signed.manifest.number, str(signed.publisher), signed))
        return max(found, key=lambda each: each[:3])[3] if found else None

    # -- sources

    def note_source(self, ref: str, model_id: bytes) -> None:
        """The file behind `ref` was fetched and is this model. Raises SourceChangedError when it was another before."""
        with self._locked():
            seen = self.source(ref)
            if seen is None:
                path = self._sources / f"{_digest(ref)}.{model_id_text(model_id)}.json"
                write_json(path, {"ref": ref, "since_ms": self._now_ms()})
            elif seen != model_id:
                raise SourceChangedError(
                    f"{ref} gave the model {model_id_text(seen)} before and gives {model_id_text(model_id)} now: its "
                    f"file was replaced. If that is as it should be, run `meshswarm models trust {ref} --forget` first"
                )

    def source(self, ref: str) -> bytes | None:
        """The id of the model that `ref` gave."""
        seen = [_seen(path) for path in sorted(self._sources.glob(f"{_digest(ref)}.*.json"))]
        return next((model_id for model_id in seen if model_id is not None), None)

    def forget_source(self, ref: str) -> bool:
        """Whatever `ref` gives next is right; False when it never gave anything."""
        with self._locked():
            paths = list(self._sources.glob(f"{_digest(ref)}.*.json"))
            for path in paths:
                path.unlink(missing_ok=True)
            return bool(paths)

    def catalogue(self) -> tuple[CatalogueEntry, ...]:
        """The built-in list, with the ids of those models whose files this peer has seen."""
        return tuple(
            entry if entry.model_id is not None else replace(entry, model_id=self.source(entry.ref))
            for entry in CATALOGUE
        )

    # -- files

    @property
    def _names(self) -> Path:
        return self._folder / "names"

    @property
    def _models(self) -> Path:
        return self._folder / "models"

    @property
    def _sources(self) -> Path:
        return self._folder / "sources"

    def _write_pin(self, name: str, publisher: PeerId, since_ms: int, wire: bytes) -> None:
        fields = {"since_ms": since_ms, "wire": base64.b64encode(wire).decode()}
        write_json(self._names / f"{publisher}.{name}.json", fields)

    def _drop_pins(self, name: str) -> bool:
        paths = [path for path in self._names.glob(f"*.{name}.json") if _name_in(path) == name]
        for path in paths:
            path.unlink(missing_ok=True)
        return bool(paths)

    def _keep(self, signed: SignedManifest) -> None:
        path = self._models / f"{model_id_text(signed.manifest.model_id)}.{signed.publisher}.manifest"
        known = _read_manifest(path) if path.exists() else None
        if known is not None and known.manifest.number >= signed.manifest.number:
            return
        write_whole(path, signed.wire)
        kept = sorted(self._models.glob("*.manifest"), key=_age)
        for oldest in kept[: max(0, len(kept) - MAX_KEPT)]:
            oldest.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time, of all processes and threads."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / ".lock").open("ab") as file:
                _lock(file)
                yield
        except OSError as error:
            raise ArtifactError(f"{self._folder} cannot be used: {error.strerror or error}") from error

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _lock(file: Any) -> None:
    """Until `file` is closed."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX)


def _changed(pin: Pin, signed: SignedManifest) -> ManifestChangedError:
    claimed = model_id_text(signed.manifest.model_id)
    known = "" if pin.signed is None else f" (model {model_id_text(pin.signed.manifest.model_id)})"
    return ManifestChangedError(
        f"the name {pin.name} is claimed by another publisher than here: {signed.publisher} says it is the model "
        f"{claimed}, but {pin.since} it belongs to {pin.publisher}{known}. Nothing was changed. If you know that it "
        f"has passed on, run `meshswarm models trust {pin.name} {signed.publisher}`; else name the model by its id"
    )


def _name_in(path: Path) -> str | None:
    """The model's name in the name of a pin's file."""
    name = path.name[_PUBLISHER_CHARS + 1 : -len(".json")]
    return name if NAME_PATTERN.fullmatch(name) else None


def _read_pin(path: Path) -> Pin | None:
    """The pin that a file is; None for one that no pin is named like. What is damaged in it is only lost."""
    name = _name_in(path)
    try:
        publisher = PeerId.parse(path.name[:_PUBLISHER_CHARS])
    except ValueError:
        return None
    if name is None:
        return None
    fields = read_json(path) or {}
    since_ms, wire = fields.get("since_ms"), fields.get("wire")
    try:
        signed = SignedManifest.parse(base64.b64decode(wire or "", validate=True)) if wire else None
    except (MeshswarmError, ValueError, TypeError) as error:
        _log.warning("the manifest in %s is damaged (%s); the name %s stays its publisher's", path, error, name)
        signed = None
    if signed is not None and (signed.publisher, signed.manifest.name) != (publisher, name):
        signed = None
    return Pin(name, publisher, since_ms if type(since_ms) is int else 0, signed)


def _read_manifest(path: Path) -> SignedManifest | None:
    try:
        with path.open("rb") as file:
            return SignedManifest.parse(file.read(MAX_MANIFEST_BYTES + 1))
    except (OSError, MeshswarmError) as error:
        _log.warning("the manifest %s cannot be used: %s", path, error)
        return None


def _digest(ref: str) -> str:
    return hashlib.sha256(ref.encode()).hexdigest()


def _seen(path: Path) -> bytes | None:
    """The model that a source gave, which is in the name of its note."""
    try:
        return parse_model_id(path.name.split(".")[1])
    except (IndexError, ValueError):
        return None


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _day(since_ms: int) -> str:
    try:
        return datetime.fromtimestamp(since_ms / 1000, UTC).strftime("%Y-%m-%d")
    except (OverflowError, OSError, ValueError):
        return "an unknown day"
