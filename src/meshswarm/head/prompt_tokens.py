"""The tokens of a rendered chat: control tokens where the template wrote them, and nowhere else.

The rule this file keeps: for text without special tokens in it, the ids are those of tokenising the whole rendered
string at once, control tokens included, as llama.cpp does. To that end the string is cut only at the template's own
control tokens, which llama.cpp cuts at as well. Cutting at every border between template and user would not do: in
"\\n" + "\\nHello" the two line ends are one token.

What a user wrote can look like a control token and stays text: it is tokenised as text, and where the tokenizer
would find a special token in it all the same, it is spelled out byte by byte. Two kinds of vocabulary do that: some
declare the marks that structure a conversation "user-defined" (gpt-oss's `<|start|>`), which llama.cpp always looks
for; and SentencePiece's merges may lead to a control token like to any other.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator

from meshswarm.head.marked_text import MarkedText, own
from meshswarm.head.vocabulary import SpecialToken, Vocabulary

_MARK_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_SPACE = " \t\n\v\f\r"  # C's isspace, which llama.cpp strips by


def structural_tokens(vocabulary: Vocabulary, template: str) -> tuple[SpecialToken, ...]:
    """User-defined tokens that only a template may write: those its source has, and those shaped like control tokens.

    The others (runs of spaces, words the makers wanted whole) mean the same whoever writes them.
    """
    return tuple(
        token
        for token in vocabulary.special_tokens
        if not token.control
        and not token.text.isspace()
        and (token.text in template or _MARK_SHAPE.fullmatch(token.text) is not None)
    )


def prompt_tokens(text: MarkedText, vocabulary: Vocabulary, structural: Collection[SpecialToken]) -> list[int]:
    """The tokens of `text`; `structural`: what `structural_tokens` gave for its template. Raises as `encode`."""
    marks = _Marks(text)
    tokens: list[int] = []
    for start, stop, control in _cut_at_control_tokens(text, vocabulary, marks):
        if control is not None:
            tokens.append(control.id)
            continue
        for low, high, mark in _cut(start, stop, structural, text, lambda a, b: not marks.cover(a, b)):
            if mark is not None:
                tokens += vocabulary.spell(mark.text)
            else:
                tokens += _as_text(str.__getitem__(text, slice(low, high)), vocabulary)
    return tokens


def _as_text(text: str, vocabulary: Vocabulary) -> list[int]:
    tokens = vocabulary.encode(text)
    found = set(tokens)
    spelled = {
        special.id: vocabulary.spell(special.text)
        for special in vocabulary.special_tokens
        if special.control and special.id in found and special.text in text
    }
    return [part for token in tokens for part in spelled.get(token, [token])]


class _Marks:
    """Which stretches of a text are wholly the template's own."""

    def __init__(self, text: MarkedText) -> None:
        self._ranges = own(text)
        self._starts = [low for low, _ in self._ranges]
        self.text = "\0".join(str.__getitem__(text, slice(low, high)) for low, high in self._ranges)
        """All that the template wrote."""

    def cover(self, start: int, stop: int) -> bool:
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and stop <= self._ranges[index][1]


_Cut = tuple[int, int, SpecialToken | None]


def _cut_at_control_tokens(text: MarkedText, vocabulary: Vocabulary, marks: _Marks) -> Iterator[_Cut]:
    """`text` cut at the control tokens that the template wrote; the white space that they swallow is left out."""
    controls = [token for token in vocabulary.special_tokens if token.control and token.text in marks.text]
    cuts = list(_cut(0, len(text), controls, text, marks.cover))
    for index, (start, stop, control) in enumerate(cuts):
        if control is None:
            before = cuts[index - 1][2] if index else None
            after = cuts[index + 1][2] if index + 1 < len(cuts) else None
            piece = str.__getitem__(text, slice(start, stop))
            if before is not None and before.strips_right:
                start += len(piece) - len(piece.lstrip(_SPACE))
            if after is not None and after.strips_left:
                stop = max(start, stop - (len(piece) - len(piece.rstrip(_SPACE))))
        if start < stop:
            yield start, stop, control


def _cut(
    start: int, stop: int, specials: Collection[SpecialToken], text: str, counts: Callable[[int, int], bool]
) -> list[_Cut]:
    """`[start, stop)` cut at the `specials` found there at places that `counts`: the longest first, each from left to
    right, as llama.cpp's `tokenizer_st_partition` does."""
    cuts: list[_Cut] = [(start, stop, None)]
    for special in specials:
        finer: list[_Cut] = []
        for low, high, found in cuts:
            position = high if found else low
            while (place := text.find(special.text, position, high)) >= 0:
                end = place + len(special.text)
                if not counts(place, end):
                    position = place + 1
                    continue
                finer += [(low, place, None), (place, end, special)]
                low = position = end
            finer.append((low, high, found))
        cuts = [cut for cut in finer if cut[0] < cut[1]]
    return cuts
