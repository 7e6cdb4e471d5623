"""A torrent's place in the libtorrent session: put in, told what is wanted, flushed, and taken out again.

The rule this file keeps: nothing is written to the file once `detach` has returned, so that whoever hashes it then, or
puts it in again, meets no late block of an earlier try.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import libtorrent as lt

from meshswarm.artifacts.torrent.alerts import Doubted, Event, Handle, Paused, Ready
from meshswarm.artifacts.torrent.alone import Alone
from meshswarm.artifacts.torrent.blame import Member
from meshswarm.artifacts.torrent.certificates import TlsIdentity
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.engine import Engine
from meshswarm.artifacts.torrent.params import torrent_params
from meshswarm.artifacts.torrent.plan import PiecePlan
from meshswarm.artifacts.torrent.resume import Notes

_PAUSE_TIMEOUT_S = 60.0
_READY_TIMEOUT_S = 60.0

Say = Callable[[str], None]
"""Tells a person one sentence."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the torrents of one session share."""

    engine: Engine
    alone: Alone
    notes: Notes
    tls: TlsIdentity | None
    say: Say
    blame_changed: Callable[[], None]


@dataclass(slots=True)
class Attachment:
    """`plan` says what is here and what is wanted; `sink` hears of everything else."""

    around: Surroundings
    content: Content
    path: Path
    layer: bytes | None
    plan: PiecePlan
    sink: Callable[[Event], None]
    is_seed: bool
    _handle: Handle | None = None
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _paused: asyncio.Event = field(default_factory=asyncio.Event)
    _is_doubted: bool = False
    _may_write: bool = False

    @property
    def is_attached(self) -> bool:
        return self._handle is not None

    async def attach(self, members: Iterable[Member]) -> None:
        """Put the torrent in, dial `members`, ask for what is wanted. Raises ArtifactError."""
        tls = self.around.tls
        params = await asyncio.to_thread(
            torrent_params,
            self.content,
            self.path,
            self.layer,
            frozenset(self.plan.on_disk),
            tls,
            is_seed=self.is_seed,
        )
        self._ready.clear()
        self._paused.clear()
        self._is_doubted = False
        self._may_write = len(self.plan.on_disk) < self.content.n_pieces
        self.plan.attached_anew()
        handle = await self.around.engine.add(params, self.content.info_hash, self._heard)
        if tls is not None:
            handle.set_ssl_certificate_buffer(tls.leaf, tls.key, tls.dh_params)
        self._handle = handle
        with contextlib.suppress(TimeoutError):  # a lost alert, or a check of a very large file: both end by themselves
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._ready.wait()
        if self._is_doubted:
            self.ask_for_pieces()
        for member in members:
            self.connect(member)
        self.ask()

    async def detach(self) -> bool:
        """Take the torrent out; True where all that was verified is known to be on the disk."""
        handle, self._handle = self._handle, None
        if handle is None:
            return True
        is_flushed = True
        if self._may_write:
            handle.pause()
            try:
                async with asyncio.timeout(_PAUSE_TIMEOUT_S):
                    await self._paused.wait()
            except TimeoutError:
                is_flushed = False
        await self.around.engine.remove(self.content.info_hash)
        return is_flushed

    def ask(self) -> None:
        """Tell libtorrent what is wanted now."""
        if self._handle is not None and (changes := self.plan.priorities()):
            self._handle.prioritize_pieces(changes)

    def flush(self) -> None:
        """Have what is here written; `plan` learns of it by and by."""
        if self._handle is not None and not self.plan.is_flushing:
            self.plan.flush_asked()
            self._handle.flush_cache()

    def connect(self, member: Member) -> None:
        if self._handle is not None:
            self._handle.connect_peer(member)

    def add_piece(self, index: int, data: bytes) -> None:
        if self._handle is not None:
            self._handle.add_piece(index, data, int(lt.add_piece_flags_t.overwrite_existing))

    def ask_for_pieces(self) -> None:
        """A `Status` with pieces follows: what is verified, perhaps unflushed."""
        if self._handle is not None:
            self._handle.post_status(lt.torrent_handle.query_pieces)

    def _heard(self, event: Event) -> None:
        match event:
            case Ready():
                self._ready.set()
            case Paused():
                self._paused.set()
            case Doubted():
                self._is_doubted = True
                self.plan.found(())
        self.sink(event)
