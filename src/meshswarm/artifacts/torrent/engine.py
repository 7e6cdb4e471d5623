"""One libtorrent session on the event loop: alerts come through a file descriptor, and nothing here waits for it.

The rule this file keeps: the loop never calls what waits for libtorrent's threads. Adding, removing and ending are
told by alerts or done in a thread; events of a torrent that was removed reach nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import libtorrent as lt

from meshswarm.artifacts.torrent.alerts import Added, Dropped, Event, Handle, Removed, translate
from meshswarm.artifacts.torrent.door import HostRange
from meshswarm.artifacts.torrent.settings import Settings, as_pack
from meshswarm.errors import ArtifactError

STEP_TIMEOUT_S = 20.0
"""How long libtorrent may take to add or remove a torrent: it does so within milliseconds, on a busy disk longer."""

Sink = Callable[[Event], None]


@dataclass(slots=True)
class _Entry:
    sink: Sink
    added: asyncio.Future[Handle]
    handle: Handle | None = None
    early: list[tuple[Handle, Event]] = field(default_factory=list)
    """What was told of it before it was said to be added: libtorrent does so in either order."""


@dataclass(slots=True)
class Engine:
    """A running session. Made by `start`; ended by `close`, which no other call may follow."""

    _session: lt.session
    _on_event: Sink
    _receiver: socket.socket
    _sender: socket.socket
    _entries: dict[bytes, _Entry] = field(default_factory=dict)
    _removals: dict[bytes, asyncio.Future[None]] = field(default_factory=dict)
    _is_closed: bool = False

    @classmethod
    async def start(cls, settings: Settings, on_event: Sink) -> Engine:
        """`on_event` hears what is about the session; a torrent's events go to its own sink."""
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        try:
            session: lt.session = await asyncio.to_thread(lt.session, as_pack(settings), 0)  # 0: no plugin, so no PEX
        except BaseException:
            receiver.close()
            sender.close()
            raise
        session.set_peer_class_filter(_limits_for_all())
        engine = cls(session, on_event, receiver, sender)
        asyncio.get_running_loop().add_reader(receiver.fileno(), engine._drain)
        session.set_alert_fd(sender.fileno())
        engine._drain()
        return engine

    async def close(self) -> None:
        """Ends the session: up to half a second, in a thread. What is received and unflushed is written."""
        if self._is_closed:
            return
        self._is_closed = True
        self._entries.clear()
        asyncio.get_running_loop().remove_reader(self._receiver.fileno())
        holder = [self._session]
        del self._session  # the last reference goes in the thread: ending a session waits for its threads
        await asyncio.to_thread(holder.clear)
        self._receiver.close()
        self._sender.close()

    def apply(self, settings: Settings) -> None:
        self._session.apply_settings(as_pack(settings))

    def filter_hosts(self, hosts: set[HostRange]) -> None:
        """Drop and refuse all connections with these addresses, in every torrent."""
        rules = lt.ip_filter()
        for first, last in hosts:
            rules.add_rule(first, last, 1)
        self._session.set_ip_filter(rules)

    def post_updates(self) -> None:
        """A `Status` follows for every torrent that changed; without pieces."""
        self._session.post_torrent_updates(0)

    async def ports(self) -> tuple[int, int]:
        """(plain port, TLS port), 0 where none is open."""
        session = self._session
        return await asyncio.to_thread(lambda: (session.listen_port(), session.ssl_listen_port()))

    async def add(self, params: lt.add_torrent_params, info_hash: bytes, sink: Sink) -> Handle:
        """Adds a torrent; its events go to `sink` from then on. Raises ArtifactError when libtorrent refuses."""
        entry = _Entry(sink, asyncio.get_running_loop().create_future())
        self._entries[info_hash] = entry
        self._session.async_add_torrent(params)
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                return await entry.added
        except BaseException as error:
            if entry.handle is not None:
                self._session.remove_torrent(entry.handle)
            if self._entries.get(info_hash) is entry:
                del self._entries[info_hash]
            if isinstance(error, TimeoutError):
                raise ArtifactError("the torrent session does not answer") from None
            raise

    async def remove(self, info_hash: bytes) -> None:
        """Takes a torrent out. Its file stays."""
        entry = self._entries.pop(info_hash, None)
        if entry is None or entry.handle is None:
            return
        gone = self._removals.setdefault(info_hash, asyncio.get_running_loop().create_future())
        self._session.remove_torrent(entry.handle)
        entry.handle = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STEP_TIMEOUT_S):
                await asyncio.shield(gone)
        self._removals.pop(info_hash, None)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                pass
        for alert in self._session.pop_alerts():
            for handle, event in translate(alert):
                self._dispatch(handle, event)

    def _dispatch(self, handle: Handle | None, event: Event) -> None:
        if isinstance(event, Removed):
            if (gone := self._removals.get(event.info_hash)) is not None and not gone.done():
                gone.set_result(None)
        elif handle is None:
            self._on_event(event)
            if isinstance(event, Dropped):
                for entry in list(self._entries.values()):
                    entry.sink(event)
        elif isinstance(event, Added):
            waiting = self._entries.get(event.info_hash)
            if waiting is not None and waiting.handle is None:
                self._added(waiting, handle, event)
        else:
            meant = self._entries.get(_info_hash(handle))
            if meant is None:
                return
            if meant.handle is None:
                meant.early.append((handle, event))
            elif meant.handle == handle:
                meant.sink(event)

    def _added(self, entry: _Entry, handle: Handle, event: Added) -> None:
        if event.fault:
            if not entry.added.done():
                entry.added.set_exception(ArtifactError(f"the torrent cannot be added: {event.fault}"))
            return
        entry.handle = handle
        if not entry.added.done():
            entry.added.set_result(handle)
        early, entry.early = entry.early, []
        for meant, earlier in early:
            if meant == handle:
                entry.sink(earlier)


def _info_hash(handle: Handle) -> bytes:
    """All zeros for a torrent that has gone."""
    raw: Any = handle.info_hashes().v2.to_bytes()
    return bytes(raw)


def _limits_for_all() -> lt.ip_filter:
    """Rate limits hold for every address: by itself libtorrent exempts those of local networks and loopback."""
    rules = lt.ip_filter()
    everybody = 1 << lt.session.global_peer_class_id
    rules.add_rule("0.0.0.0", "255.255.255.255", everybody)
    rules.add_rule("::", ":".join(["ffff"] * 8), everybody)
    return rules
