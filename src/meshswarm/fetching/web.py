"""Pieces from the web: ranges of a file's bytes, read over HTTP and handed to its torrent, which checks them.

The rule this file keeps: a server is asked for exactly the pieces it was given, in runs; the first wrong piece, and the
second failure in a row, end it for this fetch. What it could not give goes back to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from meshswarm.artifacts.torrent.content import Content
from meshswarm.errors import ArtifactError, MeshswarmError
from meshswarm.fetching.plan import Portions

MAX_FAILURES = 2
RETRY_S = 1.0


class WebFile(Protocol):
    """A model's file on some server."""

    @property
    def url(self) -> str: ...

    async def read(self, start: int, stop: int) -> bytes:
        """Exactly these bytes. Raises MeshswarmError: a server that stalls, has no ranges or sends something else."""


AddPiece = Callable[[int, bytes], Awaitable[bool]]


class WebFeeder:
    """Feeds one file's torrent from one server until nothing is left for it. `add_piece`: whether it was right."""

    def __init__(self, content: Content, source: WebFile, portions: Portions, add_piece: AddPiece) -> None:
        self._content = content
        self._source = source
        self._portions = portions
        self._add_piece = add_piece
        self.n_bytes = 0
        """How many bytes of right pieces came."""

    async def feed(self, arrived: Callable[[], None]) -> None:
        """Until nothing is left. `arrived`: called after every portion. Raises ArtifactError when the server is not to
        be used any more."""
        n_failures = 0
        while portion := self._portions.for_web():
            got: list[int] = []
            try:
                await self._take(portion, got)
                n_failures = 0
            except MeshswarmError as error:
                n_failures = 1 if got else n_failures + 1
                if isinstance(error, WrongPieceError) or n_failures >= MAX_FAILURES:
                    raise ArtifactError(f"{self._source.url[:200]} is not used any more: {error}") from error
                await asyncio.sleep(RETRY_S)
            finally:
                self._portions.done(got)
                self._portions.give_back(portion)
                if got:
                    arrived()

    async def _take(self, portion: Sequence[int], got: list[int]) -> None:
        for run in self._content.ranges_of(portion):
            pieces = sorted(self._content.pieces_of([run]))
            data = memoryview(await self._source.read(run.start, run.stop))
            if len(data) != len(run):
                raise ArtifactError(f"it sent {len(data)} bytes for {len(run)}")
            for piece in pieces:
                place = self._content.piece_range(piece)
                if not await self._add_piece(piece, bytes(data[place.start - run.start : place.stop - run.start])):
                    raise WrongPieceError(f"piece {piece} from there is not the model's")
                self.n_bytes += len(place)
                got.append(piece)


class WrongPieceError(ArtifactError):
    """A server sent something else than the file it is said to have."""
