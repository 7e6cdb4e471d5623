"""What a peer's own copies take on disk, and which of them go when that is more than it may.

The rule this file keeps: only files that the peer itself made are counted and removed (what was fetched, under
`pieces/`, and slices cut, under `slices/`), never one that somebody imported in place, and never one in use. What is
easiest to have again goes first: what is not served and not rare in the swarm. Nothing goes where it does not help.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshswarm.artifacts.merkle import parse_model_id
from meshswarm.artifacts.store.pieces import disk_bytes
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError

ENOUGH_HOLDERS = 3
"""A model with so many other holders is not rare. One of which nobody knows how many it has may be."""


class Kind(StrEnum):
    """What a holding is."""

    SLICE = "slice"
    PIECES = "pieces"


@dataclass(frozen=True, slots=True)
class Holding:
    """Something of the peer's own on its disk: a slice, or all that was fetched of a model. `used_at`: seconds of the
    system's clock when it was last cut, loaded or fetched into. `n_bytes`: what it takes, holes not counted."""

    model_id: bytes
    kind: Kind
    path: Path
    n_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class Eviction:
    """What goes, and how many bytes are still too many after that: where any are, nothing goes."""

    go: tuple[Holding, ...]
    short_bytes: int


def choose_evictions(
    holdings: Sequence[Holding],
    *,
    quota_bytes: int,
    wanted_bytes: int = 0,
    in_use: Collection[bytes] = (),
    slices_in_use: Collection[Path] = (),
    n_holders: Mapping[bytes, int] | None = None,
) -> Eviction:
    """What goes so that all that is here and `wanted_bytes` more stay within `quota_bytes`.

    `in_use`: models that are served, fetched or wanted now: what was fetched of them stays. `slices_in_use`: slices
    that are loaded. `n_holders`: other peers that hold each model, where that is known.
    """
    excess = sum(holding.n_bytes for holding in holdings) + wanted_bytes - quota_bytes
    has_pieces = {holding.model_id for holding in holdings if holding.kind is Kind.PIECES}

    def may_go(holding: Holding) -> bool:
        return holding.path not in slices_in_use if holding.kind is Kind.SLICE else holding.model_id not in in_use

    def worth(holding: Holding) -> tuple[int, int, float]:
        """Sorts what is cheapest to have again first."""
        if holding.kind is Kind.SLICE and holding.model_id in has_pieces:
            return 0, 0, holding.used_at  # cut again in no time
        others = (n_holders or {}).get(holding.model_id, 0)
        is_rare = others < ENOUGH_HOLDERS
        return (2, others, holding.used_at) if is_rare else (1, 0, holding.used_at)

    go = []
    for holding in sorted(filter(may_go, holdings), key=worth):
        if excess <= 0:
            break
        go.append(holding)
        excess -= holding.n_bytes
    return Eviction(tuple(go), 0) if excess <= 0 else Eviction((), excess)


class Disk:
    """The holdings under one peer's folder. Methods look at the disk: call them in a thread."""

    def __init__(self, home: Path, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._slices = home / "slices"
        self._store = store
        self._clock = clock

    def holdings(self) -> list[Holding]:
        """All there are. What belongs to no known model is not among them."""
        return [*self._fetched(), *self._cut()]

    def used(self, model_id: bytes) -> dict[Kind, int]:
        """Bytes on disk that a model takes, by what they are."""
        return {
            kind: sum(each.n_bytes for each in self.holdings() if each.model_id == model_id and each.kind is kind)
            for kind in Kind
        }

    def make_room(
        self,
        quota_bytes: int,
        wanted_bytes: int = 0,
        *,
        in_use: Collection[bytes] = (),
        slices_in_use: Collection[Path] = (),
        n_holders: Mapping[bytes, int] | None = None,
    ) -> tuple[Holding, ...]:
        """Remove what `choose_evictions` chooses; what went. Raises ArtifactError that says what is too much."""
        holdings = self.holdings()
        eviction = choose_evictions(
            holdings,
            quota_bytes=quota_bytes,
            wanted_bytes=wanted_bytes,
            in_use=in_use,
            slices_in_use=slices_in_use,
            n_holders=n_holders,
        )
        if eviction.short_bytes:
            taken = sum(holding.n_bytes for holding in holdings)
            raise ArtifactError(
                f"{wanted_bytes / 1e6:.1f} MB more do not fit into the {quota_bytes / 1e6:.1f} MB of disk that this "
                f"peer may use: {taken / 1e6:.1f} MB are taken, and {eviction.short_bytes / 1e6:.1f} MB too few go; "
                "allow it more (--disk), or serve fewer layers"
            )
        for holding in eviction.go:
            self._remove(holding)
        return eviction.go

    def _remove(self, holding: Holding) -> None:
        if holding.kind is Kind.PIECES:
            self._store.drop_pieces(holding.model_id)
            return
        remove_slice(holding.path)

    def _fetched(self) -> Iterator[Holding]:
        pieces = self._store.pieces
        for model_id in self._store.known():
            folders = [pieces.path(content).parent for content in self._store.contents(model_id)]
            there = [folder for folder in folders if folder.is_dir()]
            if there:
                n_bytes = sum(map(disk_bytes, there))
                yield Holding(model_id, Kind.PIECES, there[0], n_bytes, self._used_at(path for path in there))

    def _cut(self) -> Iterator[Holding]:
        for path in sorted(self._slices.glob("*/*.gguf")):
            try:
                model_id = parse_model_id(path.parent.name)
            except ValueError:
                continue
            used_at = self._used_at([path, path.with_name(path.name + ".json")])
            yield Holding(model_id, Kind.SLICE, path, disk_bytes(path), used_at)

    def _used_at(self, paths: Iterable[Path]) -> float:
        """When one of these was last touched; a time to come counts as now."""
        times = [path.stat().st_mtime for path in paths if path.exists()]
        return min(max(times, default=0.0), self._clock())


def remove_slice(path: Path) -> None:
    """Remove a slice and what is noted of it. Raises ArtifactError when it cannot be."""
    try:
        path.with_name(path.name + ".json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be removed: {error.strerror or error}") from error
