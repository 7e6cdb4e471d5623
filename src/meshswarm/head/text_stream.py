"""From tokens' bytes to the text a client sees, piece by piece.

The rule this file keeps: what went out is never taken back, and how the bytes were cut into pieces never shows. The
pieces put together are the text that all the bytes at once would have given: a character comes out whole or not at
all, U+FFFD stands only where no further byte could have made sense of it, and text that may turn out to be the start
of a stop string waits until it has or has not.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from meshswarm.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


class TextStream:
    """The text of one answer. Raises RequestError for an empty stop string, or too many or too long ones.

    The text ends before the stop string that is complete first; of several complete at the same character, the longest.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        if len(stop) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARACTERS for text in stop):
            raise RequestError(
                f"at most {MAX_STOP_STRINGS} stop strings of {MAX_STOP_CHARACTERS} characters are possible",
                param="stop",
            )
        if not all(stop):
            raise RequestError("a stop string is empty", param="stop")
        self.matched: str | None = None
        """The stop string that ended the text; None while none did."""
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, data: bytes) -> str:
        """The text that is certain now that `data` followed; empty once a stop string has matched."""
        return self._take(self._decoder.decode(data))

    def finish(self) -> str:
        """Nothing follows: the text still held back."""
        text = self._take(self._decoder.decode(b"", final=True))
        if self.matched is None:
            text += self._held
        self._held = ""
        return text

    def _take(self, text: str) -> str:
        if self.matched is not None or not text:
            return ""
        pending = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stop if (start := pending.find(stop)) >= 0]
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return pending[:start]
        n_held = max((_overlap(pending, stop) for stop in self._stop), default=0)
        certain = len(pending) - n_held
        self._held = pending[certain:]
        return pending[:certain]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
