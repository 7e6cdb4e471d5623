"""Waiting for something that other tasks bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from meshswarm.errors import MeshswarmError
from meshswarm.net.stream import Stream


async def eventually(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Returns as soon as `condition()` holds; fails the test when it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event of its own)
            await asyncio.sleep(0.005)


class Collector:
    """Takes a stream's frames and end."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.frames: list[bytes] = []
        self.ends: list[MeshswarmError | None] = []
        stream.receive_with(self.frames.append, self.ends.append)

    async def end(self) -> MeshswarmError | None:
        await eventually(lambda: self.ends)
        (end,) = self.ends
        return end


def echo(stream: Stream) -> None:
    """A stream handler that sends every frame back, and ends when the other side does."""
    stream.receive_with(stream.send, lambda error: stream.finish() if error is None else None)
