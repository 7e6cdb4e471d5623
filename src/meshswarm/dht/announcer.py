"""Bringing what this peer says of itself to the peers that keep it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from meshswarm.dht.clocks import OWN
from meshswarm.dht.contact import Contact
from meshswarm.dht.core import Core
from meshswarm.dht.messages import StoreStatus
from meshswarm.dht.questions import Questions
from meshswarm.dht.signed import RecordKind, SignedRecord

logger = logging.getLogger(__name__)


class Announcer:
    """Says, repeats and withdraws; `Publications` numbers and signs."""

    def __init__(self, core: Core, questions: Questions, clock: Callable[[], float]) -> None:
        self._core = core
        self._questions = questions
        self._clock = clock

    async def say(self, kind: RecordKind, subject: bytes, body: bytes, layers: tuple[int, int] = (0, 0)) -> None:
        """Raises WireError when it does not fit into a record. Known here at once, elsewhere when this returns."""
        await self._spread(self._core.publications.say(kind, subject, body, self._clock(), layers=layers))

    async def withdraw(self, subject: bytes | None = None, kind: RecordKind | None = None) -> None:
        """Takes back everything; or what was said of `subject` by a record of `kind`, and the model's card with it
        when no other record says why it should stand."""
        now = self._clock()
        standing = {(r.kind, r.subject) for r in self._core.publications.current(now) if not r.is_tombstone}
        ended = standing
        if subject is not None:
            about = {each for each in standing if each[1] == subject}
            ended = about & {(kind, subject)}
            if about - ended <= {(RecordKind.CARD, subject)}:
                ended = about
        taken_back: list[SignedRecord] = []
        for each in sorted(ended):
            taken_back += self._core.publications.withdraw(*each, now)
        await self._spread(taken_back)

    async def repeat(self, *, every_s: float) -> None:
        """Says again, with a new end, what was last said `every_s` ago or earlier, or is kept by too few by now."""
        now = self._clock()
        records: list[SignedRecord] = []
        thin = self._core.thin(now)
        due = {record.key: record for record in [*self._core.publications.due(now, every_s=every_s), *thin]}
        for record in due.values():
            if record.is_tombstone:
                records.append(record)
                continue
            layers = record.start, record.stop
            records += self._core.publications.say(record.kind, record.subject, record.body, now, layers=layers)
        await self._spread(records)

    async def settle(self, most: int) -> None:
        """Gives what they are owed to `most` of those who moved up when others went."""
        for contact in self._core.creditors(self._clock())[:most]:
            await self.introduce(contact)

    async def introduce(self, newcomer: Contact) -> None:
        """Gives a newcomer the records it is near enough to keep."""
        if not self._core.owed_to(newcomer, self._clock()):
            return
        token = await self._questions.token(newcomer)
        if token is not None:
            await self._questions.store(self._core.owed_deliveries(newcomer, token, self._clock()))

    async def _spread(self, records: Sequence[SignedRecord]) -> None:
        if not records:
            return
        keys = dict.fromkeys(key for record in records for key in self._core.topics.of_record(record))
        lookups, _ = await self._questions.look_up(keys, wants_records=False)
        statuses = await self._questions.store(self._core.deliveries(records, lookups, self._clock()))
        self._judge(statuses)

    def _judge(self, statuses: Counter[StoreStatus]) -> None:
        if statuses[StoreStatus.FULL]:
            logger.info("%d places for records were full", statuses[StoreStatus.FULL])
        for status, side in ((StoreStatus.EXPIRED, "behind"), (StoreStatus.TOO_LONG, "ahead of")):
            if 2 * statuses[status] > statuses.total():
                self._core.notices.say(
                    OWN,
                    "most peers refuse what this one says because of its time: this machine's clock seems to be "
                    f"{side} theirs; set it",
                    side,
                )
