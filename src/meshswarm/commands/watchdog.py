"""Notices when the event loop stands still, and says where.

While one callback runs, nothing else of the peer does: sessions of others time out, and nobody can ask what is wrong.
The rule this file keeps: what watches needs neither the loop nor the interpreter, which may be what hangs. It is
`faulthandler`'s timer, a thread without Python, and the loop winds it up again every second.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Callable
from typing import TextIO

SILENCE_S = 5.0
BEAT_S = 1.0
MAX_ALARMS = 10
"""Of one process. A machine that is badly overloaded says the same again and again."""


class Watchdog:
    """Use in a `with` block on the loop. A loop that does not run for `silence_s` has every thread's stack written to
    `file`; `say` hears of it when the loop goes on."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        silence_s: float = SILENCE_S,
        beat_s: float = BEAT_S,
        file: TextIO = sys.stderr,
    ) -> None:
        self._say = say
        self._silence_s = silence_s
        self._beat_s = beat_s
        self._file = file
        self._n_alarms = 0

    def __enter__(self) -> Watchdog:
        self._loop = asyncio.get_running_loop()
        self._beat_at = time.monotonic()
        self._beat()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        now = time.monotonic()
        stood_s, self._beat_at = now - self._beat_at, now
        if stood_s > self._silence_s and self._n_alarms < MAX_ALARMS:
            self._n_alarms += 1
            self._say(
                f"this peer did nothing for {stood_s:.1f} s, because one of its parts kept the others waiting or the "
                "machine was asleep; where it stood then is on stderr. Please report that"
            )
        if self._n_alarms < MAX_ALARMS:
            faulthandler.dump_traceback_later(self._silence_s, file=self._file)
        else:
            faulthandler.cancel_dump_traceback_later()
        self._timer = self._loop.call_later(self._beat_s, self._beat)
