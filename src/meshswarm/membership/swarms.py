"""The private swarms that a peer's folder knows, and which swarm a peer that starts belongs to.

A name is private here when the folder's own note says so, or when there is a folder of that name below `swarms/`: one
of the two outlives the loss of the other. The rule this file keeps: whatever is lost, damaged or mistyped, nobody who
meant a private swarm ends up in a public one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshswarm.artifacts.files import write_json
from meshswarm.config import PUBLIC_SWARM, Home
from meshswarm.errors import ArtifactError, ConfigError
from meshswarm.identity import Identity
from meshswarm.membership.folder import SwarmFolder
from meshswarm.membership.invite import Invite, Invited
from meshswarm.membership.names import checked_name, folded
from meshswarm.membership.standing import Standing
from meshswarm.net.swarm import Swarm

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Membership:
    """The swarm that a peer runs in. `folder` and `standing` are None for a public one."""

    swarm: Swarm
    known_peers: Path
    invited: tuple[Invited, ...] = ()
    folder: SwarmFolder | None = None
    standing: Standing | None = None


class Swarms:
    """The private swarms of `home`."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def names(self) -> list[str]:
        """Every name that is private here. Raises ConfigError when that cannot be known."""
        return sorted({*self._noted(), *self._folders()})

    def folder(self, name: str) -> SwarmFolder:
        """Raises ConfigError when no private swarm has this name here."""
        if name not in self.names():
            raise ConfigError(
                f"there is no private swarm {name[:80]!r} in the folder {self._home.root}; {self._advice()}"
            )
        return SwarmFolder(name, self._home.swarms / name)

    def only(self, name: str | None) -> SwarmFolder:
        """The swarm `name`, or without one the only private swarm there is."""
        names = self.names()
        if name is None and len(names) != 1:
            raise ConfigError(f"say which private swarm in the folder {self._home.root}; {self._advice()}")
        return self.folder(names[0] if name is None else name)

    # -- making, joining, leaving

    def create(self, name: str, key: bytes, owner: Identity | None = None) -> SwarmFolder:
        """A new private swarm, owned here. Raises ConfigError when there is one of that name."""
        folder = self._new_folder(checked_name(name))
        with folder.locked():
            self._note(name, Swarm(name, key).swarm_id)
            signer = owner or Identity.load_or_create(folder.owner_key)
            folder.save(Standing(name, signer.peer_id, key, (key,)))
        return folder

    def join(self, invite: Invite, name: str | None = None) -> SwarmFolder:
        """Enters the swarm of `invite`, called `name` here (its own name by default). Joining a swarm that is here
        already takes a newer key over. Raises ConfigError when another swarm has the name."""
        name = checked_name(invite.name if name is None else name)
        offered = Standing(name, invite.owner, invite.lineage, (invite.key,), floor=invite.number)
        noted = self._noted().get(name)
        if noted is not None and not hmac.compare_digest(noted, offered.swarm_id):
            raise ConfigError(
                f"another private swarm is called {name!r} in the folder {self._home.root}; choose what this one is "
                "called here with --as NAME"
            )
        folder = SwarmFolder(name, self._home.swarms / name)
        if not folder.key.exists():
            folder = folder if folder.root.is_dir() else self._new_folder(name, is_known=noted is not None)
            with folder.locked():
                self._note(name, offered.swarm_id)
                folder.save(offered)
        else:
            known = folder.load()
            if (known.lineage, known.owner) != (offered.lineage, offered.owner):
                raise ConfigError(f"another private swarm is called {name!r} in the folder {self._home.root}")
            folder.update(lambda standing: standing.invited(invite.key, invite.number))
        if invite.peers:
            folder.save_invited(invite.peers)
        return folder

    def leave(self, name: str) -> None:
        """Forgets a private swarm with its key, and that its name was private."""
        folder = self.folder(name)
        try:
            if folder.root.exists():
                shutil.rmtree(folder.root)
        except OSError as error:
            raise ConfigError(f"the folder {folder.root} cannot be removed: {error.strerror or error}") from error
        self._write({other: swarm_id for other, swarm_id in self._noted().items() if other != name})

    # -- starting

    def open(self, name: str | None, *, private: bool = False, now_ms: int) -> Membership:
        """The swarm for a peer that was told `--swarm name` and perhaps `--private`; `now_ms` is Unix time.

        Without a name it is the public one, unless there are private swarms here: then a person has to say which.
        Raises ConfigError whenever a private swarm was meant, or may have been, and cannot be opened.
        """
        names = self.names()
        if name is None:
            name = self._default(names, private=private)
        if name in names:
            return self._open_private(self.folder(name), now_ms)
        for other in names:
            if folded(other) == folded(name):
                raise ConfigError(f"the private swarm here is called {other!r}, not {name!r}; write it exactly so")
        if private:
            raise ConfigError(
                f"--private: {name[:80]!r} is no private swarm in the folder {self._home.root}; {self._advice()}"
            )
        return Membership(Swarm(name), self._home.known_peers)

    def _default(self, names: Sequence[str], *, private: bool) -> str:
        if private and len(names) == 1:
            return names[0]
        if private:
            raise ConfigError(f"--private: say which swarm with --swarm NAME; {self._advice()}")
        if names:
            raise ConfigError(
                f"this folder belongs to {_listed(names)}: say `--swarm {names[0]}` to run in it, or `--swarm "
                f"{PUBLIC_SWARM}` to run among strangers"
            )
        return PUBLIC_SWARM

    def _open_private(self, folder: SwarmFolder, now_ms: int) -> Membership:
        standing = folder.load()
        noted = self._noted().get(folder.name)
        if noted is None:
            self._note(folder.name, standing.swarm_id)
        elif not hmac.compare_digest(noted, standing.swarm_id):
            raise ConfigError(
                f"the key file {folder.key} is of another swarm than the one that was joined as {folder.name!r}; put "
                f"the right one back, or forget the swarm (`meshswarm swarm leave {folder.name}`) and join again"
            )
        swarm = Swarm.of_keys(standing.name, standing.keys, lineage=standing.lineage)
        standing.apply(swarm, now_ms)
        return Membership(swarm, folder.peers, tuple(folder.invited()), folder, standing)

    # -- the note of which names are private

    def _noted(self) -> dict[str, bytes]:
        path = self._home.private_swarms
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved["version"] != _VERSION:
                raise ValueError("it has another version")
            return {checked_name(name): bytes.fromhex(swarm_id) for name, swarm_id in saved["swarms"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, ConfigError) as error:
            raise ConfigError(
                f"{path}, which says what swarms are private here, cannot be read ({error}); put a backup in its "
                "place, or move it away if every folder below 'swarms' still has its key"
            ) from error

    def _folders(self) -> list[str]:
        found = []
        try:
            entries = list(self._home.swarms.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"the folder {self._home.swarms} cannot be read: {error.strerror or error}") from error
        for entry in entries:
            with contextlib.suppress(ConfigError):
                if entry.is_dir():
                    found.append(checked_name(entry.name))
        return found

    def _note(self, name: str, swarm_id: bytes) -> None:
        self._write({**self._noted(), name: swarm_id})

    def _write(self, swarms: dict[str, bytes]) -> None:
        fields = {name: swarm_id.hex() for name, swarm_id in sorted(swarms.items())}
        try:
            write_json(self._home.private_swarms, {"version": _VERSION, "swarms": fields})
        except ArtifactError as error:
            raise ConfigError(str(error)) from error

    def _new_folder(self, name: str, *, is_known: bool = False) -> SwarmFolder:
        if not is_known and name in self.names():
            raise ConfigError(f"there is a private swarm {name!r} in the folder {self._home.root} already")
        folder = SwarmFolder(name, self._home.swarms / name)
        try:
            self._home.create()
            self._home.swarms.mkdir(mode=0o700, exist_ok=True)
            folder.root.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"the folder {folder.root} cannot be made: {error.strerror or error}") from error
        return folder

    def _advice(self) -> str:
        names = self.names()
        there = f"there is {_listed(names)}. " if names else ""
        return f"{there}`meshswarm swarm new NAME` makes one, `meshswarm swarm join INVITE` enters one"


def _listed(names: Sequence[str]) -> str:
    quoted = [repr(name) for name in names]
    return f"the private swarm{'s' if len(quoted) > 1 else ''} {', '.join(quoted)}"
