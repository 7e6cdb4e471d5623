"""The activation log gives rows back bit for bit, within its caps, and forgets them for good."""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshswarm.stage.sessions.activation_log import (
    ActivationLog,
    EvictedError,
    HopLog,
    LoggedRows,
    LogLimits,
    Retention,
    spill,
)
from meshswarm.stage.sessions.spill import SpillError, SpillFile, WipedError

ROW = 64  # bytes of a row in these tests


def rows(n_rows: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(n_rows * ROW)


def limits(memory: int = 1000, session: int = 1000, total: int = 1000) -> LogLimits:
    """Caps given in rows."""
    return LogLimits(memory * ROW, session * ROW, total * ROW, audit_window_s=120.0)


def fill(hop: HopLog, *sizes: int, first_seq: int = 0) -> bytes:
    """Append chunks of these many rows, numbered by position; returns all payloads together."""
    sent = b""
    for n_rows in sizes:
        payload = rows(n_rows, seed=hop.end)
        hop.append(first_seq + hop.end, hop.end, n_rows, payload)
        sent += payload
    return sent


def do_disk_work(log: ActivationLog) -> None:
    while (batch := log.spill_pending()) is not None:
        batch.run()
        log.spill_done(batch)


class TestMemoryOnly:
    def test_rows_come_back_with_their_chunk_boundaries(self) -> None:
        hop = ActivationLog(limits(), None).open(Retention.MEMORY)
        sent = fill(hop, 5, 1, 1, 3)
        assert hop.replay(0, 10).load() == [
            LoggedRows(0, 0, 5, 5, sent[: 5 * ROW]),
            LoggedRows(5, 5, 1, 1, sent[5 * ROW : 6 * ROW]),
            LoggedRows(6, 6, 1, 1, sent[6 * ROW : 7 * ROW]),
            LoggedRows(7, 7, 3, 3, sent[7 * ROW :]),
        ]
        assert hop.replay(3, 6).load() == [
            LoggedRows(0, 3, 2, 5, sent[3 * ROW : 5 * ROW]),
            LoggedRows(5, 5, 1, 1, sent[5 * ROW : 6 * ROW]),
        ]

    def test_the_hot_path_does_not_copy(self) -> None:
        hop = ActivationLog(limits(), None).open(Retention.MEMORY)
        payload = rows(4, 0)
        before = sys.getrefcount(payload)
        hop.append(0, 0, 4, payload)
        assert sys.getrefcount(payload) == before + 1

    def test_truncation_drops_rows_and_remembers_how_many_were_sent(self) -> None:
        log = ActivationLog(limits(), None)
        hop = log.open(Retention.MEMORY)
        sent = fill(hop, 4, 4)
        hop.truncate_to(5)
        assert (hop.end, hop.kept_to, log.memory_bytes) == (5, 5, 5 * ROW)
        assert hop.replay(4, 5).load() == [LoggedRows(4, 4, 1, 4, sent[4 * ROW : 5 * ROW])]
        hop.append(8, 5, 1, rows(1, 99))
        assert hop.replay(5, 6).load() == [LoggedRows(8, 5, 1, 1, rows(1, 99))]

    def test_rows_that_do_not_follow_are_a_mistake_of_the_sender(self) -> None:
        hop = ActivationLog(limits(), None).open(Retention.MEMORY)
        fill(hop, 3)
        one = rows(1, 0)
        for seq, pos0, n_rows, payload in [(1, 2, 1, one), (0, 3, 1, one), (1, 3, 0, b""), (1, 3, 2, b"x")]:
            with pytest.raises(ValueError, match="does not follow"):
                hop.append(seq, pos0, n_rows, payload)
        with pytest.raises(ValueError, match="cannot truncate"):
            hop.truncate_to(4)

    def test_none_keeps_nothing_and_says_so(self) -> None:
        log = ActivationLog(limits(), None)
        hop = log.open(Retention.NONE)
        assert not hop.append(0, 0, 3, rows(3, 0))
        assert (log.memory_bytes, hop.kept_to, hop.evicted) == (0, 0, True)
        with pytest.raises(EvictedError):
            hop.replay(0, 1)


class TestCaps:
    def test_a_session_over_its_cap_keeps_what_it_has_and_is_evicted_from_there(self) -> None:
        hop = ActivationLog(limits(session=10), None).open(Retention.MEMORY)
        sent = fill(hop, 8, 4, 1)  # the last would fit, but rows after a gap are of no use
        assert (hop.kept_to, hop.end, hop.evicted) == (8, 13, True)
        assert hop.replay(0, 8).load()[0].payload == sent[: 8 * ROW]
        with pytest.raises(EvictedError, match="holds 8"):
            hop.replay(0, 9)

    def test_truncating_back_to_what_is_kept_makes_it_whole_again(self) -> None:
        hop = ActivationLog(limits(session=10), None).open(Retention.MEMORY)
        fill(hop, 8, 4)
        hop.truncate_to(8)
        assert not hop.evicted
        fill(hop, 2, first_seq=12)
        assert hop.kept_to == 10

    def test_one_session_over_the_common_cap_does_not_cost_another_its_rows(self) -> None:
        log = ActivationLog(limits(memory=10), None)
        first, second = log.open(Retention.MEMORY), log.open(Retention.MEMORY)
        fill(first, 8)
        fill(second, 4)
        assert (first.evicted, second.evicted) == (False, True)
        assert log.memory_bytes == 8 * ROW

    def test_sessions_in_the_audit_window_make_room_the_oldest_first(self) -> None:
        log = ActivationLog(limits(memory=10), None)
        ended = [log.open(Retention.MEMORY) for _ in range(3)]
        for now, hop in enumerate(ended):
            fill(hop, 3)
            hop.close(float(now))
        live = log.open(Retention.MEMORY)
        fill(live, 4)
        assert [hop.kept_to for hop in ended] == [0, 3, 3]
        assert live.kept_to == 4


class TestTime:
    def test_rows_are_wiped_when_the_audit_window_is_over(self) -> None:
        log = ActivationLog(limits(), None)
        first, second = log.open(Retention.MEMORY), log.open(Retention.MEMORY)
        fill(first, 2)
        fill(second, 2)
        assert log.next_expiry is None
        first.close(10.0)
        second.close(20.0)
        assert log.next_expiry == 130.0
        log.expire(129.0)
        assert first.kept_to == 2
        log.expire(130.0)
        assert (first.kept_to, second.kept_to, log.next_expiry) == (0, 2, 140.0)
        with pytest.raises(EvictedError):
            first.replay(0, 1)
        log.expire(1000.0)
        assert (log.memory_bytes, log.next_expiry) == (0, None)

    def test_a_closed_session_takes_no_more_rows(self) -> None:
        hop = ActivationLog(limits(), None).open(Retention.MEMORY)
        hop.close(0.0)
        with pytest.raises(ValueError, match="closed"):
            hop.append(0, 0, 1, rows(1, 0))

    def test_a_wiped_session_keeps_nothing_from_then_on(self) -> None:
        log = ActivationLog(limits(), None)
        hop = log.open(Retention.MEMORY)
        fill(hop, 2)
        hop.wipe()
        hop.truncate_to(0)
        fill(hop, 2, first_seq=2)
        assert (hop.kept_to, log.memory_bytes) == (0, 0)


class TestDisk:
    def test_spilled_rows_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=100), tmp_path / "spill")
        hop = log.open(Retention.DISK)
        sent = fill(hop, *[10] * 8)
        do_disk_work(log)
        assert log.memory_bytes <= 25 * ROW
        assert log.disk_bytes >= 55 * ROW
        replay = hop.replay(0, 80)
        assert replay.on_disk
        assert b"".join(part.payload for part in replay.load()) == sent
        assert hop.replay(5, 7).load() == [LoggedRows(0, 5, 2, 10, sent[5 * ROW : 7 * ROW])]
        log.wipe_all()

    def test_nothing_readable_reaches_the_disk_and_the_file_has_no_name(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=10), tmp_path)
        hop = log.open(Retention.DISK)
        secret = b"the prompt, as good as in plain text" * ROW
        hop.append(0, 0, 9, secret[: 9 * ROW])
        do_disk_work(log)
        assert log.disk_bytes > 0
        if sys.platform == "linux":
            assert list(tmp_path.iterdir()) == []
            opened = [path for path in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(path.resolve())]
            assert len(opened) == 1
            raw = opened[0].read_bytes()
            assert len(raw) == log.disk_bytes
            assert secret[:16] not in raw
        log.wipe_all()
        assert log.disk_bytes == 0

    def test_truncation_reaches_spilled_rows(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=10), tmp_path)
        hop = log.open(Retention.DISK)
        sent = fill(hop, 9)
        do_disk_work(log)
        hop.truncate_to(4)
        assert hop.replay(0, 4).load() == [LoggedRows(0, 0, 4, 9, sent[: 4 * ROW])]
        with pytest.raises(EvictedError):
            hop.replay(0, 5)
        log.wipe_all()

    def test_wiping_makes_even_a_replay_taken_before_unreadable(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=10), tmp_path)
        hop = log.open(Retention.DISK)
        fill(hop, 9)
        do_disk_work(log)
        replay = hop.replay(0, 9)
        hop.close(0.0)
        log.expire(120.0)
        with pytest.raises(WipedError):
            replay.load()
        assert log.disk_bytes == 0
        do_disk_work(log)  # gives the file's room back

    def test_wiped_while_a_batch_is_under_way(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=10), tmp_path)
        hop, other = log.open(Retention.DISK), log.open(Retention.DISK)
        fill(hop, 3)
        sent = fill(other, 5)
        batch = log.spill_pending()
        assert batch is not None and log.spill_pending() is None
        hop.wipe()
        batch.run()
        log.spill_done(batch)
        do_disk_work(log)
        assert log.spill_failure is None
        assert other.replay(0, 5).load()[0].payload == sent
        log.wipe_all()
        assert (log.memory_bytes, log.disk_bytes) == (0, 0)

    def test_memory_sessions_never_touch_the_disk(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=10), tmp_path / "spill")
        fill(log.open(Retention.MEMORY), 9)
        assert log.spill_pending() is None

    def test_a_disk_that_fails_turns_memory_into_the_cap(self, tmp_path: Path) -> None:
        blocked = tmp_path / "file"
        blocked.write_text("a file where the folder should be")
        log = ActivationLog(limits(memory=10), blocked)
        hop = log.open(Retention.DISK)
        sent = fill(hop, 6)
        do_disk_work(log)
        assert log.spill_failure is not None and str(blocked) in str(log.spill_failure)
        fill(hop, 6)
        assert (hop.kept_to, hop.evicted, log.memory_bytes) == (6, True, 6 * ROW)
        assert hop.replay(0, 6).load()[0].payload == sent

    def test_damage_on_the_disk_is_found(self, tmp_path: Path) -> None:
        file = SpillFile(tmp_path)
        record = file.write(b"rows")
        assert file.read(record) == b"rows"
        with pytest.raises(SpillError, match="damaged"):
            file.read(type(record)(record.number, record.offset + 1, record.length))
        with pytest.raises(SpillError, match="damaged"):
            file.read(type(record)(record.number + 1, record.offset, record.length))
        file.wipe()
        with pytest.raises(WipedError):
            file.read(record)
        with pytest.raises(WipedError):
            file.write(b"more")

    async def test_the_shell_leaves_the_loop_free(self, tmp_path: Path) -> None:
        log = ActivationLog(limits(memory=100), tmp_path)
        hop = log.open(Retention.DISK)
        sent = fill(hop, *[10] * 9)
        await asyncio.gather(spill(log), spill(log))
        assert log.memory_bytes <= 25 * ROW
        assert b"".join(part.payload for part in hop.replay(0, 90).load()) == sent
        log.wipe_all()


