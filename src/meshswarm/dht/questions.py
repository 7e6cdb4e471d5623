"""Asking other nodes over real connections: pings, lookups and stores, each bounded in time.

The rule this file keeps: it carries bytes between the core and the endpoint and decides nothing. Whatever goes wrong
with one peer is told to the core and ends there; a question to many never fails because of one.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from meshswarm.dht import messages
from meshswarm.dht.contact import Contact, merge_addresses
from meshswarm.dht.core import Core, Delivery
from meshswarm.dht.have import SALT_BYTES, Marker
from meshswarm.dht.lookup import STALL_S, Lookup, next_batch
from meshswarm.dht.messages import DIAL, DIAL_BACK, FIND, PING, STORE, StoreStatus, Verdict
from meshswarm.dht.signed import RecordSet, SignedRecord
from meshswarm.errors import MeshswarmError, PeerUnreachableError, RemoteProtocolError
from meshswarm.net.endpoint import Endpoint

QUESTION_TIMEOUT_S = 2.0
MAX_AT_ONCE = 24
MAX_RECORDS = 2048  # that one question to many gives, whoever answers
_RECORDS_PER_TURN = 16  # signatures checked before the loop may do something else


class Questions:
    """`on_new(contact)` is called for every peer that an answer brought into the table."""

    def __init__(
        self,
        endpoint: Endpoint,
        core: Core,
        clock: Callable[[], float],
        on_new: Callable[[Contact], None],
        timeout_s: float = QUESTION_TIMEOUT_S,
    ) -> None:
        self._endpoint = endpoint
        self._core = core
        self._clock = clock
        self._on_new = on_new
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def ping(self, contact: Contact) -> bool:
        """True when the peer answered."""
        try:
            question = self._core.ping_question(self._clock())
            answer, contact, rtt_s, is_outbound = await self._ask(contact, PING, question, 4096)
            is_new = self._core.take_pong(contact, answer, self._clock(), rtt_s, is_outbound=is_outbound)
            self._note(is_new, contact)
        except MeshswarmError as error:
            self._failed(contact, (), error)
            return False
        return True

    async def ping_all(self, contacts: Iterable[Contact]) -> None:
        async with asyncio.TaskGroup() as group:
            for contact in contacts:
                group.create_task(self.ping(contact))

    async def look_up(
        self, targets: Iterable[bytes], *, wants_records: bool, known: Iterable[SignedRecord] = ()
    ) -> tuple[list[Lookup], RecordSet]:
        """The finished lookups of `targets`, and all verified records that came with them, with those `known` before,
        which nobody needs to send.

        Lookups share questions: in a swarm of few peers, many targets cost one round trip.
        """
        now = self._clock()
        return await self._drive([self._core.lookup(target, now) for target in targets], wants_records, known)

    async def refresh(self, targets: Iterable[bytes]) -> None:
        """Short lookups that fill the table around `targets`."""
        now = self._clock()
        await self._drive([self._core.refresh(target, now) for target in targets], False)

    async def _drive(
        self, lookups: list[Lookup], wants_records: bool, known: Iterable[SignedRecord] = ()
    ) -> tuple[list[Lookup], RecordSet]:
        records = RecordSet(known, limit=MAX_RECORDS)
        marker = Marker(os.urandom(SALT_BYTES))
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while not all(lookup.done for lookup in lookups):
                for contact, together in next_batch(lookups, self._clock(), messages.MAX_FIND_KEYS):
                    running.add(group.create_task(self._find(contact, together, records, marker, wants_records)))
                if not running:
                    break
                _, running = await asyncio.wait(running, timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in running:  # owed answers of peers that turned out not to be near
                task.cancel()
        return lookups, records

    async def token(self, contact: Contact) -> bytes | None:
        """Leave to store at one peer; None when it does not answer."""
        own = self._core.lookup(contact.node_id, self._clock())
        question = self._core.find_question([own], wants_records=False)
        try:
            answer, contact, rtt_s, is_outbound = await self._ask(contact, FIND, question, messages.MAX_ANSWER_BYTES)
            found = messages.decode_found(answer)
        except MeshswarmError as error:
            self._failed(contact, (), error)
            return None
        is_new = self._core.take_found(contact, found, (), self._clock(), rtt_s, is_outbound=is_outbound)
        self._note(is_new, contact)
        return found.token

    async def dial_back(self, contact: Contact) -> Verdict:
        """Asks a peer to have this one dialled by a third."""
        question = messages.encode_dial_back(self._core.sender)
        return await self._verdict(contact, DIAL_BACK, question, 3 * self._timeout_s)

    async def dial_for(self, contact: Contact, wanted: Contact) -> Verdict:
        """Asks a peer to dial `wanted` afresh."""
        question = messages.encode_dial(self._core.sender, wanted)
        return await self._verdict(contact, DIAL, question, 2 * self._timeout_s)

    async def dial_afresh(self, wanted: Contact) -> Verdict:
        """Whether `wanted` can be dialled from here, where nothing has connected the two yet."""
        if self._endpoint.connection(wanted.peer) is not None:
            return Verdict.UNKNOWN
        try:
            connection = await self._endpoint.dial(wanted.peer, wanted.addresses, timeout_s=self._timeout_s)
        except MeshswarmError:
            return Verdict.SILENT
        if connection.remote_address not in wanted.addresses:
            return Verdict.UNKNOWN  # it dialled this peer in the meantime, or was found where it was another time
        connection.close("it was only to be seen whether it can be dialled")
        return Verdict.REACHED

    async def _verdict(self, contact: Contact, kind: str, question: bytes, timeout_s: float) -> Verdict:
        try:
            answer, *_ = await self._ask(contact, kind, question, 4096, timeout_s)
            _, verdict = messages.decode_verdict(answer)
        except MeshswarmError:
            return Verdict.UNKNOWN
        return verdict

    async def store(self, deliveries: Iterable[Delivery]) -> Counter[StoreStatus]:
        """Delivers everything; how often each status came back."""
        statuses: Counter[StoreStatus] = Counter()
        async with asyncio.TaskGroup() as group:
            for delivery in deliveries:
                group.create_task(self._store(delivery, statuses))
        return statuses

    async def _find(
        self, contact: Contact, lookups: Sequence[Lookup], records: RecordSet, marker: Marker, wants_records: bool
    ) -> None:
        had = self._core.contacts_had(lookups)
        have = marker.have((record.wire for record in records), had)
        question = self._core.find_question(lookups, wants_records=wants_records, have=have)
        try:
            answer, contact, rtt_s, is_outbound = await self._ask(contact, FIND, question, messages.MAX_ANSWER_BYTES)
            found = messages.decode_found(answer)
            found = replace(found, contacts=(*found.contacts, *marker.contacts(found.had)))
        except MeshswarmError as error:
            self._failed(contact, lookups, error)
            return
        read = await self._read(found.records, [lookup.target for lookup in lookups])
        records.update(read, self._core.source_of(contact))
        is_new = self._core.take_found(contact, found, lookups, self._clock(), rtt_s, is_outbound=is_outbound)
        self._note(is_new, contact)

    async def _read(self, raw: Sequence[bytes], keys: Sequence[bytes]) -> list[SignedRecord]:
        read = []
        for number, data in enumerate(raw, start=1):
            record = self._core.read_record(data, self._clock(), keys)
            if record is not None:
                read.append(record)
            if number % _RECORDS_PER_TURN == 0:
                await asyncio.sleep(0)
        return read

    async def _store(self, delivery: Delivery, statuses: Counter[StoreStatus]) -> None:
        contact = delivery.contact
        try:
            answer, contact, _, _ = await self._ask(contact, STORE, delivery.question, messages.MAX_QUESTION_BYTES)
            stored = self._core.take_stored(contact, answer, self._clock())
            self._core.delivered(delivery, stored)
        except MeshswarmError as error:
            self._failed(contact, (), error)
            return
        statuses.update(status for row in stored.statuses for status in row)

    async def _ask(
        self, contact: Contact, kind: str, question: bytes, max_answer_bytes: int, timeout_s: float | None = None
    ) -> tuple[bytes, Contact, float | None, bool]:
        """The answer, the contact with the address that worked first, the round trip when it is known, and whether
        the peer was dialled for this."""
        peer = contact.peer
        timeout_s = timeout_s or self._timeout_s
        async with self._turns:
            try:
                async with asyncio.timeout(timeout_s):
                    connection = self._endpoint.connection(peer)
                    is_outbound = connection is None or connection.closed
                    if connection is None or connection.closed:
                        connection = await self._endpoint.dial(peer, contact.addresses, timeout_s=self._timeout_s)
                    answer = await connection.request(
                        kind, question, timeout_s=timeout_s, max_reply_bytes=max_answer_bytes
                    )
            except TimeoutError:
                raise PeerUnreachableError(
                    f"peer {peer.short} did not answer {kind} within {timeout_s:g} s", peer=str(peer)
                ) from None
        known = Contact(peer, merge_addresses((connection.remote_address,), contact.addresses))
        return answer, known, connection.rtt_s, is_outbound

    def _failed(self, contact: Contact, lookups: Sequence[Lookup], error: MeshswarmError) -> None:
        broken = isinstance(error, PeerUnreachableError | RemoteProtocolError)
        self._core.failed(contact, lookups, self._clock(), unreachable=broken)

    def _note(self, is_new: bool, contact: Contact) -> None:
        if is_new:
            self._on_new(contact)
