"""What a node does unasked: joining, rejoining, greeting newcomers, saying things again, looking after its table.

The rule this file keeps: at rest a round every 45 s or so sends a handful of messages at most, and none of it is ever
waited for by somebody who asked a question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshswarm.dht.announcer import Announcer
from meshswarm.dht.contact import Contact
from meshswarm.dht.core import Core
from meshswarm.dht.keys import node_id
from meshswarm.dht.questions import Questions
from meshswarm.identity import PeerId

JOIN_TIMEOUT_S = 2.5  # for the first answer, however many are asked
GRACE_S = 0.3  # for others who are slower than the first to answer at a join
ERRAND_DELAY_S = 0.05  # newcomers come in groups: one pass for all
MAX_PINGS_PER_ROUND = 3
MAX_HANDOVERS_PER_ROUND = 4
MAX_REMEMBERED = 64

logger = logging.getLogger(__name__)

Errand = Callable[[], Coroutine[Any, Any, object]]


@dataclass(frozen=True, slots=True)
class Periods:
    """Seconds. The defaults are for use; tests shorten them."""

    republish_s: float = 900.0  # half of a record's life: one time may fail
    round_s: float = 45.0  # how often to look for something to do
    doubt_s: float = 600.0  # a neighbour not heard of for this long is pinged
    refresh_s: float = 3600.0  # a bucket no lookup went through for this long is looked through
    look_around_s: float = 900.0  # how often to look up this peer's own surroundings
    rejoin_s: float = 1.0  # the first wait before trying again when no peer is known; doubles


class Upkeep:
    """`do_later` runs in `run`, soon; nothing is lost when `run` starts later, or never.

    `renew()`: brings up to date what this peer says about itself; the machine's addresses may have changed.
    """

    def __init__(
        self,
        core: Core,
        questions: Questions,
        announcer: Announcer,
        periods: Periods,
        clock: Callable[[], float],
        rng: random.Random,
        renew: Callable[[], None],
    ) -> None:
        self.is_running = False
        self._core = core
        self._questions = questions
        self._announcer = announcer
        self._periods = periods
        self._clock = clock
        self._rng = rng
        self._renew = renew
        self._remembered: OrderedDict[PeerId, Contact] = OrderedDict()
        self._errands: dict[object, Errand] = {}
        self._wake = asyncio.Event()
        self._looked_around_at = float("-inf")

    async def join(self, contacts: Iterable[Contact]) -> int:
        """Finds the others through `contacts`; how many peers are known then.

        Goes on as soon as one of them has answered; those who have not by the end are asked again in the background.
        """
        asked = [contact for contact in contacts if contact.peer != self._core.own]
        for contact in asked:
            self._remember(contact)
        async with asyncio.TaskGroup() as group:
            pings = {group.create_task(self._questions.ping(contact)): contact for contact in asked}
            pending = set(pings)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOIN_TIMEOUT_S):
                    while pending and not any(ping.done() and ping.result() for ping in pings):
                        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if len(self._core.table):
                await self.look_around()
            if pending:
                _, pending = await asyncio.wait(pending, timeout=GRACE_S)
            for ping in pending:
                ping.cancel()
                contact = pings[ping]
                self.do_later(("meet", contact.peer), partial(self._meet, contact))
        return len(self._core.table)

    async def look_around(self) -> None:
        """A lookup of this peer's own place, which makes its neighbours known to it and it to them."""
        now = self._clock()
        self._looked_around_at = now
        await self._questions.look_up([node_id(self._core.own)], wants_records=False)
        far = self._core.table.refresh_targets(now, older_than_s=self._periods.refresh_s, rng=self._rng)
        if far:
            await self._questions.refresh(far)

    def greet(self, newcomer: Contact) -> None:
        """A peer is new in the table."""
        self._remember(newcomer)
        self.do_later(("introduce", newcomer.peer), partial(self._announcer.introduce, newcomer))

    def do_later(self, what: object, errand: Errand) -> None:
        """Runs `errand` in the background, once, however often `what` is asked for before."""
        self._errands[what] = errand
        self._wake.set()

    def remembered(self) -> list[Contact]:
        """Peers known at some time, those asked for or met last first; without those that nobody can dial."""
        return [each for each in reversed(self._remembered.values()) if not self._core.is_client(each.peer)]

    async def run(self) -> None:
        """Until cancelled."""
        self.is_running = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._run_errands())
                group.create_task(self._run_rounds())
        finally:
            self.is_running = False

    async def _run_errands(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(ERRAND_DELAY_S)
            self._wake.clear()
            errands, self._errands = self._errands, {}
            async with asyncio.TaskGroup() as group:
                for errand in errands.values():
                    group.create_task(_whatever_comes(errand))

    async def _run_rounds(self) -> None:
        alone_s = self._periods.rejoin_s
        while True:
            if len(self._core.table):
                alone_s = self._periods.rejoin_s
                wait_s = self._periods.round_s
            else:
                wait_s, alone_s = alone_s, min(2 * alone_s, self._periods.round_s)
            await asyncio.sleep(wait_s * self._rng.uniform(0.8, 1.2))
            await _whatever_comes(self._round)

    async def _round(self) -> None:
        now = self._clock()
        table = self._core.table
        self._renew()
        self._core.store.expire(now)
        if not len(table):
            await self.join(self.remembered())
        else:
            doubtful = table.doubtful(now, unseen_s=self._periods.doubt_s)[:MAX_PINGS_PER_ROUND]
            await self._questions.ping_all(doubtful)
            lost = [c for c in self.remembered() if c.peer not in table and not table.back_off.holds(c.peer, now)]
            if lost:
                await self._meet(self._rng.choice(lost))
            if now - self._looked_around_at >= self._periods.look_around_s:
                await self.look_around()
            await self._announcer.settle(MAX_HANDOVERS_PER_ROUND)
        await self._announcer.repeat(every_s=self._periods.republish_s)

    async def _meet(self, contact: Contact) -> None:
        """Asks one that was not there when asked first; it may know others that nobody here knows."""
        if await self._questions.ping(contact):
            await self.look_around()

    def _remember(self, contact: Contact) -> None:
        self._remembered.pop(contact.peer, None)
        self._remembered[contact.peer] = contact
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)


async def _whatever_comes(errand: Errand) -> None:
    """A mistake of ours in one of them must not end the others: who says nothing again is forgotten in half an hour."""
    try:
        await errand()
    except Exception:
        logger.exception("the upkeep of the DHT failed by a mistake of this peer")
