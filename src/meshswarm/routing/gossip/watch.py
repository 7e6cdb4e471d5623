"""Watching and being watched: every peer has up to five watchers of its own choice, and is heard by one every second.

The beats go round, so one watcher misses the next beat a second after a death; it probes, and calls the others to probe
too (SWIM's indirect probes, by those whose word counts). The rule this file keeps: only silence while this process was
running counts, as Lifeguard has it: who was held up himself accuses nobody.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from meshswarm.config import Address
from meshswarm.identity import PeerId
from meshswarm.routing.gossip.neighbours import MAX_NEIGHBOURS
from meshswarm.routing.gossip.words import MAX_WATCHERS, Appointment

BEAT_S = 1.0
SLACK_S = 1.1  # how late a beat may come: a lost packet, a slow moment
HEARD_LATELY_S = 1.5
FLOOD_ALONE_S = 1.0  # how long a statement waits for others before it goes out without them
SILENT_KEPT_S = 60.0
MAX_WARDS = MAX_NEIGHBOURS
RENEW_S = 2.0  # the shortest time between two appointments when nothing is wrong with the first
DISTRUSTED_S = 600.0


class WardState(Enum):
    QUIET = "heard of in time"
    PROBING = "overdue: being asked"
    SILENT = "did not answer: this peer has said so"


@dataclass(slots=True, eq=False)
class Ward:
    """A peer that chose this one to watch it. `where`: addresses of its watchers, as it knows them. `beat_at`: when its
    last beat came, which is when its next one can be missed; `heard_at`: when it was last heard in any way."""

    appointment: Appointment
    where: Mapping[PeerId, tuple[Address, ...]]
    heard_at: float
    beat_at: float
    state: WardState = WardState.QUIET
    silent_at: float = 0.0
    is_told: bool = False  # everybody has been told

    @property
    def peer(self) -> PeerId:
        return self.appointment.peer

    @property
    def is_pending(self) -> bool:
        """Whether somebody may have to be told of it."""
        return self.state is not WardState.QUIET and not self.is_told

    @property
    def due_at(self) -> float:
        """When the next beat is overdue, unless it is heard in another way until then."""
        return max(self.beat_at + BEAT_S * len(self.appointment.watchers), self.heard_at) + SLACK_S


class Wards:
    """Those whom the peer `own` watches: its neighbours, and some that were when they chose it. As many neighbours as
    there can be find room, so nobody else's keys take an honest one's place."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._wards: dict[PeerId, Ward] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._wards

    def get(self, peer: PeerId) -> Ward | None:
        return self._wards.get(peer)

    def take(
        self,
        appointment: Appointment,
        where: Mapping[PeerId, tuple[Address, ...]],
        now: float,
        neighbours: Collection[PeerId],
    ) -> bool:
        """A verified appointment came from the peer itself. True when it is watched from now on."""
        known = self._wards.get(appointment.peer)
        if known is not None and appointment.number < known.appointment.number:
            return self._own in known.appointment.watchers
        if self._own not in appointment.watchers:
            self._wards.pop(appointment.peer, None)
            return False
        if known is None:
            if appointment.peer not in neighbours:
                return False
            if len(self._wards) >= MAX_WARDS:
                others = [ward for peer, ward in self._wards.items() if peer not in neighbours]
                spare = min(others, key=lambda ward: (ward.is_pending, ward.heard_at), default=None)
                if spare is None:
                    return False
                del self._wards[spare.peer]
        self._wards[appointment.peer] = Ward(appointment, where, now, now)
        return True

    def shared_with(self, watcher: PeerId) -> frozenset[PeerId]:
        """Whom both watch."""
        return frozenset(peer for peer, ward in self._wards.items() if watcher in ward.appointment.watchers)

    def heard(self, peer: PeerId, at: float, *, is_beat: bool = False) -> None:
        """A sign of life, perhaps told by another watcher. One that ends a search counts as the missed beat."""
        ward = self._wards.get(peer)
        if ward is not None and at >= ward.heard_at:
            if is_beat or ward.state is not WardState.QUIET:
                ward.beat_at = at
            ward.heard_at, ward.state, ward.is_told = at, WardState.QUIET, False

    def forgive(self, lateness_s: float) -> None:
        """This process did not run for that long: nobody's silence of that time counts."""
        for ward in self._wards.values():
            ward.heard_at += lateness_s
            ward.beat_at += lateness_s

    def overdue(self, now: float) -> list[Ward]:
        """Those to probe now; each is named once until it is heard or probed."""
        late = [ward for ward in self._wards.values() if ward.state is WardState.QUIET and now >= ward.due_at]
        for ward in late:
            ward.state = WardState.PROBING
        return late

    def probe(self, peer: PeerId) -> bool:
        """Somebody calls for a look at it; True when it was not being probed already."""
        ward = self._wards.get(peer)
        if ward is None or ward.state is not WardState.QUIET:
            return False
        ward.state = WardState.PROBING
        return True

    def failed(self, peer: PeerId, now: float) -> Ward | None:
        """A probe of it failed; the ward when this peer is to say so."""
        ward = self._wards.get(peer)
        if ward is None or ward.state is not WardState.PROBING:
            return None
        ward.state, ward.silent_at = WardState.SILENT, now
        return ward

    def unanswered(self, now: float) -> list[Ward]:
        """Those of whose silence everybody should hear now, though the other watchers have not spoken."""
        late = [
            ward
            for ward in self._wards.values()
            if ward.state is WardState.SILENT and not ward.is_told and now >= ward.silent_at + FLOOD_ALONE_S
        ]
        for ward in late:
            ward.is_told = True
        return late

    def forget(self, now: float) -> None:
        for peer in [
            peer
            for peer, ward in self._wards.items()
            if ward.state is WardState.SILENT and now >= ward.silent_at + SILENT_KEPT_S
        ]:
            del self._wards[peer]

    def keep(self, admits: Callable[[PeerId], bool]) -> None:
        """Watch only those from now on."""
        self._wards = {peer: ward for peer, ward in self._wards.items() if admits(peer)}

    def next_at(self) -> float:
        """When something is due."""
        times = [ward.due_at for ward in self._wards.values() if ward.state is WardState.QUIET]
        times += [
            ward.silent_at + FLOOD_ALONE_S
            for ward in self._wards.values()
            if ward.state is WardState.SILENT and not ward.is_told
        ]
        return min(times, default=float("inf"))


