"""The work behind one torrent: connections made anew, the file looked at again, liars found, pieces handed in.

The rule this file keeps: the torrent is out of the session while its file is hashed, and back in only with the pieces
that were right. One piece of work at a time, under `lifecycle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from meshswarm.artifacts.files import FileStamp
from meshswarm.artifacts.torrent.alone import Answer
from meshswarm.artifacts.torrent.blame import Question
from meshswarm.artifacts.torrent.checking import good_pieces
from meshswarm.artifacts.torrent.state import TorrentState
from meshswarm.errors import ArtifactError

_IDLE_S = 1.0
_REJOIN_EVERY_S = 2.0
_ADD_TIMEOUT_S = 8.0
_ADD_TRIES = 4


class Upkeep:
    """`run` it while the torrent is shared."""

    def __init__(self, state: TorrentState) -> None:
        self._state = state
        self._rejoined_at = float("-inf")
        self.n_looks = 0
        """How often the whole file was looked at again."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mend_for_ever())
            group.create_task(self._clear_doubts())

    async def attach(self) -> None:
        """Put the torrent in as it is now known to be. Under `lifecycle`."""
        if self._state.plan.is_broken:
            await self.leave()
        if not self._state.attachment.is_attached:
            await self._state.attachment.attach(self._state.blame.trusted)

    async def leave(self) -> None:
        """Take the torrent out; what is not surely on the disk is looked at. Under `lifecycle`."""
        state = self._state
        is_flushed = await state.attachment.detach()
        if is_flushed and not state.plan.is_broken:
            state.plan.all_flushed()
            return
        good = await self._good(set(state.plan.unflushed))
        state.plan.found(state.plan.on_disk | good)
        state.is_saved = False

    async def add(self, index: int, data: bytes, *, is_proved: bool) -> bool:
        """Give libtorrent a piece until it has it. `is_proved`: its refusal is another's wrong block in between."""
        state = self._state
        if state.plan.is_broken and state.fault is not None:
            raise state.fault
        want = state.plan.want([index], 0)
        n_faults = state.n_faults
        try:
            with state.news() as news:
                for _ in range(_ADD_TRIES if is_proved else 1):
                    async with state.lifecycle:
                        state.check()
                        await self.attach()
                        state.attachment.add_piece(index, data)
                    n_moves = state.n_moves
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_ADD_TIMEOUT_S):
                            while not want.has_come and (state.n_moves, state.n_faults) == (n_moves, n_faults):
                                news.clear()
                                await news.wait()
                                state.check()
                    if want.has_come:
                        return True
                    if state.fault is not None and state.n_faults != n_faults:
                        raise state.fault
                return False
        finally:
            state.plan.drop(want)

    # -- the file and the connections

    async def _mend_for_ever(self) -> None:
        state = self._state
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await state.work.wait()
            state.work.clear()
            async with state.lifecycle:
                try:
                    await self._mend()
                except ArtifactError as error:
                    state.failed_for_now(error)

    async def _mend(self) -> None:
        state = self._state
        if state.failure is not None:
            await self.leave()
        elif state.is_suspect:
            await self._look_again()
            self.n_looks += 1
            state.wake()
        elif state.plan.is_broken:
            await self.attach()
        elif state.must_rejoin and time.monotonic() - self._rejoined_at >= _REJOIN_EVERY_S:
            await self._rejoin()

    async def _rejoin(self) -> None:
        """All connections anew, without the liars and with those libtorrent banned beside them."""
        self._state.must_rejoin = False
        self._rejoined_at = time.monotonic()
        await self.leave()
        await self.attach()

    async def _look_again(self) -> None:
        """The file may have been changed by others: hash what should be in it, and serve no more than is."""
        state = self._state
        state.is_suspect = False
        await state.attachment.detach()
        on_disk = set(state.plan.on_disk)
        before = on_disk | state.plan.unflushed
        stamp: FileStamp | None = None
        good: frozenset[int] = frozenset()
        with contextlib.suppress(ArtifactError):
            stamp = await asyncio.to_thread(FileStamp.of, state.path)
            good = await self._good(before)
        if state.failure is not None:
            state.is_saved = True  # not all was looked at, so there is nothing to note
            return
        state.plan.found(good)
        state.is_saved = False
        lost = on_disk - good
        if state.is_seed and (lost or stamp is None or stamp.size != state.content.length):
            self._give_up(stamp, len(good), len(before))
            return
        if lost:
            state.around.say(f"{state.path} was changed by another program: {len(lost)} pieces are lost")
        state.watch.start_again(stamp if state.is_seed else None)
        await self.attach()

    async def _good(self, pieces: set[int]) -> frozenset[int]:
        """Which of `pieces` are right in the file; not all of them once the torrent has failed or left."""
        state = self._state
        return await asyncio.to_thread(
            good_pieces, state.path, state.content, state.layer, pieces, lambda: state.failure is not None
        )

    def _give_up(self, stamp: FileStamp | None, n_good: int, n_before: int) -> None:
        state = self._state
        words = "is gone" if stamp is None else "has changed"
        error = ArtifactError(
            f"{state.path} {words}: {n_good} of its {n_before} pieces are the model's. It is no longer offered to "
            "others; put the file back, or import it again"
        )
        state.fail(error)
        state.around.say(str(error))

    # -- liars

    async def _clear_doubts(self) -> None:
        state = self._state
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await state.doubts.wait()
            state.doubts.clear()
            doubtful = state.plan.doubtful & state.plan.missing()
            question = state.blame.next_question(doubtful, time.monotonic())
            if question is not None and state.failure is None:
                await self._ask_alone(question)
                state.doubts.set()

    async def _ask_alone(self, question: Question) -> None:
        state = self._state
        came: dict[int, bytes] = {}

        def on_piece(index: int, data: bytes) -> None:
            came[index] = data
            state.received_alone += len(data)

        try:
            answer = await state.around.alone.ask(state.content, state.layer, question, on_piece)
        except ArtifactError as error:
            answer = Answer(reason=str(error))
        if came:
            state.blame.gave(question.member)
        if answer.wrong is not None:
            self._found_out(question, answer.wrong)
        elif answer.reason and state.blame.silent(question.member, answer.reason, time.monotonic()):
            state.n_moves += 1  # a step forward: a fetch does not end while there are others to ask
            state.wake()
        for index, data in came.items():
            with contextlib.suppress(ArtifactError):
                await self.add(index, data, is_proved=True)

    def _found_out(self, question: Question, piece: int) -> None:
        state = self._state
        host, port = question.member
        state.blame.lied(question.member, piece)
        state.around.say(f"the peer at {host} port {port} sends wrong pieces and is asked for no more")
        state.around.blame_changed()
        state.must_rejoin = True
        state.work.set()
