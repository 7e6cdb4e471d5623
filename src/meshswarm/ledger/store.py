"""Receipts on disk: one SQLite file per peer.

The rules this file keeps: a receipt that was added survives a crash at any later moment, whole; adding one twice, or
its halves in any order, ends in the same state; nobody's second story replaces the first: two different claims of one
provider for one session, or two answers to one claim, are refused. Signed bytes go into `blocks`, as they were sent,
and `receipts` only points at them, so that other kinds of signed records can join later.

Calls block (every change is synced to the disk): make them off the event loop. They may come from any thread.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path

from meshswarm.errors import LocalError, MeshswarmError
from meshswarm.identity import PeerId
from meshswarm.ledger.receipt import Ack, Claim, Outcome, Receipt, ReceiptError, seal
from meshswarm.stage.sessions.messages import Counters

APPLICATION_ID = 0x6D736C67  # "mslg": tells our file from somebody else's SQLite file
SCHEMA_VERSION = 1
KIND_CLAIM, KIND_ACK = 1, 2
BUSY_TIMEOUT_S = 5.0

SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE blocks (
    hash BLOB PRIMARY KEY,      -- BLAKE2b-256 of payload
    kind INTEGER NOT NULL,
    author BLOB NOT NULL,
    link BLOB,                  -- the hash of the block this one answers
    payload BLOB NOT NULL,
    signature BLOB NOT NULL,
    seen_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE receipts (
    provider BLOB NOT NULL,
    session BLOB NOT NULL,
    consumer BLOB NOT NULL,
    claim_hash BLOB NOT NULL UNIQUE REFERENCES blocks (hash),
    ack_hash BLOB UNIQUE REFERENCES blocks (hash),
    ended_ms INTEGER NOT NULL,
    PRIMARY KEY (provider, session)
) WITHOUT ROWID;
CREATE INDEX receipts_by_end ON receipts (ended_ms);
CREATE INDEX receipts_by_consumer ON receipts (consumer, ended_ms);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
BLOCKS_OF_RECEIPTS = """
SELECT claim.payload, claim.signature, ack.payload, ack.signature
FROM receipts JOIN blocks AS claim ON claim.hash = claim_hash LEFT JOIN blocks AS ack ON ack.hash = ack_hash
"""


class LedgerError(LocalError):
    """The ledger file cannot be used; the message says why and what to do."""


class DamagedLedgerError(LedgerError):
    """The ledger file's content is not what was written."""


class ConflictError(ReceiptError):
    """A peer signed something else about the same session before."""


@dataclass(frozen=True, slots=True)
class PairSummary:
    """All that `provider` did for `consumer`, as far as receipts say; sums over receipts both sides signed."""

    provider: PeerId
    consumer: PeerId
    agreed: int  # receipts
    disagreed: int
    half_signed: int
    claimed: Counters
    acknowledged: Counters


