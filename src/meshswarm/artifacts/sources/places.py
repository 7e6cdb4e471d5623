"""Where a fetched file lies on this disk, and what it is called there.

The rule this file keeps: a name from outside is never more than a plain name. Whatever a URL or a hub says, the file
stays within its own folder, and two sources never share one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from meshswarm.artifacts.gguf.split import MAX_PARTS, part_name
from meshswarm.errors import ConfigError

_MAX_NAME_CHARS = 150
_RESERVED = frozenset({"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10))})
"""What Windows takes for devices, whatever their ending."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def safe_name(name: str) -> str:
    """A name for a GGUF file made of the last part of `name`: letters, digits, dots, dashes, pluses, underscores."""
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "_", re.split(r"[/\\]", name)[-1])
    plain = plain if plain.lower().endswith(".gguf") else f"{plain}.gguf"
    plain = plain[-_MAX_NAME_CHARS:].lstrip(".-_ ")
    if plain.lower() in ("gguf", ""):
        return "model.gguf"
    return f"_{plain}" if plain.partition(".")[0].upper() in _RESERVED else plain


def part_names(name: str) -> tuple[str, ...]:
    """All files of the model that the file `name` is, or is one part of, in order. Raises ConfigError when no model has
    such a part."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ConfigError(f"{name[-80:]} would be part {number} of {count}: that cannot be")
    return tuple(part_name(match["stem"], index, count) for index in range(count))


def place(folder: Path, kind: str, readable: str, *identity: str) -> Path:
    """The folder for what `identity` names, below `folder`; `readable` is there for people."""
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    plain = re.sub(r"[^A-Za-z0-9.+-]+", "_", readable).strip("._-")[:80]
    return folder / kind / f"{plain}_{digest}"
