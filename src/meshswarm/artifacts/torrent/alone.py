"""Asking one peer alone for pieces: what comes wrong then is that peer's doing and nobody else's.

The rule this file keeps: the torrent here never has more than one connection, dialled by us. It runs in a session of
its own, without a socket that anybody could dial, and its file is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshswarm.artifacts.torrent.alerts import (
    Event,
    FileFault,
    Handle,
    PeerJoined,
    PeerLeft,
    PieceFailed,
    PieceRead,
    PieceVerified,
    Ready,
)
from meshswarm.artifacts.torrent.blame import Question
from meshswarm.artifacts.torrent.certificates import TlsIdentity
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.engine import Engine
from meshswarm.artifacts.torrent.params import torrent_params
from meshswarm.artifacts.torrent.settings import Settings

ANSWER_S = 8.0
"""A peer that connects and sends no piece for so long is passed over; large pieces may take `SLOW_BYTES_S`."""
SLOW_BYTES_S = 64 * 1024

_PREFIX = ".alone-"
_STALE_AFTER_S = 3600.0

OnPiece = Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """How a member answered alone. `wrong`: the piece it lied about; `reason`: why it gave less than all."""

    wrong: int | None = None
    reason: str = ""


def sweep(folder: Path) -> None:
    """Remove what a peer that was killed while it asked has left behind. Blocking."""
    for left_over in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left_over.stat().st_mtime > _STALE_AFTER_S:
                shutil.rmtree(left_over, ignore_errors=True)


@dataclass(slots=True)
class Alone:
    """Questions to one member at a time. `settings`: of the session, which starts with the first question."""

    _settings: Settings
    _tls: TlsIdentity | None
    _folder: Path
    _engine: Engine | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def ask(self, content: Content, layer: bytes | None, question: Question, on_piece: OnPiece) -> Answer:
        """Every right piece goes to `on_piece` as it comes. Raises ArtifactError when no question can be asked here."""
        async with self._lock:
            if self._engine is None:
                self._engine = await Engine.start(self._settings, lambda event: None)
            await asyncio.to_thread(self._folder.mkdir, parents=True, exist_ok=True)
            folder = await asyncio.to_thread(tempfile.TemporaryDirectory, dir=self._folder, prefix=_PREFIX)
            try:
                return await self._ask(self._engine, content, layer, question, on_piece, Path(folder.name))
            finally:
                await asyncio.to_thread(folder.cleanup)

    def apply(self, settings: Settings) -> None:
        """Settings from now on."""
        self._settings = {**self._settings, **settings}
        if self._engine is not None:
            self._engine.apply(settings)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
            self._engine = None

    async def _ask(
        self,
        engine: Engine,
        content: Content,
        layer: bytes | None,
        question: Question,
        on_piece: OnPiece,
        folder: Path,
    ) -> Answer:
        events: asyncio.Queue[Event] = asyncio.Queue()
        params = await asyncio.to_thread(torrent_params, content, folder / "piece", layer, (), self._tls)
        handle = await engine.add(params, content.info_hash, events.put_nowait)
        try:
            if self._tls is not None:
                handle.set_ssl_certificate_buffer(self._tls.leaf, self._tls.key, self._tls.dh_params)
            wait_s = ANSWER_S if question.is_brief else ANSWER_S + content.piece_length / SLOW_BYTES_S
            return await _hear(handle, events, question, on_piece, wait_s)
        finally:
            await engine.remove(content.info_hash)


async def _hear(
    handle: Handle, events: asyncio.Queue[Event], question: Question, on_piece: OnPiece, wait_s: float
) -> Answer:
    waiting = set(question.pieces)
    last_word = ""
    while waiting:
        try:
            async with asyncio.timeout(ANSWER_S if not last_word else wait_s):
                event = await events.get()
        except TimeoutError:
            return Answer(reason=last_word or "does not answer")
        match event:
            case Ready():
                handle.prioritize_pieces([(index, 7) for index in question.pieces])
                handle.connect_peer(question.member)
            case PeerJoined():
                last_word = "connected, sends nothing"
            case PieceVerified(piece):
                handle.read_piece(piece)
            case PieceRead(piece, data) if data is not None:
                waiting.discard(piece)
                on_piece(piece, data)
            case PieceFailed(piece):
                return Answer(wrong=piece)
            case PeerLeft(reason=reason):
                wrong = await _failed_after_all(events)
                return Answer(wrong=wrong, reason=reason or "closed the connection")
            case PieceRead() | FileFault():
                return Answer(reason="this disk failed while the piece was being asked for")
            case _:
                pass
    return Answer()


async def _failed_after_all(events: asyncio.Queue[Event]) -> int | None:
    """A connection may end before the news of why: that its last piece was wrong."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while True:
                if isinstance(event := await events.get(), PieceFailed):
                    return event.piece
    return None
