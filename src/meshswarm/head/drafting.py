"""Guessing the next tokens from what was already said: the continuation of the longest earlier match.

The rule this file keeps: a guess costs a bounded amount of work, however long the text is. Every place of the text is
filed under a hash of the few tokens before it, as in LZ77's hash chains (RFC 1951, section 4; prompt lookup decoding is
the same idea applied to drafts). A lookup walks at most `MAX_CANDIDATES` places, the newest first, and keeps following
the match it is in, which no walk has to find again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

MIN_MATCH = 2
"""A draft needs so many tokens in common before it. After a single one, almost anything follows."""
MAX_MATCH = 64
"""Longer matches are not told apart."""
MAX_CANDIDATES = 16
_KEY_LENGTHS = (5, MIN_MATCH)  # a long key finds the rare places at once, where a short one's chain is crowded
_KEY_BITS = 16
_WORD = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Odd constants of xxHash, splitmix and wyhash: the top bits of a sum of products with them are well spread."""
_NONE = -1


class Source(Enum):
    """Where a draft comes from: the text so far, or a small model at the head."""

    TEXT = auto()
    MODEL = auto()


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed next tokens. `match`, of a draft from the text: how many tokens before them also stood before the place
    they were copied from; 0 when there is no draft."""

    tokens: tuple[int, ...] = ()
    match: int = 0
    source: Source = Source.TEXT


class SuffixDrafter:
    """A text, token by token, and the guess at how it goes on."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens = array("i", tokens)
        self._chains = tuple(_Chain(length, self._tokens) for length in _KEY_LENGTHS)
        self._source = _NONE  # the place whose continuation the text has been following
        self._match = 0  # how many tokens before the end and before that place are the same

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        if self._source != _NONE:
            if self._tokens[self._source] == token:
                self._source += 1
                self._match = min(self._match + 1, MAX_MATCH)
            else:
                self._source = _NONE
        for chain in self._chains:
            chain.file_end(self._tokens)
        self._tokens.append(token)

    def draft(self, n_tokens: int) -> Draft:
        """The guess at the next `n_tokens` tokens: what followed the longest match, the newest of equally long ones."""
        self._find()
        if self._source == _NONE or n_tokens <= 0:
            return Draft()
        end = len(self._tokens)
        guess = list(self._tokens[self._source : self._source + n_tokens])
        while len(guess) < n_tokens:  # the place is so near that its continuation is the guess itself
            guess.append(guess[self._source + len(guess) - end])
        return Draft(tuple(guess), self._match)

    def _find(self) -> None:
        if self._source == _NONE:
            self._match = 0
        for chain in self._chains:
            for place in chain.places(self._tokens):
                if self._match >= MAX_MATCH:
                    return
                length = self._common(place, self._match)
                if length > self._match and length >= MIN_MATCH:
                    self._source, self._match = place, length
            if self._match >= chain.length:
                return  # whatever the shorter key finds beside this is shorter

    def _common(self, place: int, beat: int) -> int:
        """How many tokens before `place` equal those before the end; 0 when they are not more than `beat`."""
        tokens, end = self._tokens, len(self._tokens)
        if beat >= place or tokens[place - 1 - beat] != tokens[end - 1 - beat]:
            return 0
        length = 0
        longest = min(place, MAX_MATCH)
        while length < longest and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length


class _Chain:
    """Places filed under a hash of the `length` tokens before them; of one hash, each leads to the one before."""

    def __init__(self, length: int, tokens: array[int]) -> None:
        self.length = length
        count = len(tokens)
        heads = np.full(1 << _KEY_BITS, _NONE, np.int32)
        earlier = np.full(count, _NONE, np.int32)
        if count > length:
            keys = _keys(np.array(tokens[: count - 1], np.uint64), length)
            places = np.arange(length, count, dtype=np.int32)
            heads[keys] = places  # of equal keys the last one stays
            order = np.argsort(keys, kind="stable")
            same = keys[order[1:]] == keys[order[:-1]]
            earlier[places[order[1:][same]]] = places[order[:-1][same]]
        self._heads = array("i", heads.tobytes())
        self._earlier = array("i", earlier.tobytes())

    def file_end(self, tokens: array[int]) -> None:
        """File the place where `tokens` ends, just before it goes on."""
        place = len(tokens)
        if place < self.length:
            self._earlier.append(_NONE)
            return
        key = self._key(tokens)
        self._earlier.append(self._heads[key])
        self._heads[key] = place

    def places(self, tokens: array[int]) -> list[int]:
        """The newest places that may follow the same tokens as the end does."""
        found: list[int] = []
        if len(tokens) >= self.length:
            place = self._heads[self._key(tokens)]
            while place != _NONE and len(found) < MAX_CANDIDATES:
                found.append(place)
                place = self._earlier[place]
        return found

    def _key(self, tokens: array[int]) -> int:
        total = 0
        for token, factor in zip(tokens[-self.length :], _FACTORS, strict=False):
            total += token * factor
        return (total & _WORD) >> (64 - _KEY_BITS)


def _keys(tokens: NDArray[np.uint64], length: int) -> NDArray[np.int64]:
    """The key of every run of `length` tokens, as `_Chain._key` gives it."""
    n_runs = len(tokens) - length + 1
    total = np.zeros(n_runs, np.uint64)
    for offset, factor in enumerate(_FACTORS[:length]):
        total += tokens[offset : offset + n_runs] * np.uint64(factor)
    return (total >> np.uint64(64 - _KEY_BITS)).astype(np.int64)
