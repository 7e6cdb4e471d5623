"""Finds the first peers and goes on looking while there are none: the tasks around `search`, which decides.

All sources look at the same time, and whoever proves the swarm first is met first. The rule this file keeps: whatever a
source runs into is a sentence in its report and ends nothing but that round of that source.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from meshswarm.config import Address
from meshswarm.dht.contact import merge_addresses
from meshswarm.dht.known_peers import KnownPeer
from meshswarm.discovery.candidate import CandidateSource, Source, SourceError
from meshswarm.discovery.search import Attempt, Search, SourceReport
from meshswarm.errors import MeshswarmError
from meshswarm.identity import PeerId

POLL_S = 2.0  # how often to look whether peers have come by themselves, or gone
EARLY_POLL_S = 0.2  # the same while a start waits for them
MAX_TOLD = 1024

logger = logging.getLogger(__name__)


class Met(Protocol):
    """A connection, as far as the finder needs one."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def remote_address(self) -> Address: ...


class Dialler(Protocol):
    """The endpoint, as the finder sees it."""

    async def dial(self, peer_id: PeerId, addresses: Sequence[Address] = ()) -> Met: ...

    async def dial_unknown(self, address: Address, *others: Address) -> Met: ...


@dataclass(frozen=True, slots=True)
class Found:
    """`peer` proved its key and the swarm at `address`, which `source` gave."""

    peer: PeerId
    address: Address
    source: Source


@dataclass(frozen=True, slots=True)
class Missed:
    """Nobody of the swarm was reached where `attempt` looked. Said once for every candidate."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """A source could not look. Said once for every sentence."""

    source: Source
    problem: str


News = Found | Missed | Trouble


class Finder:
    """`run` it; `first` says when a peer that starts may go on.

    `meet` makes those who were reached known to the rest of the peer; `members` says who is known of the swarm at this
    moment, none when this peer is alone. `off` names the sources that are not used, with the reason. `tell` hears what
    is found and what is not.
    """

    def __init__(
        self,
        sources: Sequence[CandidateSource],
        dialler: Dialler,
        meet: Callable[[Sequence[KnownPeer]], Awaitable[object]],
        members: Callable[[], Collection[PeerId]],
        *,
        off: Mapping[Source, str] | None = None,
        tell: Callable[[News], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._sources = {each.source: each for each in sources}
        self._dialler = dialler
        self._meet = meet
        self._members = members
        self._off = dict(off or {})
        self._tell = tell
        self._clock = clock
        self._search = Search({each.source: each.patience_s for each in sources}, rng or random.Random(), clock())
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._n_meeting = 0
        self._told: set[object] = set()

    async def run(self) -> None:
        """Until cancelled; then every source is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    self._wake.clear()
                    self._step(group)
                    now = self._clock()
                    poll_s = POLL_S if self._settled.is_set() else EARLY_POLL_S
                    wait_s = min(self._search.next_at(now) - now, poll_s)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.01, wait_s)):
                            await self._wake.wait()
        finally:
            self._settled.set()  # nobody is to wait for a search that is over
            for each in self._sources.values():
                with contextlib.suppress(Exception):
                    await each.close()

    async def first(self) -> bool:
        """Waits until the swarm is joined, or whoever is quick to answer has had the time to; whether it is joined."""
        await self._settled.wait()
        return not self._search.is_alone

    def reports(self) -> list[SourceReport]:
        """What came of every source so far, the unused ones included."""
        notes = {source: each.note for source, each in self._sources.items()}
        used = {report.source: report for report in self._search.reports(notes, self._clock())}
        unused = {source: SourceReport(source, off=why) for source, why in self._off.items() if source not in used}
        return [report for source in Source if (report := used.get(source) or unused.get(source)) is not None]

    # -- inside

    def _step(self, group: asyncio.TaskGroup) -> None:
        now = self._clock()
        self._search.members(self._members(), now)
        for source in self._search.rounds(now):
            group.create_task(self._look(self._sources[source]))
        for attempt in self._search.dials(now):
            group.create_task(self._dial(attempt))
        if self._search.is_settled(now) and not self._n_meeting:
            self._settled.set()

    async def _look(self, source: CandidateSource) -> None:
        problem = ""
        try:
            async with contextlib.aclosing(_as_generator(source)) as candidates:
                async for candidate in candidates:
                    self._search.offer(candidate, self._clock())
                    self._wake.set()
        except SourceError as error:
            problem = str(error)
        except Exception as error:
            logger.debug("looking for peers failed", exc_info=True)
            problem = f"failed unexpectedly: {error!r}"
        if problem:
            self._tell_once((source.source, problem), Trouble(source.source, problem))
        self._search.round_ended(source.source, problem, self._clock())
        self._wake.set()

    async def _dial(self, attempt: Attempt) -> None:
        try:
            if attempt.peer is None:
                met = await self._dialler.dial_unknown(*attempt.addresses)
            else:
                met = await self._dialler.dial(attempt.peer, attempt.addresses)
        except Exception as error:
            reason = str(error) if isinstance(error, MeshswarmError) else repr(error)
            self._search.failed(attempt, reason, self._clock())
            self._tell_once(attempt.target, Missed(attempt, reason))
        else:
            self._search.succeeded(attempt, self._clock())
            self._tell(Found(met.peer_id, met.remote_address, attempt.source))
            await self._introduce(met, attempt)
        self._wake.set()

    def _tell_once(self, about: object, news: News) -> None:
        if about not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(about)
            self._tell(news)

    async def _introduce(self, met: Met, attempt: Attempt) -> None:
        # What a person typed is kept only where it proved right: others would be sent there, and the next start too.
        others = attempt.vouched if attempt.peer is not None else ()
        self._n_meeting += 1
        try:
            await self._meet([(met.peer_id, merge_addresses([met.remote_address], others))])
        except Exception:
            logger.debug("a peer that was found could not be met", exc_info=True)
        finally:
            self._n_meeting -= 1


def _as_generator(source: CandidateSource) -> Any:
    """The round as what it is: an asynchronous generator, which wants to be closed when nobody listens any more."""
    return source.candidates()
