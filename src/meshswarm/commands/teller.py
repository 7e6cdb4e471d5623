"""Writes lines for whoever reads this process's output, on a thread of its own.

The rule this file keeps: nobody who does not read holds the peer up. A terminal that is stopped (Ctrl-S, text marked in
a console) or a pipe that is full blocks whoever writes to it; that must never be the event loop. And what is said
steers no terminal, whoever's words are in it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from typing import TextIO

from meshswarm.errors import printable

MAX_LINES = 1000
"""That wait to be written; further ones are lost, and their number is said once there is room again."""


class Teller:
    """Takes whole lines of text for `stream`, or writes as a `logging` handler makes them."""

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._descriptor = (
            stream.fileno()
        )  # not the stream: its lock, held by a writer that hangs, would block the exit
        self._encoding = stream.encoding
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._lost: deque[None] = deque()
        self._thread = threading.Thread(target=self._write_all, name="teller", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """From any thread; returns at once."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        try:
            self._lines.put_nowait(printable(text))
        except queue.Full:
            self._lost.append(None)

    def flush(self) -> None:
        """For `logging`; see `close`."""

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until all is written, for so long at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (text := self._lines.get()) is not None:
            if self._lost:
                n_lost = len(self._lost)
                self._lost.clear()
                text = f"{text}({n_lost} lines were lost here: nobody read them)\n"
            try:
                self._write(text.encode(self._encoding, "replace"))
            except OSError:  # the reader is gone for good: the peer lives on without one
                return

    def _write(self, rest: bytes) -> None:
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
