"""Pieces of a torrent from an HTTP server, beside the peers that bring others.

The rule this file keeps: a server decides nothing. Each piece is handed to somebody who checks its hash, and a server
that does badly costs its deadline and is dropped with a reason; it never ends the download.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from meshswarm.artifacts.sources.answers import RemoteFile
from meshswarm.artifacts.sources.faults import PassingError, SourceError
from meshswarm.artifacts.sources.http_source import HttpSource
from meshswarm.artifacts.sources.pace import Retries
from meshswarm.artifacts.sources.web_plan import Request, WebLimits, WebPlan
from meshswarm.artifacts.torrent.content import Content

_POLL_S = 0.5
"""So often it is looked whether peers brought what is being asked for."""

AddPiece = Callable[[int, bytes], Awaitable[bool]]
"""Takes (index, all bytes of the piece); False when its hash is wrong."""


@dataclass(frozen=True, slots=True)
class WebOutcome:
    """How it went. `dropped`: why the server is not used any more, None when nothing more was wanted. Bytes are of good
    pieces, and of what came in vain."""

    dropped: str | None
    n_pieces: int
    n_bytes: int
    n_wasted_bytes: int


class WebPieces:
    """Brings pieces of `content` from `source` until `wanted` is empty.

    `wanted`: the pieces still missing, the most urgent first, asked again and again. `limit` is awaited with every
    number of bytes before more are read.
    """

    def __init__(
        self,
        source: HttpSource,
        content: Content,
        *,
        wanted: Callable[[], Sequence[int]],
        add_piece: AddPiece,
        limit: Callable[[int], Awaitable[None]] | None = None,
        limits: WebLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._source = source
        self._content = content
        self._wanted = wanted
        self._add_piece = add_piece
        self._limit = limit
        self._limits = limits or WebLimits()
        self._rng = rng or random.Random()
        self._tasks: dict[asyncio.Task[None], Request] = {}
        self._at: dict[Request, int] = {}  # the piece that each request waits for
        self.n_pieces = 0
        self.n_bytes = 0
        self.n_wasted_bytes = 0

    async def run(self) -> WebOutcome:
        """Returns when nothing is wanted any more, or the server was dropped. Raises only what `add_piece` raises."""
        try:
            file = await self._probe()
        except SourceError as error:
            return self._outcome(str(error))
        if file.length != self._content.length:
            return self._outcome(
                f"{self._source.where} has a file of {file.length} bytes, not of {self._content.length}"
            )
        plan = WebPlan(self._content, file.accepts_ranges, self._limits, self._rng)
        try:
            while plan.dropped is None and (wanted := self._wanted()):
                self._cut_short(wanted)
                self._begin(plan, wanted, file)
                if plan.dropped is None:
                    await self._wait(plan)
        finally:
            await self._stop()
        return self._outcome(None if plan.dropped is None else f"{self._source.where}: {plan.dropped}")

    def _outcome(self, dropped: str | None) -> WebOutcome:
        return WebOutcome(dropped, self.n_pieces, self.n_bytes, self.n_wasted_bytes)

    async def _probe(self) -> RemoteFile:
        retries = Retries(max_at_first=self._limits.max_failures, first_wait_s=self._limits.first_wait_s)
        while True:
            try:
                return await self._source.probe()
            except PassingError as error:
                wait_s = retries.wait_s(error.retry_after_s, self._rng)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    def _cut_short(self, wanted: Sequence[int]) -> None:
        """End requests for pieces that came from elsewhere meanwhile."""
        missing = set(wanted)
        for task, request in self._tasks.items():
            if missing.isdisjoint(range(self._at[request], request.stop)):
                task.cancel()

    def _begin(self, plan: WebPlan, wanted: Sequence[int], file: RemoteFile) -> None:
        now = asyncio.get_running_loop().time()
        while (request := plan.next(wanted, now)) is not None:
            self._at[request] = request.first
            self._tasks[asyncio.create_task(self._serve(plan, request, file))] = request

    async def _wait(self, plan: WebPlan) -> None:
        wait_s = min(_POLL_S, plan.wait_s(asyncio.get_running_loop().time()) or _POLL_S)
        if not self._tasks:
            await asyncio.sleep(wait_s)
            return
        done, _ = await asyncio.wait(self._tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            request = self._tasks.pop(task)
            plan.ended(request)
            del self._at[request]
            if not task.cancelled():
                task.result()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _serve(self, plan: WebPlan, request: Request, file: RemoteFile) -> None:
        """One request, piece by piece; tells the plan how it went."""
        now = asyncio.get_running_loop().time
        start = self._content.piece_range(request.first).start
        stop = self._content.piece_range(request.stop - 1).stop
        try:
            async with (
                asyncio.timeout(request.deadline_s) as deadline,
                self._source.open(start, stop, file) as body,
                contextlib.aclosing(body.chunks()) as chunks,
            ):
                await self._take(plan, request, chunks, deadline)
        except TimeoutError:
            plan.failed(request, "it is too slow", now(), may_pass=True)
        except SourceError as error:
            may_pass = isinstance(error, PassingError)
            plan.failed(request, str(error), now(), may_pass=may_pass, asked_s=error.retry_after_s)

    async def _take(
        self, plan: WebPlan, request: Request, chunks: AsyncGenerator[bytes, None], deadline: asyncio.Timeout
    ) -> None:
        now = asyncio.get_running_loop().time
        buffer = bytearray()
        try:
            async for chunk in chunks:
                since = now()
                buffer += chunk
                while (at := self._at[request]) < request.stop and len(buffer) >= self._size(at):
                    piece = bytes(buffer[: self._size(at)])
                    del buffer[: len(piece)]
                    await self._hand_over(plan, at, piece)
                    self._at[request] += 1
                    if self._is_enough(plan, request):
                        return
                if self._limit is not None:
                    await self._limit(len(chunk))
                deadline.reschedule((deadline.when() or 0.0) + now() - since)  # the server has no part in that
        finally:
            self.n_wasted_bytes += len(buffer)
        if self._at[request] < request.stop:
            raise PassingError(f"it gives less than it is asked for, {len(buffer)} bytes of a piece")

    def _size(self, index: int) -> int:
        return len(self._content.piece_range(index))

    def _is_enough(self, plan: WebPlan, request: Request) -> bool:
        """True when the rest of a request would come in vain. A server without ranges is read to its end: it cannot be
        asked for the rest later."""
        at = self._at[request]
        is_unwanted = plan.accepts_ranges and at < request.stop and at not in self._wanted()
        return plan.dropped is not None or is_unwanted

    async def _hand_over(self, plan: WebPlan, index: int, piece: bytes) -> None:
        if not plan.accepts_ranges and index not in self._wanted():
            self.n_wasted_bytes += len(piece)
            return
        is_good = await self._add_piece(index, piece)
        plan.took(index, is_good)
        if is_good:
            self.n_pieces += 1
            self.n_bytes += len(piece)
        else:
            self.n_wasted_bytes += len(piece)
