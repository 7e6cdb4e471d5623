"""Text that knows which of its characters a chat template wrote, through everything templates do with text.

The rule this file keeps: a mark is never guessed. A character counts as the template's own only while every operation
since it was written is known to have carried it over; whatever came from anywhere else, or through an operation that
is not spelled out here, is not marked. So an unmarked control token can cost a template its effect, but no text of a
user's can gain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import SupportsIndex

Ranges = tuple[tuple[int, int], ...]
"""Half-open, non-empty, ascending and not touching."""


class MarkedText(str):
    """A string whose characters in `_own` ranges are the template's own. Made without marks, it has none.

    Compares, hashes and looks like the plain string. Slicing, stripping, splitting, replacing, joining and adding carry
    marks along; changing the case keeps the mark of a text that is the template's own as a whole; everything else
    gives plain strings. The marks are in `own`, out of a template's reach.
    """

    _own: Ranges = ()

    # -- taking parts

    def _part(self, start: int, stop: int) -> MarkedText:
        """The characters `[start, stop)`, 0 <= start <= stop <= length."""
        part = MarkedText(str.__getitem__(self, slice(start, stop)))
        part._own = tuple(
            (max(low, start) - start, min(high, stop) - start) for low, high in self._own if low < stop and high > start
        )
        return part

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._part(start, max(start, stop)) if step == 1 else str.__getitem__(self, key)
        index = range(len(self))[key]
        return self._part(index, index + 1)

    def strip(self, chars: str | None = None, /) -> str:
        start = len(self) - len(str.lstrip(self, chars))
        return self._part(start, max(start, len(str.rstrip(self, chars))))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._part(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._part(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._part(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._part(0, len(str.removesuffix(self, suffix)))

    def _located(self, pieces: Iterable[str], gap: int | None) -> list[str]:
        """`pieces` of this text, from left to right, with marks; `gap` characters between them, None: white space."""
        found: list[str] = []
        position = 0
        for piece in pieces:
            if gap is None:
                position = self.find(piece, position)
            found.append(self._part(position, position + len(piece)))
            position += len(piece) + (gap or 0)
        return found

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), None if sep is None else len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        pieces = str.rsplit(self, sep, maxsplit)
        if sep is not None:
            return self._located(pieces, len(sep))
        # The first piece may itself hold white space, at its start even: it is found from the left all the same.
        return self._located(pieces, None)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._located(str.splitlines(self, keepends=True), 0)
        if keepends:
            return lines
        return [line[: len(str.splitlines(line)[0])] for line in lines]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._located(str.partition(self, sep), 0)
        return before, middle, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, middle, after = self._located(str.rpartition(self, sep), 0)
        return before, middle, after

    # -- putting together

    def __add__(self, other: str, /) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str, /) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex, /) -> str:
        return joined([self] * count.__index__()) if self else self

    __rmul__ = __mul__

    def join(self, pieces: Iterable[str], /) -> str:
        return joined(pieces, self)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return str.replace(self, old, new, count)
        return joined(self.split(old, count), new)

    # -- changing the case

    def _changed(self, change: Callable[[str], str]) -> str:
        changed = change(self)
        return own_text(changed) if self._own == ((0, len(self)),) else changed

    def lower(self) -> str:
        return self._changed(str.lower)

    def upper(self) -> str:
        return self._changed(str.upper)

    def title(self) -> str:
        return self._changed(str.title)

    def capitalize(self) -> str:
        return self._changed(str.capitalize)


def own_text(text: str) -> MarkedText:
    """`text` as the template's own, all of it."""
    marked = MarkedText(text)
    marked._own = ((0, len(text)),) if text else ()
    return marked


def own(text: str) -> Ranges:
    """Which characters of `text` are the template's own."""
    return text._own if isinstance(text, MarkedText) else ()


def joined(pieces: Iterable[str], separator: str = "") -> MarkedText:
    """All `pieces`, with `separator` between them. Raises TypeError for a piece that is no string."""
    parts: list[str] = []
    for piece in pieces:
        if parts and separator:
            parts.append(separator)
        parts.append(piece)
    text = MarkedText("".join(parts))
    ranges: list[tuple[int, int]] = []
    position = 0
    for part in parts:
        for low, high in own(part):
            if ranges and ranges[-1][1] == position + low:
                ranges[-1] = (ranges[-1][0], position + high)
            else:
                ranges.append((position + low, position + high))
        position += len(part)
    text._own = tuple(ranges)
    return text
