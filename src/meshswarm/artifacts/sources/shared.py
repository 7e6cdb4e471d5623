"""The downloads that all peers of this user share: which of them are unfinished, and how one is removed.

The rule this file keeps: nothing is removed that is not below the folder of downloads, or that somebody is just
downloading.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.sources.part_file import PartFile
from meshswarm.errors import ArtifactError, ConfigError

_NOTES = ("*/*/.*.part.json", "*/*/*/.*.part.json")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A download that can be gone on with: where it will lie, how much of it is here, and of how much."""

    target: Path
    n_bytes: int
    length: int


def unfinished_downloads(folder: Path) -> list[Unfinished]:
    """Those below the folder of downloads, by path."""
    found = []
    for note in sorted({note for pattern in _NOTES for note in folder.glob(pattern)}):
        target = note.with_name(note.name.removeprefix(".").removesuffix(".part.json"))
        part = PartFile(target)
        version = part.begun()
        if version is not None:
            found.append(Unfinished(target, part.n_noted, version.length))
    return found


def remove_downloads(targets: Iterable[Path], folder: Path) -> int:
    """Remove files that were downloaded, whole or in part, and their empty folders. Bytes freed.

    Raises ConfigError for one that is not below the folder of downloads, ArtifactError for one that is just being
    downloaded or cannot be removed.
    """
    n_bytes = 0
    for target in targets:
        if not is_download(target, folder):
            raise ConfigError(f"{target} is no download of this program: those lie in {folder}")
        if not target.parent.is_dir():
            continue
        part = PartFile(target)
        if not part.try_lock():
            raise ArtifactError(f"{target.name} is just being downloaded: stop that first")
        try:
            n_bytes += part.remove()
        finally:
            part.close()
    return n_bytes


def is_download(path: Path, folder: Path) -> bool:
    """True for a path below the folder of downloads, dots and links in it followed."""
    below = Path(os.path.realpath(folder))
    return below in (Path(os.path.realpath(path.parent)) / path.name).parents and path.name not in ("", ".", "..")
