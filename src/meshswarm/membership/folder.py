"""One private swarm on disk: its keys, the owner's key where this is the owner's machine, the newest member list.

    swarm.key      the keys, mode 0600, as JSON            owner.key      Ed25519, signs member lists
    member.list    the owner's list, as it was signed      invited.json   members to join by, from the invite
    members.json   who was met here                        peers.json     who to ask first at the next start

The rule this file keeps: every file is written whole or not at all, changes of two processes follow one another, and a
key that others could have read, or that is not the one it should be, is never used silently.
"""

from __future__ import annotations

import contextlib
import json
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshswarm.artifacts.files import read_json, write_whole
from meshswarm.config import Address, Home, HomeLock
from meshswarm.dht.wire import WireError
from meshswarm.errors import ArtifactError, ConfigError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.invite import MAX_INVITED_PEERS, MAX_PEER_ADDRESSES, Invited
from meshswarm.membership.member_list import MAX_LIST_BYTES, MemberList
from meshswarm.membership.standing import Standing
from meshswarm.net.swarm import MAX_SWARM_KEYS, SWARM_KEY_BYTES, key_id

_VERSION = 1
_LOCK_WAIT_S = 5.0
_MAX_KEY_FILE_BYTES = 64 * 1024

Stamp = tuple[int, int]


class SwarmFolder:
    """The folder `root` of the private swarm `name`."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root
        self.key = root / "swarm.key"
        self.owner_key = root / "owner.key"
        self.list = root / "member.list"
        self.members = root / "members.json"
        self.peers = root / "peers.json"
        self._invited = root / "invited.json"

    # -- keys and list

    def load(self) -> Standing:
        """Raises ConfigError when the key is missing, readable by others, or damaged: without it there is no swarm."""
        try:
            _check_mode(self.key)
            with self.key.open("rb") as file:
                saved = json.loads(file.read(_MAX_KEY_FILE_BYTES))
            standing = self._read(saved)
        except FileNotFoundError:
            raise ConfigError(
                f"the swarm {self.name!r} is private and its key file {self.key} is gone. Without it this peer does "
                "not start, and never in a public swarm instead: put the file back, or take a new invite from a member "
                "(`meshswarm swarm join`)"
            ) from None
        except OSError as error:
            raise ConfigError(f"the key file {self.key} cannot be used: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"the key file {self.key} is damaged; put a backup in its place, or take a new invite from a member "
                "(`meshswarm swarm join`)"
            ) from error
        return self._with_list(standing)

    def save(self, standing: Standing) -> None:
        """Raises ConfigError when the disk refuses."""
        fields = {
            "version": _VERSION,
            "name": standing.name,
            "owner": str(standing.owner),
            "lineage": _written(standing.lineage),
            "keys": [_written(key) for key in standing.keys],
            "floor": standing.floor,
        }
        if standing.members is not None:  # before the key: a key without its list would be believed more than it is
            self._write(self.list, standing.members.wire)
        self._write(self.key, json.dumps(fields, indent=1).encode() + b"\n")

    def update(self, change: Callable[[Standing], Standing]) -> Standing:
        """What `change` makes of what is on disk, written there; no other process changes it meanwhile."""
        with self.locked():
            before = self.load()
            after = change(before)
            if after != before or after.members != before.members:
                self.save(after)
            return after

    def stamp(self) -> tuple[Stamp, Stamp]:
        """Changes when another process has written keys or list."""
        return _stamp(self.key), _stamp(self.list)

    def owner(self) -> Identity | None:
        """The owner's key pair, on the machine where the swarm was made."""
        return Identity.load_or_create(self.owner_key) if self.owner_key.exists() else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises ConfigError when another process does not end its change."""
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                lock = HomeLock(Home(self.root))
                break
            except ConfigError:
                if time.monotonic() > until or not self.root.is_dir():
                    raise ConfigError(f"another process does not let go of the folder {self.root}") from None
                time.sleep(0.02)
        try:
            yield
        finally:
            lock.release()

    # -- who to join by

    def invited(self) -> list[Invited]:
        """Members of the invite and their addresses; those that cannot be read are left out."""
        saved = read_json(self._invited) or {}
        entries = saved.get("peers")
        found: list[Invited] = []
        for entry in entries[:MAX_INVITED_PEERS] if isinstance(entries, list) else ():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                addresses = tuple(Address.parse(text) for text in entry["addresses"][:MAX_PEER_ADDRESSES])
                found.append((PeerId.parse(entry["peer"]), addresses))
        return found

    def save_invited(self, peers: tuple[Invited, ...]) -> None:
        entries = [{"peer": str(peer), "addresses": [str(address) for address in found]} for peer, found in peers]
        self._write(self._invited, json.dumps({"version": _VERSION, "peers": entries}, indent=1).encode() + b"\n")

    # -- inside

    def _read(self, saved: dict[str, object]) -> Standing:
        if saved["version"] != _VERSION:
            raise ConfigError(f"the key file {self.key} was written by a newer meshswarm; update this one")
        keys, floor = saved["keys"], saved["floor"]
        if not isinstance(keys, list) or not 1 <= len(keys) <= MAX_SWARM_KEYS or type(floor) is not int:
            raise ValueError("it has another form")
        owner = PeerId.parse(str(saved["owner"]))
        return Standing(self.name, owner, _read_key(saved["lineage"]), tuple(map(_read_key, keys)), floor=floor)

    def _with_list(self, standing: Standing) -> Standing:
        try:
            with self.list.open("rb") as file:
                data = file.read(MAX_LIST_BYTES + 1)
        except FileNotFoundError:
            return standing
        except OSError as error:
            raise ConfigError(f"the member list {self.list} cannot be used: {error.strerror or error}") from error
        try:
            members = MemberList.decode(data, standing.owner, standing.swarm_id)
        except WireError as error:
            raise ConfigError(
                f"the member list {self.list} is not one that the swarm's owner signed ({error}); move it away, and "
                "the newest comes from the next member that this peer meets"
            ) from error
        return standing.with_list(members)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_whole(path, data)  # mode 0600
        except ArtifactError as error:
            raise ConfigError(str(error)) from error


def _written(key: bytes) -> dict[str, str]:
    return {"key": key.hex(), "id": key_id(key).hex()}


def _read_key(value: object) -> bytes:
    if not isinstance(value, dict):
        raise ValueError("a key has another form")
    key = bytes.fromhex(value["key"])
    if len(key) != SWARM_KEY_BYTES or key_id(key).hex() != value["id"]:
        raise ValueError("a key was changed")
    return key


def _check_mode(path: Path) -> None:
    if sys.platform == "win32":  # POSIX modes mean nothing there
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"the key file {path} can be read or written by others (mode {mode:04o}); if nobody has copied it, run "
            f"`chmod 600 {path}`, otherwise have the swarm's owner change its key (`meshswarm swarm rotate --now`)"
        )


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)
