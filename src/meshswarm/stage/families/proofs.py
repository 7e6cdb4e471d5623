"""On which builds of llama.cpp the table's cuts are proved.

The rule this file keeps: a proof belongs to the build it ran on, since node names, metadata and arithmetic change
between builds without notice. On another build nothing is split until this machine has proved it itself.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.files import read_json, write_json

PROVED_BUILDS = frozenset({"0.3.36"})
"""Versions of llama-cpp-python on which the parity tests of this project passed."""


def installed_build() -> str:
    """The version of llama-cpp-python that is installed."""
    return importlib.metadata.version("llama_cpp_python")


@dataclass(frozen=True, slots=True)
class Proofs:
    """Which architectures of the table are proved on `build`: all of them on a proved one, else those in `local`."""

    build: str
    local: frozenset[str] = frozenset()

    @classmethod
    def here(cls, folder: Path | None = None) -> Proofs:
        """On the installed build, with what `note_proved` wrote into `folder`."""
        build = installed_build()
        return cls(build, frozenset() if folder is None else _read(folder).get(build, frozenset()))

    def cover(self, architecture: str) -> bool:
        return self.build in PROVED_BUILDS or architecture in self.local


def note_proved(folder: Path, architecture: str) -> None:
    """Write down that cuts of `architecture` were proved on this machine, on the installed build."""
    known = _read(folder)
    build = installed_build()
    known[build] = known.get(build, frozenset()) | {architecture}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _NAME, {key: sorted(value) for key, value in known.items()})


_NAME = "families.json"


def _read(folder: Path) -> dict[str, frozenset[str]]:
    fields = read_json(folder / _NAME) or {}
    return {
        build: frozenset(name for name in names if isinstance(name, str))
        for build, names in fields.items()
        if isinstance(names, list)
    }
