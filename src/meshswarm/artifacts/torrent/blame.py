"""Who sent wrong bytes: a piece in doubt is asked of one member at a time, and what then comes is that member's alone.

The rule this file keeps: blame needs a single source. libtorrent's own bans hit honest peers that shared a piece with
a liar, so here they count for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

ASK_AT_ONCE = 16
SILENT_FOR_S = 15.0
"""A member that gave nothing is not asked again for so long, unless nobody else is left."""

Member = tuple[str, int]
"""(host, port) a peer is dialled at."""


@dataclass(slots=True)
class Standing:
    """What is known of one member."""

    is_liar: bool = False
    silent_at: float = float("-inf")
    n_given: int = 0
    last_word: str = "not reached yet"
    is_connected: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """Ask this member alone for these pieces."""

    member: Member
    pieces: tuple[int, ...]


@dataclass(slots=True)
class Blame:
    """The members of one torrent, and who of them lied. Times in seconds on any clock."""

    members: dict[Member, Standing] = field(default_factory=dict)

    def add(self, member: Member) -> bool:
        """False for one that is blamed: it is not to be dialled."""
        return not self.members.setdefault(member, Standing()).is_liar

    @property
    def liars(self) -> set[Member]:
        return {member for member, standing in self.members.items() if standing.is_liar}

    @property
    def trusted(self) -> list[Member]:
        """Everybody not blamed."""
        return [member for member, standing in self.members.items() if not standing.is_liar]

    def next_question(self, doubtful: Collection[int], now: float) -> Question | None:
        """Whom to ask for what is in doubt; None while nobody is left who might answer."""
        waiting = [
            (member, standing)
            for member, standing in self.members.items()
            if not standing.is_liar and now - standing.silent_at >= SILENT_FOR_S
        ]
        if not doubtful or not waiting:
            return None
        # Whoever gave right pieces before goes last: the others are where a liar is to be found, and honest ones
        # become known by it.
        member, _ = min(waiting, key=lambda each: (each[1].n_given > 0, each[1].silent_at, each[0]))
        return Question(member, tuple(sorted(doubtful)[:ASK_AT_ONCE]))

    def gave(self, member: Member) -> None:
        self.members[member].n_given += 1

    def lied(self, member: Member, piece: int) -> None:
        standing = self.members[member]
        standing.is_liar = True
        standing.last_word = f"sent wrong bytes for piece {piece} when asked alone"

    def silent(self, member: Member, reason: str, now: float) -> None:
        standing = self.members[member]
        standing.silent_at = now
        standing.last_word = reason

    def joined(self, member: Member) -> None:
        if (standing := self.members.get(member)) is not None:
            standing.is_connected = True

    def left(self, member: Member, reason: str) -> None:
        if (standing := self.members.get(member)) is not None:
            standing.is_connected = False
            if not standing.is_liar:
                standing.last_word = reason or "closed the connection"

    def account(self) -> str:
        """What came of each member, for a person."""
        if not self.members:
            return "no peer that has it is known"
        words = [f"{_shown(member)}: {_word(standing)}" for member, standing in list(self.members.items())[:8]]
        more = len(self.members) - len(words)
        return "; ".join(words) + (f"; and {more} more" if more else "")


def hosts_to_refuse(torrents: Iterable[Blame]) -> set[str]:
    """Addresses at which only liars are known. One behind which an honest member is as well stays open."""
    blames = list(torrents)
    liars = {host for blame in blames for host, _port in blame.liars}
    honest = {host for blame in blames for host, _port in blame.trusted}
    return liars - honest


def _word(standing: Standing) -> str:
    if standing.is_connected and not standing.is_liar:
        return "connected, sends nothing"
    return standing.last_word


def _shown(member: Member) -> str:
    host, port = member
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
