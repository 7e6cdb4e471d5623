"""Whom a member has met in its private swarm, and whom it only heard of: what the owner expels and keeps from.

The rule this file keeps: what one member says of another is remembered with who said it, so that the word of a member
who is expelled later counts for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from meshswarm.identity import PeerId

MAX_ACQUAINTANCES = 4096
MAX_VOUCHERS = 4
_VERSION = 1


@dataclass(slots=True)
class Acquaintance:
    """`met_ms`: when a connection to it was last made, Unix time; 0 for never. `heard_from`: who named it."""

    met_ms: int = 0
    heard_from: list[PeerId] = field(default_factory=list)


class Acquaintances:
    """At most `MAX_ACQUAINTANCES`; who was not met gives way first, then who was met longest ago."""

    def __init__(self) -> None:
        self._known: dict[PeerId, Acquaintance] = {}
        self.is_changed = False
        self.has_new = False
        """Somebody is known who is not saved yet."""

    def __len__(self) -> int:
        return len(self._known)

    def get(self, peer: PeerId) -> Acquaintance | None:
        return self._known.get(peer)

    def meet(self, peer: PeerId, now_ms: int) -> None:
        """A connection to `peer`, who has proved a key of the swarm."""
        entry = self._entry(peer)
        self.has_new = self.has_new or not entry.met_ms
        entry.met_ms = now_ms
        self.is_changed = True

    def hear(self, named: Iterable[PeerId], said_by: PeerId) -> None:
        """`said_by` says that it has met these."""
        for peer in named:
            if peer in self._known or len(self._known) < MAX_ACQUAINTANCES:
                vouchers = self._entry(peer).heard_from
                if said_by != peer and said_by not in vouchers and len(vouchers) < MAX_VOUCHERS:
                    vouchers.append(said_by)
                    self.is_changed = self.has_new = True

    def met(self) -> list[PeerId]:
        """Those who were met, the latest first."""
        found = [(each.met_ms, peer) for peer, each in self._known.items() if each.met_ms]
        return [peer for _, peer in sorted(found, reverse=True)]

    def all(self) -> list[PeerId]:
        return sorted(self._known)

    def trusted_without(self, expelled: Collection[PeerId]) -> list[PeerId]:
        """Members that stay when `expelled` go: those who were met, and those whom one that stays has named."""
        gone = set(expelled)
        return [
            peer
            for peer, each in self._known.items()
            if peer not in gone and (each.met_ms or any(voucher not in gone for voucher in each.heard_from))
        ]

    def saved(self) -> None:
        """What `as_json` said is on disk."""
        self.is_changed = self.has_new = False

    def as_json(self) -> dict[str, Any]:
        members = {
            str(peer): {"met_ms": each.met_ms, "heard_from": [str(voucher) for voucher in each.heard_from]}
            for peer, each in self._known.items()
        }
        return {"version": _VERSION, "members": members}

    @classmethod
    def from_json(cls, saved: dict[str, Any] | None) -> Acquaintances:
        """What was saved, as far as it makes sense."""
        known = cls()
        members = saved.get("members") if saved is not None and saved.get("version") == _VERSION else None
        for text, fields in list(members.items())[:MAX_ACQUAINTANCES] if isinstance(members, dict) else ():
            try:
                vouchers = [PeerId.parse(voucher) for voucher in fields["heard_from"][:MAX_VOUCHERS]]
                known._known[PeerId.parse(text)] = Acquaintance(max(0, int(fields["met_ms"])), vouchers)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue
        return known

    def _entry(self, peer: PeerId) -> Acquaintance:
        if peer not in self._known and len(self._known) >= MAX_ACQUAINTANCES:
            del self._known[min(self._known, key=lambda each: (self._known[each].met_ms, each))]
        return self._known.setdefault(peer, Acquaintance())
