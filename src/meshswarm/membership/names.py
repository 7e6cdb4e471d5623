"""What a private swarm may be called: a name that is also a folder's, on every system.

The rule this file keeps: two names that a person could take for one another are one name here. Otherwise `--swarm Home`
would open the public swarm of that name beside the private `home`.
"""

from __future__ import annotations

import re

from meshswarm.config import PUBLIC_SWARM
from meshswarm.errors import ConfigError

MAX_NAME_CHARS = 40
_PATTERN = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{MAX_NAME_CHARS - 1}}}")
_OF_WINDOWS = {"con", "prn", "aux", "nul", *(f"{device}{n}" for device in ("com", "lpt") for n in range(10))}


def checked_name(name: str) -> str:
    """`name`, when a private swarm may have it. Raises ConfigError."""
    if name == PUBLIC_SWARM:
        raise ConfigError(f"{PUBLIC_SWARM!r} is the swarm that everybody may enter; choose another name")
    if _PATTERN.fullmatch(name) is None or name in _OF_WINDOWS:
        raise ConfigError(
            f"a private swarm's name is 1 to {MAX_NAME_CHARS} lower-case letters, digits, '-' and '_', beginning with "
            f"a letter or digit; {name[:80]!r} is not"
        )
    return name


def folded(name: str) -> str:
    """What a name looks like to somebody who does not look closely."""
    return name.strip().casefold()