class LogMachine(RuleBasedStateMachine):
    """Random lives of a few sessions, against a list of the rows each sent."""

    @initialize(memory=st.integers(4, 40), session=st.integers(4, 60), total=st.integers(4, 80))
    def start(self, memory: int, session: int, total: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.log = ActivationLog(limits(memory, session, total), Path(self.folder.name))
        self.hops: list[HopLog] = []
        self.sent: list[list[bytes]] = []
        self.now = 0.0
        self.seq = 0
        self.batch = None

    @rule(retention=st.sampled_from(Retention))
    def open(self, retention: Retention) -> None:
        self.hops.append(self.log.open(retention))
        self.sent.append([])

    @precondition(lambda self: self.hops)
    @rule(data=st.data(), n_rows=st.integers(1, 12))
    def append(self, data: st.DataObject, n_rows: int) -> None:
        index = data.draw(st.integers(0, len(self.hops) - 1))
        if self.hops[index].closed_s is None:
            self.seq += 1
            payload = rows(n_rows, self.seq)
            self.hops[index].append(self.seq, len(self.sent[index]), n_rows, payload)
            self.sent[index] += [payload[row * ROW : (row + 1) * ROW] for row in range(n_rows)]

    @precondition(lambda self: self.hops)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.hops) - 1))
        position = data.draw(st.integers(0, len(self.sent[index])))
        if self.hops[index].closed_s is None:
            self.hops[index].truncate_to(position)
            del self.sent[index][position:]

    @precondition(lambda self: self.hops)
    @rule(data=st.data(), later_s=st.floats(0, 60))
    def close(self, data: st.DataObject, later_s: float) -> None:
        self.now += later_s
        data.draw(st.sampled_from(self.hops)).close(self.now)
        self.log.expire(self.now)

    @rule()
    def start_disk_work(self) -> None:
        if self.batch is None:
            self.batch = self.log.spill_pending()

    @rule()
    def finish_disk_work(self) -> None:
        if self.batch is not None:
            self.batch.run()
            self.log.spill_done(self.batch)
            self.batch = None

    @invariant()
    def rows_are_those_sent(self) -> None:
        for hop, sent in zip(getattr(self, "hops", []), getattr(self, "sent", []), strict=True):
            assert hop.end == len(sent)
            if hop.kept_to:
                parts = hop.replay(0, hop.kept_to).load()
                assert b"".join(part.payload for part in parts) == b"".join(sent[: hop.kept_to])
                assert all(len(part.payload) == part.n_rows * ROW for part in parts)

    @invariant()
    def caps_hold(self) -> None:
        if hasattr(self, "log"):
            caps = self.log.limits
            assert 0 <= self.log.memory_bytes <= caps.memory_bytes
            assert self.log.memory_bytes == sum(hop.memory_bytes for hop in self.hops)
            assert self.log.disk_bytes == sum(hop.disk_bytes for hop in self.hops)

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.finish_disk_work()
            self.log.wipe_all()
            assert (self.log.memory_bytes, self.log.disk_bytes, self.log.next_expiry) == (0, 0, None)
            self.folder.cleanup()


LogMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRandomLives = LogMachine.TestCase


def test_a_session_that_began_as_a_copy_keeps_no_rows_because_the_first_are_not_there() -> None:
    hop = ActivationLog(LogLimits(), None).open(Retention.MEMORY, n_copied=10)
    assert not hop.append(0, 10, 2, bytes(8))
    assert (hop.end, hop.kept_to, hop.evicted) == (12, 0, True)
    hop.truncate_to(0)
    assert hop.append(1, 0, 1, bytes(4)), "from the beginning on it is a log like any other"