class OwnWatchers:
    """Whom this peer has chosen. Those that stay are kept; new ones are of other networks where that is possible."""

    def __init__(self, rng: random.Random) -> None:
        self.chosen: tuple[PeerId, ...] = ()
        self._rng = rng
        self._turn = 0
        self._chosen_at = float("-inf")
        self._distrusted: dict[PeerId, float] = {}

    def next(self) -> PeerId | None:
        """Who gets the next beat."""
        if not self.chosen:
            return None
        self._turn = (self._turn + 1) % len(self.chosen)
        return self.chosen[self._turn]

    def distrust(self, watchers: Iterable[PeerId], now: float) -> None:
        """They said that this living peer was silent."""
        self._distrusted = {peer: until for peer, until in self._distrusted.items() if until > now}
        self._distrusted |= dict.fromkeys(watchers, now + DISTRUSTED_S)

    def choose(
        self, neighbours: Mapping[PeerId, tuple[Address, ...]], declined: Collection[PeerId], now: float, *, force: bool
    ) -> bool:
        """True when `chosen` is new: one was lost, there is room for more, or `force`."""
        willing = [peer for peer in neighbours if peer not in declined]
        trusted = [peer for peer in willing if self._distrusted.get(peer, now) <= now]
        willing = trusted or willing
        kept = [peer for peer in self.chosen if peer in willing]
        is_whole = len(kept) == len(self.chosen) and len(kept) == min(MAX_WATCHERS, len(willing))
        if not force and (is_whole or (len(kept) == len(self.chosen) and now < self._chosen_at + RENEW_S)):
            return False
        fresh = [peer for peer in willing if peer not in kept]
        self._rng.shuffle(fresh)
        networks = {_network(neighbours[peer]) for peer in kept}
        for is_apart in (True, False):
            for peer in fresh:
                network = _network(neighbours[peer])
                if len(kept) < MAX_WATCHERS and peer not in kept and (network not in networks or not is_apart):
                    kept.append(peer)
                    networks.add(network)
        if not kept:
            self.chosen = ()
            return False
        self.chosen, self._chosen_at = tuple(kept), now
        return True


def _network(addresses: tuple[Address, ...]) -> str:
    """What peers of one operator are likely to share: a /24 or a /48."""
    if not addresses:
        return ""
    try:
        host = ipaddress.ip_address(addresses[0].host.partition("%")[0])
    except ValueError:
        return addresses[0].host
    return str(ipaddress.ip_network((host, 24 if host.version == 4 else 48), strict=False))
