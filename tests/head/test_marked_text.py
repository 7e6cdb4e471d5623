"""Marks follow characters through every operation, and never land on a character they did not come from."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.head.marked_text import MarkedText, joined, own, own_text

LETTERS = "ab ,\n\tß\u2003"
pieces = st.lists(st.tuples(st.text(LETTERS, max_size=6), st.booleans()), max_size=6)
arguments = st.sampled_from([None, " ", "a", "ab", ",", "\n", "ba,"])


def build(parts: list[tuple[str, bool]]) -> MarkedText:
    return joined(own_text(text) if is_own else text for text, is_own in parts)


def colours(text: str) -> list[tuple[str, bool]]:
    """Every character with whether it is the template's own."""
    marked = {index for low, high in own(text) for index in range(low, high)}
    return [(character, index in marked) for index, character in enumerate(str.__getitem__(text, slice(None)))]


@given(parts=pieces)
def test_joining_keeps_every_mark(parts: list[tuple[str, bool]]) -> None:
    text = build(parts)
    assert colours(text) == [(character, is_own) for piece, is_own in parts for character in piece]
    ranges = own(text)
    assert all(low < high for low, high in ranges)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(ranges))


@given(parts=pieces, start=st.integers(-20, 20) | st.none(), stop=st.integers(-20, 20) | st.none())
def test_slices(parts: list[tuple[str, bool]], start: int | None, stop: int | None) -> None:
    text = build(parts)
    assert colours(text[start:stop]) == colours(text)[start:stop]
    assert text[::-1] == "".join(reversed(list(text)))
    for index in range(-len(text), len(text)):
        assert colours(text[index]) == [colours(text)[index]]


@given(parts=pieces, argument=arguments, most=st.integers(-1, 3), keep=st.booleans())
def test_methods_give_what_plain_strings_give_with_the_right_marks(
    parts: list[tuple[str, bool]], argument: str | None, most: int, keep: bool
) -> None:
    text = build(parts)
    plain = "".join(piece for piece, _ in parts)
    for method, given_arguments in (
        ("strip", (argument,)),
        ("lstrip", (argument,)),
        ("rstrip", (argument,)),
        ("split", (argument, most)),
        ("rsplit", (argument, most)),
        ("splitlines", (keep,)),
        *((("partition", (argument,)), ("rpartition", (argument,))) if argument else ()),
        *((("removeprefix", (argument,)), ("removesuffix", (argument,))) if argument else ()),
    ):
        result: Any = getattr(text, method)(*given_arguments)
        expected = getattr(plain, method)(*given_arguments)
        assert result == expected
        results = [result] if isinstance(result, str) else list(result)
        whole = colours(text)
        # Every part is a stretch of the whole, in order, with the whole's marks: try to lay them out from the left.
        position = 0
        for part in results:
            place = next(
                start
                for start in range(position, len(whole) + 1)
                if colours(part) == whole[start : start + len(part)] and len(whole) - start >= len(part)
            )
            position = place + len(part)


@given(parts=pieces, old=st.sampled_from(["a", "ab", ",", "zz"]), new=pieces, count=st.integers(-1, 3))
def test_replacing(parts: list[tuple[str, bool]], old: str, new: list[tuple[str, bool]], count: int) -> None:
    text, fresh = build(parts), build(new)
    result = text.replace(old, fresh, count)
    assert result == "".join(piece for piece, _ in parts).replace(old, "".join(piece for piece, _ in new), count)
    expected: list[tuple[str, bool]] = []
    for index, part in enumerate(text.split(old, count)):
        expected += (colours(fresh) if index else []) + colours(part)
    assert colours(result) == expected


def test_sums_with_plain_strings_on_either_side() -> None:
    assert colours("u" + own_text("t") + "u") == [("u", False), ("t", True), ("u", False)]
    assert colours(own_text("ab") * 2) == colours(own_text("abab"))
    assert colours(own_text("-").join(["x", own_text("y")])) == [("x", False), ("-", True), ("y", True)]
    with pytest.raises(TypeError):
        own_text("a") + 1  # type: ignore[operator]
    assert own_text("") * 10**12 == ""


def test_str_keeps_the_marks_and_a_new_text_has_none() -> None:
    assert own(str(own_text("abc"))) == ((0, 3),)
    assert own(MarkedText("abc")) == own("abc") == ()


def test_case_changes_keep_only_the_mark_of_a_whole_text() -> None:
    assert own(own_text("straße").upper()) == ((0, 7),)
    assert own(own_text("User").lower()) == ((0, 4),)
    assert own((own_text("<") + "x").upper()) == ()


def test_other_operations_lose_the_marks() -> None:
    text = own_text("<|{}%s|>")
    assert own(text % "x") == own(text.format("x")) == own(text.center(30)) == own(text.zfill(9)) == ()
    assert own("".join(text)) == own(text.casefold()) == own(text.replace("", "-")) == ()


def test_a_marked_text_is_the_same_key() -> None:
    assert {own_text("role"): 1}["role"] == 1
    assert own_text("user") == "user"
    assert own_text("user") in ("user", "system")
