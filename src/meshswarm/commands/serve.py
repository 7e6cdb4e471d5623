"""`meshswarm serve` and `meshswarm --auto`: a peer in the foreground, its story on the terminal or as JSON lines.

The rule this file keeps: nothing here waits for whoever reads what is said, and a loop that stands still is noticed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from meshswarm.commands.control import announce_running, forget_running
from meshswarm.commands.signals import INTERRUPT_OR_END, on_signals
from meshswarm.commands.story import sentence_of
from meshswarm.commands.teller import Teller
from meshswarm.commands.watchdog import Watchdog
from meshswarm.peer import Peer, PeerSettings

T = TypeVar("T")

SWITCH_INTERVAL_S = 1e-4
"""How long the event loop may keep the interpreter from the engine's thread, which wants it for a moment before and
after each computation. Python's default, 5 ms, cost about 1 ms a token on two cores."""


def serve_forever(settings: PeerSettings, *, as_json: bool) -> int:
    """Run the peer until a signal. Returns the exit code.

    Where there is SIGUSR1, it makes the process say on stderr what each of its threads is doing; a crash does too.
    """
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    out, complaints = Teller(sys.stdout), Teller(sys.stderr)
    logging.basicConfig(handlers=[logging.StreamHandler(complaints)], format="%(message)s")

    def show(event: Mapping[str, Any]) -> None:
        line = json.dumps(dict(event)) if as_json else sentence_of(event)
        if line:
            out.say(line)

    try:
        run_in_loop(_serve(settings, show))
        show({"event": "stopped"})
    finally:
        out.close()
        complaints.close()
    return 0


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on the fastest loop this platform has, with threads that hand the interpreter over quickly."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    factory = None
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    else:  # the default loop there cannot watch sockets
        factory = asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def _serve(settings: PeerSettings, show: Callable[[Mapping[str, Any]], None]) -> None:
    def report(event: Mapping[str, Any]) -> None:
        if event["event"] == "started":
            announce_running(settings.home, event["api"], _api_key(settings))
        if event["event"] == "ready":
            # What was made during start-up lives as long as the peer: keep the collector from walking it again.
            gc.collect()
            gc.freeze()
        show(event)

    peer = Peer(settings, report)
    with (
        on_signals(INTERRUPT_OR_END, peer.stop),
        Watchdog(lambda sentence: report({"event": "warning", "message": sentence})),
    ):
        try:
            await peer.run()
        finally:
            forget_running(settings.home)


def _api_key(settings: PeerSettings) -> str | None:
    path = settings.home.api_key
    if settings.api is None or settings.api.is_loopback or not path.exists():
        return None
    return path.read_text().strip()
