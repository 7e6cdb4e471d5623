"""Who sent wrong bytes: a piece in doubt is asked of one member at a time, and what then comes is that member's alone.

The rule this file keeps: blame needs a single source. libtorrent's own bans hit honest peers that shared a piece with
a liar, so here they count for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

ASK_AT_ONCE = 16
SILENT_FOR_S = 15.0
"""A member that gave nothing is not asked again for so long; twice as long after each further silence, unless nobody
else is left."""
_MAX_DOUBLINGS = 5
"""Also of the turns that those who give have before the next that said nothing so far is asked."""

Member = tuple[str, int]
"""(host, port) a peer is dialled at."""


@dataclass(slots=True)
class Standing:
    """What is known of one member."""

    is_liar: bool = False
    silent_at: float = float("-inf")
    n_silent: int = 0  # questions in a row
    n_given: int = 0
    last_word: str = "not reached yet"
    is_connected: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """Ask this member alone for these pieces. `is_brief`: there are others to ask, so one that sends nothing is not
    waited for."""

    member: Member
    pieces: tuple[int, ...]
    is_brief: bool = False


@dataclass(slots=True)
class Blame:
    """The members of one torrent, and who of them lied. Times in seconds on any clock."""

    members: dict[Member, Standing] = field(default_factory=dict)
    _n_in_vain: int = 0  # questions to members unknown, since one of them was found to lie or to give
    _n_givers_turns: int = 0  # that are still to come

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
        able = [each for each in self.members.items() if not each[1].is_liar]
        waiting = [each for each in able if now - each[1].silent_at >= _pause_s(each[1])]
        waiting = waiting or [each for each in able if now - each[1].silent_at >= SILENT_FOR_S]
        if not doubtful or not waiting:
            return None
        # Whoever gave right pieces before goes last: the others are where a liar is to be found, and honest ones
        # become known by it. But after each that says nothing, those who give have their turns: silence stops nobody.
        givers = [each for each in waiting if each[1].n_given]
        unknown = [each for each in waiting if not each[1].n_given]
        is_givers_turn = bool(givers) and (self._n_givers_turns > 0 or not unknown)
        member, standing = min(givers if is_givers_turn else unknown, key=lambda each: each[1].silent_at)
        is_brief = not standing.n_given and not standing.n_silent and len(waiting) > 1
        return Question(member, tuple(sorted(doubtful)[:ASK_AT_ONCE]), is_brief)

    def gave(self, member: Member) -> None:
        standing = self.members[member]
        self._n_givers_turns = max(0, self._n_givers_turns - 1)
        if not standing.n_given:
            self._n_in_vain = 0
        standing.n_given += 1
        standing.n_silent = 0

    def lied(self, member: Member, piece: int) -> None:
        standing = self.members[member]
        standing.is_liar = True
        self._n_in_vain = 0
        standing.last_word = f"sent wrong bytes for piece {piece} when asked alone"

    def silent(self, member: Member, reason: str, now: float) -> bool:
        """Whether it had not been asked before."""
        standing = self.members[member]
        is_news = not standing.n_given and not standing.n_silent
        standing.silent_at = now
        standing.n_silent += 1
        standing.last_word = reason
        if not standing.n_given:
            self._n_givers_turns = 1 << min(self._n_in_vain, _MAX_DOUBLINGS)
            self._n_in_vain += 1
        return is_news

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


def _pause_s(standing: Standing) -> float:
    """How long a silent member is not asked."""
    return float(SILENT_FOR_S * (1 << min(max(standing.n_silent - 1, 0), _MAX_DOUBLINGS)))


def _word(standing: Standing) -> str:
    if standing.is_connected and not standing.is_liar:
        return "connected, sends nothing"
    return standing.last_word


def _shown(member: Member) -> str:
    host, port = member
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
