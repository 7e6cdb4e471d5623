"""However the bytes are cut, the text is the same; and nothing goes out too early."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshswarm.errors import RequestError
from meshswarm.head.text_stream import TextStream

stops = st.lists(st.text("abé\n<|", min_size=1, max_size=4), max_size=4)
bodies = st.one_of(
    st.text("abé\n<|€😀", max_size=40).map(str.encode),
    st.binary(max_size=30),
    st.lists(st.sampled_from([b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xe2", b"\x82", b"a", b"\xc3", b"\xff"])).map(
        b"".join
    ),
)


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(edges)]


def plainly(body: bytes, stop: list[str]) -> tuple[str, str | None]:
    """The definition over the whole text: the stop string whose end comes first, the longest of several."""
    text = body.decode("utf-8", "replace")
    for end in range(len(text) + 1):
        for match in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(match):
                return text[: end - len(match)], match
    return text, None


@given(body=bodies, stop=stops, places=st.lists(st.integers(0, 200), max_size=12))
@example(b"abc", ["abc", "b"], [1, 2])
@example(b"xaab", ["aab", "ab"], [1, 2, 3])
@example("😀".encode()[:3], [], [1, 2])
def test_however_it_is_cut_the_text_is_the_same(body: bytes, stop: list[str], places: list[int]) -> None:
    stream = TextStream(stop)
    text = "".join([*(stream.push(piece) for piece in cut(body, places)), stream.finish()])
    assert (text, stream.matched) == plainly(body, stop)


@given(body=bodies, stop=stops)
def test_what_went_out_was_certain(body: bytes, stop: list[str]) -> None:
    """Byte by byte, the text so far is a start of the final text whatever else might have followed."""
    stream = TextStream(stop)
    sent = ""
    for index in range(len(body)):
        sent += stream.push(body[index : index + 1])
        for future in (b"", b"\x80\x80\x80", b"ab\n<|", *(text.encode() for text in stop)):
            assert plainly(body[: index + 1] + future, stop)[0].startswith(sent)


def test_a_character_comes_out_whole() -> None:
    stream = TextStream()
    assert [stream.push(bytes([byte])) for byte in "a€😀".encode()] == ["a", "", "", "€", "", "", "", "😀"]


def test_an_unfinished_character_is_marked_at_the_end() -> None:
    stream = TextStream()
    assert stream.push(b"ok\xe2\x82") == "ok"
    assert stream.finish() == "�"


def test_a_partial_stop_string_waits_and_is_let_go() -> None:
    stream = TextStream(["END."])
    assert stream.push(b"The EN") == "The "
    assert stream.push(b"D") == ""
    assert stream.push(b"!") == "END!"
    assert stream.push(b" E") == " "
    assert stream.finish() == "E"
    assert stream.matched is None


def test_nothing_follows_a_stop_string() -> None:
    stream = TextStream(["\n\n"])
    assert stream.push(b"one\n") == "one"
    assert stream.push(b"\ntwo") == ""
    assert stream.push(b"three") == ""
    assert stream.finish() == ""
    assert stream.matched == "\n\n"


def test_leading_spaces_are_kept() -> None:
    stream = TextStream()
    assert [stream.push(piece) for piece in (b" Hello", b" world", b"  ")] == [" Hello", " world", "  "]


@pytest.mark.parametrize("stop", [[""], ["a", ""], ["a" * 5000], ["a"] * 65])
def test_impossible_stop_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        TextStream(stop)
    assert caught.value.param == "stop"
