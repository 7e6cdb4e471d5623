"""What a peer's own copies take on disk, and which of them go when that is more than it may.

The rule this file keeps: only files that the peer itself made are counted and removed (what was fetched, under
`pieces/`, and slices cut, under `slices/`), never one that somebody imported in place, and nothing in use. What is
easiest to have again goes first: slices that can be cut anew, then what is not rare in the swarm. Nothing goes where it
does not help.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from meshswarm.artifacts.merkle import parse_model_id
from meshswarm.artifacts.ranges import Ranges
from meshswarm.artifacts.store.pieces import disk_bytes
from meshswarm.artifacts.store.store import Store
from meshswarm.errors import ArtifactError

ENOUGH_HOLDERS = 3
"""A model with so many other holders is not rare. One of which nobody knows how many it has may be."""


class Kind(StrEnum):
    """What a holding is."""

    SLICE = "slice"
    PIECES = "pieces"


Needs = Mapping[bytes, Sequence[Ranges]]
"""By model: which bytes of each of its files are needed now, though more of them may be here."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Something of the peer's own on its disk: a slice, or all that was fetched of a model. `used_at`: seconds of the
    system's clock when it was last cut, loaded or fetched into. `n_bytes`: what it takes, holes not counted.

    `spare_bytes`: what is gained when it goes. `needed`: bytes of each of the model's files that stay even then.
    `is_of_whole`: a slice of a model that somebody imported, so it can be cut again.
    """

    model_id: bytes
    kind: Kind
    path: Path
    n_bytes: int
    used_at: float
    spare_bytes: int
    needed: tuple[Ranges, ...] = ()
    is_of_whole: bool = False


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
    served: Collection[bytes] = (),
    n_holders: Mapping[bytes, int] | None = None,
) -> Eviction:
    """What goes so that all that is here and `wanted_bytes` more stay within `quota_bytes`.

    `in_use`: models whose own files are loaded or open to write: what was fetched of them stays. `slices_in_use`:
    slices that are loaded, or about to be. `served`: models of which slices are loaded: their pieces go after others
    that are no rarer. `n_holders`: other peers that hold each model, where that is known.
    """
    excess = sum(holding.n_bytes for holding in holdings) + wanted_bytes - quota_bytes
    has_pieces = {holding.model_id for holding in holdings if holding.kind is Kind.PIECES}

    def may_go(holding: Holding) -> bool:
        if holding.kind is Kind.SLICE:
            return holding.path not in slices_in_use
        return holding.model_id not in in_use and holding.spare_bytes > 0

    def worth(holding: Holding) -> tuple[int, int, bool, float]:
        """Sorts what is cheapest to have again first."""
        if holding.kind is Kind.SLICE and (holding.is_of_whole or holding.model_id in has_pieces):
            return 0, 0, False, holding.used_at  # in no time
        others = (n_holders or {}).get(holding.model_id, 0)
        is_rare = others < ENOUGH_HOLDERS
        return 1 + is_rare, others if is_rare else 0, holding.model_id in served, holding.used_at

    go = []
    for holding in sorted(filter(may_go, holdings), key=worth):
        if excess <= 0:
            break
        go.append(holding)
        excess -= holding.spare_bytes
    return Eviction(tuple(go), 0) if excess <= 0 else Eviction((), excess)


class Disk:
    """The holdings under one peer's folder. Methods look at the disk: call them in a thread."""

    def __init__(self, home: Path, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._slices = home / "slices"
        self._store = store
        self._clock = clock

    def holdings(self, needs: Needs | None = None) -> list[Holding]:
        """All there are. What belongs to no known model is not among them. Of the models in `needs` only the rest may
        go; their fetched files are hashed again where they were touched."""
        return [*self._fetched(needs or {}), *self._cut()]

    def used(self, model_id: bytes) -> dict[Kind, int]:
        """Bytes on disk that a model takes, by what they are."""
        return {
            kind: sum(each.n_bytes for each in self.holdings() if each.model_id == model_id and each.kind is kind)
            for kind in Kind
        }

    def remove(self, holding: Holding) -> None:
        """Remove it, but what is needed of it. Nobody may have the files of its pieces open. Raises ArtifactError."""
        if holding.kind is Kind.SLICE:
            remove_slice(holding.path)
        elif holding.needed:
            self._store.keep_pieces(holding.model_id, holding.needed)
        else:
            self._store.drop_pieces(holding.model_id)

    def _fetched(self, needs: Needs) -> Iterator[Holding]:
        pieces = self._store.pieces
        for model_id in self._store.known():
            folders = [pieces.path(content).parent for content in self._store.contents(model_id)]
            there = [folder for folder in folders if folder.is_dir()]
            if there:
                n_bytes, used_at = sum(map(disk_bytes, there)), self._used_at(path for path in there)
                needed = tuple(needs.get(model_id, ()))
                spare = self._store.spare_bytes(model_id, needed) if needed else n_bytes
                yield Holding(model_id, Kind.PIECES, there[0], n_bytes, used_at, min(spare, n_bytes), needed=needed)

    def _cut(self) -> Iterator[Holding]:
        for path in sorted(self._slices.glob("*/*.gguf")):
            try:
                model_id = parse_model_id(path.parent.name)
            except ValueError:
                continue
            used_at = self._used_at([path, path.with_name(path.name + ".json")])
            n_bytes, is_of_whole = disk_bytes(path), self._store.noted_paths(model_id) is not None
            yield Holding(model_id, Kind.SLICE, path, n_bytes, used_at, n_bytes, is_of_whole=is_of_whole)

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
