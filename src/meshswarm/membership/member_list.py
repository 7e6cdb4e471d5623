"""The owner's word on who belongs to a private swarm and which keys count, signed and numbered.

Everybody who proves a key that counts is a member, unless the list has expelled him. The rule this file keeps: the
owner's signature covers the exact bytes that travel and lie on disk, they are for one swarm, and a higher number
replaces a lower one, so that nobody but the owner changes anything and nobody can bring back what was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshswarm.dht import wire
from meshswarm.dht.wire import WireError
from meshswarm.identity import KEY_BYTES, Identity, PeerId
from meshswarm.net.swarm import MAX_SWARM_KEYS

LIST_VERSION = 1
MAX_EXPELLED = 1024
MAX_HOLDERS = 2048
MAX_LIST_BYTES = 128 * 1024
_KEY_ID_BYTES = 16
_SWARM_ID_BYTES = 16
_PURPOSE = "member-list"


@dataclass(frozen=True, slots=True)
class ListedKey:
    """A key by its id (`swarm.key_id`). `ends_ms`: Unix time in ms until which it counts; 0 for the one in use."""

    key_id: bytes
    ends_ms: int = 0


@dataclass(frozen=True, slots=True)
class MemberList:
    """`keys`: the one in use first. `expelled`: in the order in which they were. `holders`: who may still come with an
    older key alone, None for everybody who is not expelled. `wire`: all of it, as signed; "" in a list not signed."""

    swarm_id: bytes
    number: int
    made_ms: int
    keys: tuple[ListedKey, ...]
    expelled: tuple[PeerId, ...] = ()
    holders: tuple[PeerId, ...] | None = None
    wire: bytes = field(default=b"", repr=False, compare=False)

    def signed(self, owner: Identity) -> MemberList:
        """The same, as it travels. Raises ValueError when it says more than a list may."""
        holders = None if self.holders is None else _pack_peers(self.holders)
        keys = [[key.key_id, key.ends_ms] for key in self.keys]
        payload = wire.pack(
            [LIST_VERSION, self.swarm_id, self.number, self.made_ms, keys, _pack_peers(self.expelled), holders]
        )
        try:
            return MemberList.decode(wire.pack([payload, owner.sign(_PURPOSE, payload)]), owner.peer_id, self.swarm_id)
        except WireError as error:
            raise ValueError(f"this cannot be a member list: {error}") from None

    @classmethod
    def decode(cls, data: bytes, owner: PeerId, swarm_id: bytes) -> MemberList:
        """The list of swarm `swarm_id`, signed by `owner`. Raises WireError for anything else."""
        outer = wire.array(wire.unpack_array(data, MAX_LIST_BYTES, "a member list"), "a member list", at_least=2)
        payload = wire.binary(outer[0], "payload", at_most=MAX_LIST_BYTES)
        if not owner.verify(_PURPOSE, payload, wire.binary(outer[1], "signature", size=64)):
            raise WireError("a member list that the swarm's owner did not sign")
        fields = wire.array(wire.unpack_array(payload, MAX_LIST_BYTES, "a member list"), "a member list", at_least=7)
        wire.integer(fields[0], "list version", low=LIST_VERSION, high=LIST_VERSION)
        if wire.binary(fields[1], "swarm id", size=_SWARM_ID_BYTES) != swarm_id:
            raise WireError("a member list of another swarm")
        keys = wire.array(fields[4], "keys", at_least=1, at_most=MAX_SWARM_KEYS)
        return cls(
            swarm_id=swarm_id,
            number=wire.integer(fields[2], "number", low=1),
            made_ms=wire.integer(fields[3], "time"),
            keys=tuple(_key(each) for each in keys),
            expelled=_peers(fields[5], "expelled", MAX_EXPELLED),
            holders=None if fields[6] is None else _peers(fields[6], "holders", MAX_HOLDERS),
            wire=data,
        )

    def replaces(self, other: MemberList | None) -> bool:
        """True when this one is to be used instead. Equal numbers are the owner's mistake (one key, two machines): all
        members pick the same one."""
        return other is None or (self.number, self.wire) > (other.number, other.wire)


def _pack_peers(peers: Iterable[PeerId]) -> bytes:
    return b"".join(peer.key for peer in peers)


def _peers(value: object, what: str, at_most: int) -> tuple[PeerId, ...]:
    joined = wire.binary(value, what, at_most=at_most * KEY_BYTES)
    if len(joined) % KEY_BYTES:
        raise WireError(f"{what} is not a row of keys")
    return tuple(PeerId(joined[at : at + KEY_BYTES]) for at in range(0, len(joined), KEY_BYTES))


def _key(value: object) -> ListedKey:
    pair = wire.array(value, "a key", at_least=2)
    return ListedKey(wire.binary(pair[0], "key id", size=_KEY_ID_BYTES), wire.integer(pair[1], "end of a key"))
