"""What lookups have given, remembered for seconds and refreshed behind the answer.

The rule this file keeps: many who ask at once cost one lookup; what others have sent here since is in every answer; and
whoever only looks (`known`) makes this peer ask nobody.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from meshswarm.dht.core import Core
from meshswarm.dht.questions import Questions
from meshswarm.dht.signed import RecordSet
from meshswarm.dht.upkeep import Upkeep

FRESH_S = 5.0  # an answer this young is given again without asking
STALE_S = 60.0  # one this young is given again too, and refreshed behind it
_MAX_MEMORIES = 64


@dataclass(slots=True, eq=False)
class _Memory:
    """What lookups of some keys have given, and when the last one began."""

    keys: tuple[bytes, ...]
    records: RecordSet = field(default_factory=RecordSet)
    asked_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Answers:
    """The records under keys. Verified, expired ones and tombstones included."""

    def __init__(self, core: Core, questions: Questions, upkeep: Upkeep, clock: Callable[[], float]) -> None:
        self._core = core
        self._questions = questions
        self._upkeep = upkeep
        self._clock = clock
        self._memories: OrderedDict[tuple[bytes, ...], _Memory] = OrderedDict()

    def clear(self) -> None:
        """What was true of another swarm is forgotten."""
        self._memories.clear()

    def everything(self) -> RecordSet:
        """All that is remembered or kept here, under any key."""
        seen = RecordSet(self._core.store.all(self._clock()))
        for memory in self._memories.values():
            seen.update(memory.records)
        return seen

    def known(self, keys: Iterable[bytes]) -> RecordSet:
        """What is under `keys` as far as it is known here; nobody is asked, now or later."""
        wanted = tuple(keys)
        memory = self._memories.get(wanted)
        return self._united(wanted, RecordSet() if memory is None else memory.records)

    async def ask(self, keys: Iterable[bytes], *, fresh: bool = False) -> RecordSet:
        """What lookups of `keys` gave, together with what is kept or said here. Without `fresh` the lookup may have
        been some seconds ago."""
        memory = self._memory(tuple(keys))
        now = self._clock()
        age_s = now - memory.asked_at
        if fresh or not 0 <= age_s <= STALE_S or (age_s > FRESH_S and not self._upkeep.is_running):
            await self._refresh(memory, since=now if fresh else now - FRESH_S)
        elif age_s > FRESH_S:
            self._upkeep.do_later(memory, partial(self._refresh, memory, since=now))
        return self._united(memory.keys, memory.records)

    # -- inside

    def _united(self, keys: tuple[bytes, ...], remembered: RecordSet) -> RecordSet:
        now = self._clock()
        records = RecordSet(remembered)
        records.update(record for key in keys for record in self._core.store.get(key, now))
        wanted = frozenset(keys)
        own = self._core.publications.current(now)
        records.update(record for record in own if not wanted.isdisjoint(self._core.topics.of_record(record)))
        return records

    async def _refresh(self, memory: _Memory, *, since: float) -> None:
        """Looks up the keys of `memory`, unless somebody else has begun to after `since`."""
        async with memory.lock:
            now = self._clock()
            if since < memory.asked_at <= now:
                return
            known = self._united(memory.keys, memory.records)
            alive = [record for record in known if not record.is_expired(now)]
            _, found = await self._questions.look_up(memory.keys, wants_records=True, known=alive)
            memory.records, memory.asked_at = found, now

    def _memory(self, keys: tuple[bytes, ...]) -> _Memory:
        memory = self._memories.pop(keys, None) or _Memory(keys)
        self._memories[keys] = memory
        if len(self._memories) > _MAX_MEMORIES:
            self._memories.popitem(last=False)
        return memory
