"""`meshswarm swarm ...`: private swarms of this folder, made, entered, looked at and ruled.

What changes is written to the swarm's folder, where a peer that runs sees it within a second; nothing here needs one.
The rule this file keeps: an invite and a key never appear in an error or a log, only where a person asked for them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshswarm.artifacts.files import read_json
from meshswarm.commands.control import find_running
from meshswarm.config import DEFAULT_PEER_PORT, Address, Home
from meshswarm.errors import ConfigError
from meshswarm.identity import Identity, PeerId
from meshswarm.membership.acquaintances import Acquaintances
from meshswarm.membership.folder import SwarmFolder
from meshswarm.membership.invite import MAX_INVITED_PEERS, Invite, Invited, looks_like_invite
from meshswarm.membership.standing import OVERLAP_S, Standing
from meshswarm.membership.swarms import Swarms
from meshswarm.net.interfaces import reachable_addresses
from meshswarm.net.swarm import SWARM_KEY_BYTES

VIEW = "/meshswarm/members"
_MIN_PREFIX = 6


def new_swarm(home: Home, name: str, addresses: Sequence[Address]) -> dict[str, Any]:
    """Make a private swarm that this folder owns, and the invite to it."""
    folder = Swarms(home.create()).create(name, os.urandom(SWARM_KEY_BYTES))
    return {**_facts(folder), "invite": _invite(home, folder, addresses).encode(), "key_file": str(folder.key)}


def invite_to(home: Home, name: str | None, addresses: Sequence[Address]) -> dict[str, Any]:
    folder = Swarms(home).only(name)
    return {"swarm": folder.name, "invite": _invite(home, folder, addresses).encode()}


def join_swarm(home: Home, text: str, name: str | None) -> dict[str, Any]:
    """Enter the swarm of an invite, called `name` here. `already`: this peer was a member before."""
    swarms, invite = Swarms(home.create()), Invite.parse(text)
    called = invite.name if name is None else name
    already = called in swarms.names() and swarms.folder(called).key.exists()
    folder = swarms.join(invite, name)
    return {**_facts(folder), "key_file": str(folder.key), "already": already}


def enter_invited(
    home: Home, join: Sequence[str] | None, swarm: str | None, private: bool
) -> tuple[list[str], str | None, bool]:
    """`--join`, `--swarm` and `--private` once an invite among the first was accepted: as `swarm join` does, and then
    never anywhere but in its swarm. Raises ConfigError."""
    texts = list(join or ())
    invites = [text for text in texts if looks_like_invite(text)]
    if not invites:
        return texts, swarm, private
    if len(invites) > 1:
        raise ConfigError("two invites were given to --join: a peer is in one swarm")
    entered = join_swarm(home, invites[0], swarm)
    return [text for text in texts if text not in invites], entered["swarm"], True


def list_swarms(home: Home) -> list[dict[str, Any]]:
    """Every private swarm of this folder; one whose key is gone says so."""
    swarms, found = Swarms(home), []
    for name in swarms.names():
        try:
            found.append({**_facts(swarms.folder(name)), "problem": None})
        except ConfigError as error:
            found.append({"swarm": name, "problem": str(error)})
    return found


def show_swarm(home: Home, name: str | None) -> dict[str, Any]:
    folder = Swarms(home).only(name)
    now_ms = _now_ms()
    standing = folder.load()
    ends = [key.ends_ms for key in standing.members.keys if key.ends_ms > now_ms] if standing.members else []
    return {
        **_facts(folder),
        "key_file": str(folder.key),
        "keys": len(standing.current_keys(now_ms)),
        "older_keys_end_in_s": [(end - now_ms) // 1000 for end in ends],
        "is_outdated": standing.is_outdated(now_ms),
        "expelled": [str(peer) for peer in standing.members.expelled] if standing.members else [],
    }


def members_of(home: Home, name: str | None) -> dict[str, Any]:
    """Who is known in the swarm, who of them is connected to the peer that runs here, and who was expelled."""
    folder = Swarms(home).only(name)
    standing, known, view = folder.load(), _known(folder), _view(home, folder)
    connected: dict[str, str] = view.get("connected", {})
    expelled = list(standing.members.expelled) if standing.members else []
    own = Identity.load_or_create(home.key).peer_id
    named = {own, *known.all(), *expelled, *map(PeerId.parse, connected)}
    now_ms = _now_ms()

    def entry(peer: PeerId) -> dict[str, Any]:
        met = known.get(peer)
        return {
            "peer_id": str(peer),
            "self": peer == own,
            "admitted": peer not in expelled,
            "connected": str(peer) in connected,
            "address": connected.get(str(peer)),
            "met_s_ago": None if met is None or not met.met_ms else max(0, now_ms - met.met_ms) // 1000,
            "heard_from": [] if met is None else [str(voucher) for voucher in met.heard_from],
        }

    return {**_facts(folder), "running": bool(view), "members": [entry(peer) for peer in sorted(named)]}


def revoke(home: Home, name: str | None, peers: Sequence[str], *, keep_key: bool) -> dict[str, Any]:
    """Expel members. The key is changed as well, unless `keep_key`: without that, who was expelled could come back
    under a new name."""
    folder = Swarms(home).only(name)
    owner = _owner(folder)
    own = Identity.load_or_create(home.key).peer_id
    known = _known(folder, _view(home, folder))
    expelled = [_find(text, {own, *known.all()}) for text in peers]
    if own in expelled:
        raise ConfigError("this very peer cannot be expelled from its own swarm; choose another one")
    now_ms = _now_ms()

    def change(standing: Standing) -> Standing:
        standing = standing.expelling(owner, expelled, now_ms)
        return standing if keep_key else _with_new_key(standing, owner, own, known, now_ms, OVERLAP_S, only_known=True)

    return _changed(folder, change, {"revoked": [str(peer) for peer in expelled], "key_changed": not keep_key})


def admit(home: Home, name: str | None, peers: Sequence[str]) -> dict[str, Any]:
    """Take back that members were expelled. They need a new invite where the key was changed since."""
    folder = Swarms(home).only(name)
    owner = _owner(folder)
    members = folder.load().members
    admitted = [_find(text, set(() if members is None else members.expelled)) for text in peers]

    def change(standing: Standing) -> Standing:
        for peer in admitted:
            standing = standing.admitting(owner, peer, _now_ms())
        return standing

    return _changed(folder, change, {"admitted": [str(peer) for peer in admitted]})


def rotate(home: Home, name: str | None, *, overlap_s: float, leaked: bool) -> dict[str, Any]:
    """Change the key. Members get the new one from one another; the older one counts for `overlap_s` more, and when it
    has `leaked`, for members known here only."""
    folder = Swarms(home).only(name)
    owner = _owner(folder)
    own = Identity.load_or_create(home.key).peer_id
    known = _known(folder, _view(home, folder))
    now_ms = _now_ms()

    def change(standing: Standing) -> Standing:
        only_known = leaked or standing.is_strict(now_ms)
        return _with_new_key(standing, owner, own, known, now_ms, overlap_s, only_known=only_known)

    return _changed(folder, change, {"key_changed": True})


def leave(home: Home, name: str | None, *, yes: bool) -> dict[str, Any]:
    swarms = Swarms(home)
    folder = swarms.only(name)
    if folder.owner_key.exists() and not yes:
        raise ConfigError(
            f"this folder owns the swarm {folder.name!r}: without {folder.owner_key} nobody can expel a member or "
            "change the key any more. Say --yes to forget it nevertheless"
        )
    view = _view(home, folder)
    if view:
        raise ConfigError(f"a peer is running in the swarm {folder.name!r}; stop it first")
    swarms.leave(folder.name)
    return {"swarm": folder.name, "left": True}


# -- inside


def _facts(folder: SwarmFolder) -> dict[str, Any]:
    standing = folder.load()
    return {
        "swarm": folder.name,
        "swarm_id": standing.swarm_id.hex(),
        "owned": folder.owner_key.exists(),
        "owner": str(standing.owner),
        "number": standing.number,
    }


def _changed(folder: SwarmFolder, change: Callable[[Standing], Standing], said: dict[str, Any]) -> dict[str, Any]:
    standing = folder.update(change)
    holders = None if standing.members is None or standing.members.holders is None else len(standing.members.holders)
    return {"swarm": folder.name, "number": standing.number, **said, "holders": holders}


def _with_new_key(
    standing: Standing,
    owner: Identity,
    own: PeerId,
    known: Acquaintances,
    now_ms: int,
    overlap_s: float,
    *,
    only_known: bool,
) -> Standing:
    expelled = standing.members.expelled if standing.members else ()
    only = [own, *known.trusted_without(expelled)] if only_known else None
    return standing.rotated(owner, os.urandom(SWARM_KEY_BYTES), now_ms, overlap_s=overlap_s, only=only)


def _owner(folder: SwarmFolder) -> Identity:
    owner = folder.owner()
    standing = folder.load()
    if owner is None or owner.peer_id != standing.owner:
        raise ConfigError(
            f"only the owner of the swarm {folder.name!r} can do this, on the machine where it was made (its key would "
            f"be {folder.owner_key})"
        )
    return owner


def _invite(home: Home, folder: SwarmFolder, addresses: Sequence[Address]) -> Invite:
    standing = folder.load()
    if standing.is_behind or standing.is_outdated(_now_ms()):
        raise ConfigError(
            f"the key of the swarm {folder.name!r} was changed and this peer has not got the new one; start it so that "
            "it meets a member, or ask one for an invite"
        )
    peers = _peers_to_join(home, folder, addresses)
    return Invite(folder.name, standing.keys[0], standing.lineage, standing.owner, standing.number, peers)


def _peers_to_join(home: Home, folder: SwarmFolder, addresses: Sequence[Address]) -> tuple[Invited, ...]:
    """This peer, where it is reached now or would be, and members it is connected to."""
    own = Identity.load_or_create(home.key).peer_id
    view = _view(home, folder)
    here = [Address.parse(text) for text in view.get("addresses", [])]
    usual = reachable_addresses(Address("0.0.0.0", DEFAULT_PEER_PORT), frozenset({socket.AF_INET}))
    others = [(PeerId.parse(peer), (Address.parse(at),)) for peer, at in view.get("connected", {}).items()]
    return ((own, tuple(addresses or here or usual)), *others[: MAX_INVITED_PEERS - 1])


def _view(home: Home, folder: SwarmFolder) -> dict[str, Any]:
    """What the peer that runs in this folder says of the swarm; nothing when none runs in it."""
    running = find_running(home)
    if running is None:
        return {}
    view: dict[str, Any] = running.get(VIEW)
    return view if view.get("swarm") == folder.name else {}


def _known(folder: SwarmFolder, view: dict[str, Any] | None = None) -> Acquaintances:
    known = Acquaintances.from_json(read_json(folder.members))
    for peer in (view or {}).get("connected", {}):
        known.meet(PeerId.parse(peer), _now_ms())
    return known


def _find(text: str, known: set[PeerId]) -> PeerId:
    """A PeerId, or the beginning of one that is known in the swarm."""
    found = [peer for peer in known if str(peer).startswith(text.strip().lower())]
    if len(found) == 1 and len(text) >= _MIN_PREFIX:
        return found[0]
    try:
        return PeerId.parse(text.strip())
    except ValueError as error:
        if len(found) > 1:
            raise ConfigError(
                f"{text[:80]!r} begins {len(found)} PeerIds that are known here; write more of it"
            ) from None
        raise ConfigError(f"{error}; `meshswarm swarm members` lists those that are known here") from None


def _now_ms() -> int:
    return int(time.time() * 1000)
