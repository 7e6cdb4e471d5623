"""Receipts on disk: whole after a crash, the same in any order, never two stories, and clear about damage."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger.signing import CONSUMER, PROVIDER, STRANGER, answered, claim

from meshswarm.errors import MeshswarmError
from meshswarm.ledger.receipt import Outcome, Receipt
from meshswarm.ledger.store import (
    SCHEMA_VERSION,
    ConflictError,
    DamagedLedgerError,
    LedgerError,
    PairSummary,
    ReceiptStore,
    ReceiptWriter,
)
from meshswarm.stage.sessions.messages import Counters


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def contents(store: ReceiptStore) -> tuple[list[Receipt], list[PairSummary]]:
    return store.newest(1000), store.summaries()


def test_a_receipt_comes_back_byte_for_byte(path: Path) -> None:
    receipt = answered(claim())
    store = ReceiptStore(path)
    assert store.add(receipt, seen_ms=5)
    store.close()
    again = ReceiptStore(path)
    assert again.get(PROVIDER.peer_id, receipt.claim.engagement.session) == receipt
    assert again.count() == 1
    again.close()


def test_replay_changes_nothing(path: Path) -> None:
    store = ReceiptStore(path)
    half, whole = Receipt(claim()), answered(claim())
    assert store.add(half, 1)
    assert not store.add(half, 2)
    assert store.add(whole, 3)
    state = contents(store)
    assert not store.add(whole, 4)
    assert not store.add(half, 5)  # the first half again does not undo the second
    assert contents(store) == state
    store.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20), st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(arrivals: list[tuple[int, bool]], shuffle: random.Random) -> None:
    def receipt(number: int, whole: bool) -> Receipt:
        return answered(claim(number)) if whole else Receipt(claim(number))

    states = []
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(2):
            store = ReceiptStore(Path(folder) / f"{attempt}.sqlite")
            for number, whole in arrivals:
                store.add(receipt(number, whole), seen_ms=0)
            states.append(contents(store))
            store.close()
            shuffle.shuffle(arrivals)
    assert states[0] == states[1]
    assert {r.claim.engagement.session for r in states[0][0]} == {number.to_bytes(16, "big") for number, _ in arrivals}
    signed = {number for number, whole in arrivals if whole}
    assert sum(r.outcome is Outcome.AGREED for r in states[0][0]) == len(signed)


def test_a_second_story_is_refused_and_the_first_stays(path: Path) -> None:
    store = ReceiptStore(path)
    first = answered(claim(counted=Counters(1)))
    store.add(first, 0)
    with pytest.raises(ConflictError, match="two different claims") as by_provider:
        store.add(Receipt(claim(counted=Counters(2))), 0)
    assert by_provider.value.peer == str(PROVIDER.peer_id)
    with pytest.raises(ConflictError, match="in two ways") as by_consumer:
        store.add(answered(first.claim, Counters(7)), 0)
    assert by_consumer.value.peer == str(CONSUMER.peer_id)
    assert store.newest() == [first]
    store.close()


def test_newest_first_by_peer_and_limited(path: Path) -> None:
    store = ReceiptStore(path)
    receipts = [answered(claim(number, ended_ms=1000 + number)) for number in range(5)]
    other = answered(claim(9, provider=STRANGER, consumer=PROVIDER, ended_ms=2000), consumer=PROVIDER)
    for receipt in [*receipts, other]:
        store.add(receipt, 0)
    assert store.newest(2) == [other, receipts[4]]
    assert store.newest(peer=CONSUMER.peer_id) == receipts[::-1]
    assert store.newest(peer=STRANGER.peer_id) == [other]
    assert store.get(STRANGER.peer_id, bytes(16)) is None
    store.close()


def test_summaries_add_up_what_both_signed_and_count_the_rest(path: Path) -> None:
    store = ReceiptStore(path)
    huge = 2**63 - 1  # sums go beyond what one receipt may hold
    store.add(answered(claim(1, Counters(huge, 2))), 0)
    store.add(answered(claim(2, Counters(huge, 3)), Counters(5, 3)), 0)
    store.add(Receipt(claim(3, Counters(1000))), 0)
    assert store.summaries() == [
        PairSummary(PROVIDER.peer_id, CONSUMER.peer_id, 1, 1, 1, Counters(2 * huge, 5), Counters(huge + 5, 5))
    ]
    store.close()


def test_threads_share_a_store(path: Path) -> None:
    store = ReceiptStore(path)
    threads = [
        threading.Thread(target=lambda start=start: [store.add(answered(claim(start + n)), 0) for n in range(10)])
        for start in (0, 100, 200)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.count() == 30
    store.close()


def test_two_processes_may_open_one_ledger(path: Path) -> None:
    first, second = ReceiptStore(path), ReceiptStore(path)
    first.add(answered(claim(1)), 0)
    second.add(answered(claim(2)), 0)
    assert contents(first) == contents(second)
    first.close()
    second.close()


def test_writer_keeps_order_reports_errors_and_finishes_at_close(path: Path) -> None:
    errors: list[MeshswarmError] = []
    writer = ReceiptWriter(ReceiptStore(path), errors.append)
    for number in range(20):
        writer.add(Receipt(claim(number)), 0)
        writer.add(answered(claim(number)), 0)
    writer.add(Receipt(claim(3, Counters(1))), 0)
    writer.close()
    store = ReceiptStore(path)
    assert [receipt.outcome for receipt in store.newest()] == [Outcome.AGREED] * 20
    assert [type(error) for error in errors] == [ConflictError]
    store.close()


ADD_FOR_EVER = """
import sys
from pathlib import Path
from meshswarm.ledger.store import ReceiptStore
from tests.ledger.signing import answered, claim

store = ReceiptStore(Path(sys.argv[1]))
for number in range(100_000):
    store.add(answered(claim(number)), 0)
    print(number, flush=True)
"""


def test_what_was_added_survives_a_kill(path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ADD_FOR_EVER, str(path)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    added = 20 + len(process.stdout.readlines())
    process.wait()
    store = ReceiptStore(path)
    receipts = store.newest(100_000)
    assert len(receipts) in (added, added + 1)  # killed between the commit and the print
    assert all(receipt.outcome is Outcome.AGREED for receipt in receipts)
    store.close()


def test_damage_is_named_with_what_to_do(path: Path) -> None:
    store = ReceiptStore(path)
    for number in range(50):
        store.add(answered(claim(number)), 0)
    store.close()
    whole = path.read_bytes()
    for junk in (b"not a database at all, whatever its name says" * 100, whole[: len(whole) // 2]):
        path.write_bytes(junk)
        with pytest.raises(DamagedLedgerError, match="move it away"):
            ReceiptStore(path)


@pytest.mark.parametrize("change", ["CAST(payload || x'00' AS BLOB)", "'text'", "x''", "7"])
def test_a_changed_receipt_is_found(path: Path, change: str) -> None:
    store = ReceiptStore(path)
    store.add(answered(claim()), 0)
    store.close()
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE blocks SET payload = {change} WHERE kind = 1")
    store = ReceiptStore(path)
    with pytest.raises(DamagedLedgerError):
        store.newest()
    store.close()


def test_other_files_are_left_alone(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE shopping (item TEXT)")
    with pytest.raises(LedgerError, match="another program"):
        ReceiptStore(path)


def test_a_newer_ledger_is_left_alone(path: Path) -> None:
    ReceiptStore(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(LedgerError, match="newer meshswarm"):
        ReceiptStore(path)


def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot be used"):
        ReceiptStore(tmp_path / "nowhere" / "ledger.sqlite")
