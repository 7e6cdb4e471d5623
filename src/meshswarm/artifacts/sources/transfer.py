"""All bytes of a remote file, in order, into something that takes them, over as many requests as it needs.

The rule this file keeps: what a sink was given is one version of the file from its start, without a gap. When that can
no longer be said, it begins anew and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, TypeVarTuple

from meshswarm.artifacts.sources.answers import RemoteFile
from meshswarm.artifacts.sources.faults import ChangedError, NoRangesError, PassingError, SourceError
from meshswarm.artifacts.sources.http_source import Body, HttpSource
from meshswarm.artifacts.sources.pace import DownloadProgress, Meter, Retries

MAX_RESTARTS = 2
WRITE_BYTES = 1 << 20
WRITE_S = 0.5
"""A sink is handed so much, or what came in so long: of a slow link nothing is lost either."""
WORTHWHILE_BYTES = 64 << 10
"""A try that brought less was none."""

OnProgress = Callable[[DownloadProgress], None]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Sink(Protocol):
    """Takes a file's bytes. Its methods block, and are called in a thread, one at a time."""

    @property
    def n_bytes(self) -> int:
        """How many it has."""

    @property
    def is_kept(self) -> bool:
        """Whether what it has is there for another time."""

    def begin(self, file: RemoteFile) -> None:
        """From nothing, whatever was there."""

    def write(self, chunk: bytes | bytearray) -> None: ...


@dataclass(slots=True)
class Transfer:
    """`is_checked_later`: the file's hash is known, so that parts of different versions would be noticed in the end."""

    source: HttpSource
    sink: Sink
    is_checked_later: bool = False
    progress: OnProgress | None = None
    say: Callable[[str], None] = lambda _sentence: None
    retries: Retries = field(default_factory=Retries)
    rng: random.Random = field(default_factory=random.Random)

    async def run(self, known: RemoteFile | None = None) -> RemoteFile:
        """Everything that the sink does not have yet, of the file `known`, of which it has something already.

        Raises SourceError when the server does not give it, and what the sink raises.
        """
        n_restarts = 0
        while known is None or self.sink.n_bytes < known.length:
            had = self.sink.n_bytes if known is not None else 0
            try:
                async with self.source.open(had, None, known) as body:
                    if known is None:
                        await in_thread(self.sink.begin, body.file)
                        known = body.file
                    await self._take(body)
            except PassingError as error:
                if known is not None and self.sink.n_bytes - had >= WORTHWHILE_BYTES:
                    self.retries.progressed()
                await self._wait(error)
                if known is not None and not self.is_checked_later and known.validator is None:
                    n_restarts = self._anew("says nothing by which a change would be noticed", n_restarts, error)
                    known = None
            except (ChangedError, NoRangesError) as error:
                if known is None:
                    raise
                why = "has another version of the file" if isinstance(error, ChangedError) else "gives no parts of it"
                n_restarts = self._anew(why, n_restarts, error)
                known = None
        return known

    def _anew(self, why: str, n_restarts: int, error: SourceError) -> int:
        if n_restarts >= MAX_RESTARTS:
            raise error
        self.say(f"{self.source.where} {why}: beginning anew")
        return n_restarts + 1

    async def _wait(self, error: PassingError) -> None:
        wait_s = self.retries.wait_s(error.retry_after_s, self.rng)
        if wait_s is None:
            tries = f"tried {self.retries.n_in_a_row} times" if self.retries.n_in_a_row > 1 else "not waited for"
            kept = "What came is kept: run the same command again to go on" if self.sink.is_kept else "Try again later"
            raise SourceError(
                f"{error}; {tries}. {kept}",
                retry_after_s=error.retry_after_s,
            ) from error
        await asyncio.sleep(wait_s)

    async def _take(self, body: Body) -> None:
        now = asyncio.get_running_loop().time
        meter = Meter(body.file.length, body.start, now())
        buffer, handed_over = bytearray(), now()
        try:
            async with contextlib.aclosing(body.chunks()) as chunks:
                async for chunk in chunks:
                    buffer += chunk
                    if len(buffer) >= WRITE_BYTES or now() - handed_over >= WRITE_S:
                        await self._hand_over(buffer, meter)
                        handed_over = now()
        except PassingError:
            if buffer:
                await self._hand_over(buffer, meter)
            raise
        if buffer:
            await self._hand_over(buffer, meter)

    async def _hand_over(self, buffer: bytearray, meter: Meter) -> None:
        n_bytes = len(buffer)
        await in_thread(self.sink.write, bytes(buffer))
        buffer.clear()
        if self.progress is not None:
            self.progress(meter.add(n_bytes, asyncio.get_running_loop().time()))


async def in_thread(call: Callable[[*Ts], T], *args: *Ts, stop: Callable[[], None] | None = None) -> T:
    """`asyncio.to_thread` that is over when it returns, also when cancelled: nobody may go on beside his own thread.
    `stop` tells the thread to make an end then."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait([task])
        raise
