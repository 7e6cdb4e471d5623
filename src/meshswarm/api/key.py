"""The API key: what a client off loopback must show, kept in a file that only its owner can read."""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from meshswarm.errors import ConfigError

_PREFIX = "mesh-"


class ApiKey(NamedTuple):
    """`created` says that this call made the key: the moment to show it."""

    text: str
    created: bool


def load_or_create_api_key(path: Path) -> ApiKey:
    """The key in `path`, made on first use with mode 0600. Raises ConfigError when it is open to others or damaged."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return ApiKey(_load(path), created=False)
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be made: {error.strerror or error}") from error
    text = _PREFIX + secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
    return ApiKey(text, created=True)


def _load(path: Path) -> str:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror or error}") from error
    if mode & 0o077 and sys.platform != "win32":  # POSIX modes mean nothing there
        raise ConfigError(
            f"the API key file {path} can be read or written by others (mode {mode:04o}); delete it to get a new key"
        )
    if not re.fullmatch(r"[!-~]{16,256}", text):
        raise ConfigError(f"the API key file {path} is damaged; delete it to get a new key")
    return text
