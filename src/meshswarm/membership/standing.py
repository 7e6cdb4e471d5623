"""Where a private swarm stands for this peer: the keys it has, the owner's newest list, and what follows from both.

Changes of the owner are made here too: expelling peers, changing the key. The rule this file keeps: a former member
never gets on with what he knows. So an expulsion changes the key as well, and whoever has only the older one is let in
by name alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from meshswarm.identity import Identity, PeerId
from meshswarm.membership.member_list import MAX_EXPELLED, MAX_HOLDERS, ListedKey, MemberList
from meshswarm.net.swarm import MAX_SWARM_KEYS, Swarm, key_id

OVERLAP_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Standing:
    """`keys`: all that this peer has, the newest first. `lineage`: the swarm's first one. `members`: the newest list,
    None before the owner has changed anything or while none has come. `floor`: a list with a lower number is older
    than our newest key, which came by an invite, and counts for nothing."""

    name: str
    owner: PeerId
    lineage: bytes = field(repr=False)
    keys: tuple[bytes, ...] = field(repr=False)
    members: MemberList | None = None
    floor: int = 0

    @property
    def swarm_id(self) -> bytes:
        return Swarm(self.name, self.lineage).swarm_id

    @property
    def number(self) -> int:
        """Of the list; 0 for none."""
        return 0 if self.members is None else self.members.number

    @property
    def is_behind(self) -> bool:
        """The key in use has not come yet."""
        return self.members is not None and self.members.keys[0].key_id not in map(key_id, self.keys)

    def current_keys(self, now_ms: int) -> tuple[bytes, ...]:
        """Those of our keys that count now, the newest first. When none does, the newest that we have: nobody accepts
        it any more, and it shows that this peer was away for too long."""
        if self.members is None:
            return self.keys[:MAX_SWARM_KEYS]
        ours = {key_id(key): key for key in self.keys}
        counting = [each for each in self.members.keys if not each.ends_ms or now_ms < each.ends_ms]
        return tuple(ours[each.key_id] for each in counting if each.key_id in ours) or self.keys[:1]

    def is_outdated(self, now_ms: int) -> bool:
        """No key of ours counts any more: only a new invite helps."""
        if self.members is None:
            return False
        ours = set(map(key_id, self.keys))
        return not any(
            each.key_id in ours and (not each.ends_ms or now_ms < each.ends_ms) for each in self.members.keys
        )

    def next_end_ms(self, now_ms: int) -> int | None:
        """When the next of the listed keys ends."""
        ends = [each.ends_ms for each in self.members.keys if each.ends_ms > now_ms] if self.members else []
        return min(ends, default=None)

    def apply(self, swarm: Swarm, now_ms: int) -> None:
        """Make `swarm` what this standing says."""
        members = self.members
        swarm.renew(
            self.current_keys(now_ms),
            expelled=() if members is None else members.expelled,
            holders=None if members is None else members.holders,
            is_behind=self.is_behind,
        )

    def may_have_key(self, peer: PeerId) -> bool:
        """True for a connected peer that the key in use may be handed to."""
        if self.members is None:
            return True
        return peer not in self.members.expelled and (self.members.holders is None or peer in self.members.holders)

    # -- what came from other members

    def with_list(self, members: MemberList) -> Standing:
        """With `members` when that list replaces ours; else the same. Keys that it does not name are forgotten."""
        if members.number < self.floor or not members.replaces(self.members):
            return self
        return replace(self, members=members).with_keys(())

    def with_keys(self, keys: Iterable[bytes]) -> Standing:
        """With those of `keys` that the owner's list names, in its order, and without ours that it does not name.

        A key that the owner did not sign for changes nothing, whoever sends it.
        """
        if self.members is None:
            return self
        known = {key_id(key): key for key in (*keys, *self.keys)}
        listed = tuple(known[each.key_id] for each in self.members.keys if each.key_id in known)
        return replace(self, keys=listed or self.keys[:1])

    def invited(self, key: bytes, number: int) -> Standing:
        """With the `key` of a new invite, made when the list had `number`."""
        if key in self.keys:
            return self
        members = self.members if self.number >= number else None
        return replace(self, keys=(key, *self.keys)[:MAX_SWARM_KEYS], members=members, floor=number).with_keys([key])

    # -- what the owner does

    def rotated(
        self,
        owner: Identity,
        key: bytes,
        now_ms: int,
        *,
        overlap_s: float = OVERLAP_S,
        only: Iterable[PeerId] | None = None,
    ) -> Standing:
        """With the new `key` in use; the older ones count for `overlap_s` more, for `only` those peers when given. It
        must be given when `is_strict`."""
        ends_ms = now_ms + int(overlap_s * 1000)
        older = [replace(each, ends_ms=min(each.ends_ms or ends_ms, ends_ms)) for each in self._listed(now_ms)]
        older = [each for each in older if each.ends_ms > now_ms][: MAX_SWARM_KEYS - 1]
        holders = None if only is None else self._bounded(only)
        keys = (ListedKey(key_id(key)), *older)
        changed = replace(self._next_list(now_ms), keys=keys, holders=holders)
        return replace(self, members=changed.signed(owner)).with_keys([key])

    def expelling(self, owner: Identity, peers: Sequence[PeerId], now_ms: int) -> Standing:
        """Without `peers`. When the list is full, who was expelled first leaves it: the keys he knew are gone."""
        members = self._next_list(now_ms)
        expelled = tuple(dict.fromkeys((*(old for old in members.expelled if old not in peers), *peers)))
        holders = None if members.holders is None else tuple(peer for peer in members.holders if peer not in peers)
        changed = replace(members, expelled=expelled[-MAX_EXPELLED:], holders=holders)
        return replace(self, members=changed.signed(owner))

    def admitting(self, owner: Identity, peer: PeerId, now_ms: int) -> Standing:
        """With a peer that was expelled, again."""
        members = self._next_list(now_ms)
        changed = replace(members, expelled=tuple(old for old in members.expelled if old != peer))
        return replace(self, members=changed.signed(owner))

    def is_strict(self, now_ms: int) -> bool:
        """An expelled peer knows an older key that still counts: it lets in listed holders only."""
        return self.members is not None and self.members.holders is not None and len(self._listed(now_ms)) > 1

    def _listed(self, now_ms: int) -> tuple[ListedKey, ...]:
        if self.members is None:
            return (ListedKey(key_id(self.keys[0])),)
        return tuple(each for each in self.members.keys if not each.ends_ms or each.ends_ms > now_ms)

    def _next_list(self, now_ms: int) -> MemberList:
        if self.members is None:
            return MemberList(self.swarm_id, 1, now_ms, self._listed(now_ms))
        return replace(self.members, number=self.number + 1, made_ms=now_ms, keys=self._listed(now_ms), wire=b"")

    def _bounded(self, peers: Iterable[PeerId]) -> tuple[PeerId, ...]:
        expelled = () if self.members is None else self.members.expelled
        return tuple(dict.fromkeys(peer for peer in peers if peer not in expelled))[:MAX_HOLDERS]
