"""`meshswarm models pull`: a model's files, from a path, a package, a server, or the peers of a swarm.

The rule this file keeps: what the reference says decides where it comes from. Names and ids are the swarm's: the peer
that runs in the folder fetches them, or one started for it, which leaves when nobody waits for it any more. What came
before an end of any kind is there at the next try.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshswarm.artifacts.merkle import parse_model_id
from meshswarm.artifacts.model_info import ModelInfo
from meshswarm.artifacts.sources import is_source
from meshswarm.artifacts.sources.references import is_remote
from meshswarm.artifacts.store.disk import Disk
from meshswarm.artifacts.store.store import Store
from meshswarm.commands.control import RunningPeer, announce_running, find_running, forget_running
from meshswarm.commands.models import entry_of
from meshswarm.commands.serve import run_in_loop
from meshswarm.commands.signals import INTERRUPT, on_signals
from meshswarm.commands.story import pace_of, sentence_of, sources_of
from meshswarm.commands.throwaway import Where, throwaway_peer
from meshswarm.config import FolderInUseError, Home, HomeLock
from meshswarm.errors import ConfigError, LocalError
from meshswarm.fetching.sharing import PULL_PATH

START_S = 20.0

Show = Callable[[Mapping[str, Any]], None]
"""Takes events: how far it is."""


def pull(where: Where, ref: str, show: Show | None) -> dict[str, Any]:
    """Get the model behind `ref` into the folder's store: its entry, as `models list` shows it. Raises
    MeshswarmError with a sentence, and KeyboardInterrupt when it was called off, of which `show` was told."""
    if not ref.strip():
        raise ConfigError(
            "say which model: a name or an id of the swarm, a path, hf:OWNER/REPO/FILE.gguf or https://..."
        )
    seen = _Seen(show or (lambda event: None))
    store = Store(where.home.create().root)
    known = store.find(ref)
    if known is not None and store.trouble(known.model_id) is None:
        seen({"event": "model", "message": f"{known.name} is already here, whole."})
        return entry_of(store, Disk(where.home.root, store), known)
    try:
        if is_source(ref):
            known = store.obtain(
                ref,
                say=lambda sentence: seen({"event": "model", "message": sentence}),
                progress=lambda done, total: seen({"event": "reading", "bytes": done, "wanted_bytes": total}),
            )
        else:
            known = _from_swarm(where, ref, store, seen)
    except (KeyboardInterrupt, asyncio.CancelledError):
        seen.stopped(is_kept=is_remote(ref) or not is_source(ref))
        raise KeyboardInterrupt from None
    return entry_of(store, Disk(where.home.root, store), known)


def _from_swarm(where: Where, ref: str, store: Store, seen: _Seen) -> ModelInfo:
    model_id = _pulled(where, ref, seen)
    known = store.get(parse_model_id(model_id))
    if known is None:
        raise LocalError(f"{ref[:80]} was fetched and is not here: somebody removed it meanwhile")
    return known


def _pulled(where: Where, ref: str, seen: _Seen) -> str:
    """The id of the model, by whichever peer the folder has by then: of two pulls that begin or end in one moment the
    second finds the first one's peer, or its own place free."""
    until = time.monotonic() + START_S
    while True:
        running = _running(where.home)
        is_ours = running is not None and running.errand == _errand(where)  # another pull, in the same swarm
        try:
            if running is None:
                return run_in_loop(_ask_own_peer(where, ref, seen))
            return _ask(running if is_ours else where.leave_to(running, "models pull"), ref, seen)
        except FolderInUseError:
            if time.monotonic() >= until:
                raise
        except LocalError:
            if not is_ours or time.monotonic() >= until:
                raise
            time.sleep(0.1)  # that peer is leaving


class _Seen:
    """Passes events on, and remembers how far it was."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._last: Mapping[str, Any] | None = None
        self._has_stopped = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] in ("fetching", "reading"):
            self._last = event
        if not self._has_stopped:
            self._show(event)

    def stopped(self, *, is_kept: bool) -> None:
        """Say so, once, and nothing after it."""
        if not self._has_stopped:
            far = self._last if is_kept else None
            figures = {} if far is None else {"bytes": far["bytes"], "wanted_bytes": far["wanted_bytes"]}
            self({"event": "interrupted", **figures})
            self._has_stopped = True


def _errand(where: Where) -> str:
    """What a peer that was started for a pull says of itself."""
    return f"pull {where.swarm!r} {where.private} {sorted(f'{peer}@{address}' for peer, address in where.join)}"


def _running(home: Home) -> RunningPeer | None:
    """The peer of the folder; one that is just starting, perhaps for another pull, is waited for."""
    until = time.monotonic() + START_S
    while (running := find_running(home)) is None:
        try:
            HomeLock(home).release()
        except ConfigError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
        return None
    return running


def _ask(peer: RunningPeer, ref: str, tell: Callable[[Mapping[str, Any]], None]) -> str:
    """The id of the model."""
    for event in peer.stream(PULL_PATH, {"model": ref}):
        if "progress" in event:
            tell(event["progress"])
        elif "result" in event:
            return str(event["result"]["model_id"])
    raise LocalError(f"the peer at {peer.api} ended before {ref[:80]} was here; what came is kept: pull it again")


async def _ask_own_peer(where: Where, ref: str, seen: _Seen) -> str:
    """It can be found while it runs, so that a second pull in this folder shares it, and it stays for that one. Ctrl-C
    calls this pull off; where the peer then stays for another, a second one ends that too. Raises CancelledError."""
    async with throwaway_peer(where, say=lambda sentence: seen({"event": "model", "message": sentence})) as peer:
        assert peer.sharing is not None
        pulling = asyncio.ensure_future(peer.sharing.pull({"model": ref}, seen))
        hurry = asyncio.ensure_future(asyncio.Event().wait())

        def call_off() -> None:
            pulling.cancel()
            seen.stopped(is_kept=True)

        announce_running(where.home, peer.api.base_url, None, _errand(where))
        try:
            with on_signals(INTERRUPT, call_off, hurry.cancel):
                try:
                    return str((await pulling)["model_id"])
                finally:
                    others = asyncio.ensure_future(peer.sharing.errands_done())
                    await asyncio.wait((others, hurry), return_when=asyncio.FIRST_COMPLETED)
                    others.cancel()
                    hurry.cancel()
        finally:
            forget_running(where.home)


def terminal_bar() -> Show:
    """Shows events on stderr: how far it is in one line that is written over, everything else in lines of its own."""
    width = 0

    def show(event: Mapping[str, Any]) -> None:
        nonlocal width
        is_bar = event["event"] in ("fetching", "reading") and sys.stderr.isatty()
        line = _bar(event) if is_bar else sentence_of(event)
        if line and (is_bar or event["event"] != "reading"):
            start = "\r" if sys.stderr.isatty() else ""
            print(f"{start}{line:<{width}}", end="" if is_bar else "\n", file=sys.stderr, flush=True)
            width = len(line) if is_bar else 0

    return show


def _bar(event: Mapping[str, Any]) -> str:
    done, total = event["bytes"], max(1, event["wanted_bytes"])
    bar = "#" * (24 * done // total)
    line = f"[{bar:<24}] {100 * done // total:3d} %  {done / 1e6:.0f} of {total / 1e6:.0f} MB"
    if event["event"] == "reading":
        return line
    return "  ".join((line, ", ".join(pace_of(event, sources_of(event))))).rstrip()