class ReceiptStore:
    """The receipts in the file `path`, which is made on first use.

    Raises LedgerError when the file cannot be used: no access, no room, damaged, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        with self._explained():
            # Autocommit: transactions are written out where they are needed.
            self._database = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        self._database.text_factory = bytes  # no text is kept; damage that looks like text is for the checks to find
        try:
            with self._explained():
                self._prepare()
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        run = self._database.execute
        (application_id,) = run("PRAGMA application_id").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        is_new = version == 0 and tables == 0
        if not is_new and application_id != APPLICATION_ID:
            raise LedgerError(f"{self.path} is not a ledger but another program's database; move it away")
        if version > SCHEMA_VERSION:
            raise LedgerError(f"the ledger {self.path} was written by a newer meshswarm; update this one")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA foreign_keys = ON")
        if is_new:
            self._create()
        (finding,) = run("PRAGMA quick_check(1)").fetchone()
        if finding != b"ok":
            raise self._damaged(finding.decode(errors="replace"))

    def _create(self) -> None:
        try:
            self._database.executescript(SCHEMA)
        except sqlite3.OperationalError:
            self._database.rollback()
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:  # otherwise another process made it in the same moment
                raise

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # -- writing

    def add(self, receipt: Receipt, seen_ms: int) -> bool:
        """Keep a receipt; True when it, or its second half, is new. Synced to the disk on return.

        `seen_ms`: Unix time. Raises ConflictError, which names the peer, for a second story about one session.
        """
        claim, ack = receipt.claim, receipt.ack
        about = claim.engagement
        with self._transaction() as run:
            found = run(
                "SELECT claim_hash, ack_hash FROM receipts WHERE provider = ? AND session = ?",
                (about.provider.key, about.session),
            ).fetchone()
            known_claim, known_ack = found or (None, None)
            if known_claim is not None and known_claim != claim.hash:
                raise ConflictError("a provider signed two different claims for one session", peer=str(about.provider))
            if ack is not None and known_ack is not None and known_ack != ack.hash:
                raise ConflictError("a consumer answered one claim in two ways", peer=str(about.consumer))
            if known_claim is None:
                self._keep(KIND_CLAIM, about.provider, None, claim, seen_ms)
                row = (about.provider.key, about.session, about.consumer.key, claim.hash, claim.ended_ms)
                run("INSERT INTO receipts VALUES (?, ?, ?, ?, NULL, ?)", row)
            if ack is not None and known_ack is None:
                self._keep(KIND_ACK, about.consumer, claim.hash, ack, seen_ms)
                run("UPDATE receipts SET ack_hash = ? WHERE claim_hash = ?", (ack.hash, claim.hash))
            return known_claim is None or (ack is not None and known_ack is None)

    def _keep(self, kind: int, author: PeerId, link: bytes | None, signed: Claim | Ack, seen_ms: int) -> None:
        block = (signed.hash, kind, author.key, link, signed.payload, signed.signature, seen_ms)
        self._database.execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?)", block)

    # -- reading

    def get(self, provider: PeerId, session: bytes) -> Receipt | None:
        where = "WHERE receipts.provider = ? AND receipts.session = ?"
        found = self._read(where, (provider.key, session))
        return found[0] if found else None

    def newest(self, limit: int = 100, *, peer: PeerId | None = None) -> list[Receipt]:
        """The receipts that ended last, newest first; only those with `peer` on either side when it is given."""
        where = "" if peer is None else "WHERE receipts.provider = ? OR receipts.consumer = ?"
        who = () if peer is None else (peer.key, peer.key)
        return self._read(f"{where} ORDER BY ended_ms DESC, claim_hash LIMIT ?", (*who, limit))

    def count(self) -> int:
        with self._lock, self._explained():
            (count,) = self._database.execute("SELECT count(*) FROM receipts").fetchone()
        return int(count)

    def summaries(self) -> list[PairSummary]:
        """One summary per provider and consumer, in the order of their keys."""
        summaries: dict[tuple[PeerId, PeerId], PairSummary] = {}
        for receipt in self._read("ORDER BY receipts.provider, receipts.consumer", ()):
            about = receipt.claim.engagement
            pair = (about.provider, about.consumer)
            so_far = summaries.get(pair) or PairSummary(*pair, 0, 0, 0, Counters(), Counters())
            summaries[pair] = _with_receipt(so_far, receipt)
        return list(summaries.values())

    def _read(self, condition: str, values: tuple[bytes | int, ...]) -> list[Receipt]:
        with self._lock, self._explained():
            rows = self._database.execute(BLOCKS_OF_RECEIPTS + condition, values).fetchall()
        try:
            return [_receipt(*row) for row in rows]
        except ReceiptError as error:
            raise self._damaged(str(error)) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """All of the block's changes on the disk, or none."""
        with self._lock, self._explained():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database.execute
                self._database.execute("COMMIT")
            except BaseException:
                self._database.rollback()
                raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's errors into sentences for a person."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
                raise self._damaged(str(error)) from error
            raise LedgerError(f"the ledger {self.path} cannot be used: {error}") from error

    def _damaged(self, finding: str) -> DamagedLedgerError:
        return DamagedLedgerError(
            f"the ledger {self.path} is damaged ({finding}); restore it from a backup, or move it away together with "
            f"{self.path.name}-wal and {self.path.name}-shm to start a new one"
        )


class ReceiptWriter:
    """Adds receipts to a store on a thread of its own, in order, so that the event loop never waits for the disk.

    `on_error` hears, on that thread, why a receipt was not kept.
    """

    def __init__(self, store: ReceiptStore, on_error: Callable[[MeshswarmError], None]) -> None:
        self._store = store
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")

    def add(self, receipt: Receipt, seen_ms: int) -> None:
        """Returns at once; see `ReceiptStore.add`."""
        self._thread.submit(self._add, receipt, seen_ms)

    def _add(self, receipt: Receipt, seen_ms: int) -> None:
        try:
            self._store.add(receipt, seen_ms)
        except MeshswarmError as error:
            self._on_error(error)

    def close(self) -> None:
        """Wait until all receipts are on the disk, then close the store. Blocks."""
        self._thread.shutdown(wait=True)
        self._store.close()


def _receipt(claim_payload: bytes, claim_signature: bytes, ack_payload: bytes | None, ack_signature: bytes) -> Receipt:
    claim = Claim.decode(seal(claim_payload, claim_signature))
    return Receipt(claim) if ack_payload is None else Receipt.join(claim, seal(ack_payload, ack_signature))


def _with_receipt(summary: PairSummary, receipt: Receipt) -> PairSummary:
    match receipt.outcome:
        case Outcome.HALF_SIGNED:
            return replace(summary, half_signed=summary.half_signed + 1)
        case Outcome.AGREED:
            summary = replace(summary, agreed=summary.agreed + 1)
        case Outcome.DISAGREED:
            summary = replace(summary, disagreed=summary.disagreed + 1)
    assert receipt.ack is not None
    return replace(
        summary,
        claimed=_sum(summary.claimed, receipt.claim.counters),
        acknowledged=_sum(summary.acknowledged, receipt.ack.counters),
    )


def _sum(one: Counters, other: Counters) -> Counters:
    return Counters(*(getattr(one, field.name) + getattr(other, field.name) for field in fields(Counters)))
