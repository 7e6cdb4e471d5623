"""What answers of servers mean, whatever is in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.sources.answers import Question, RemoteFile, read_answer
from meshswarm.artifacts.sources.faults import ChangedError, NoRangesError, PassingError, SourceError

KNOWN = RemoteFile(1000, '"a"', "Mon, 02 Nov 2026 10:00:00 GMT", True, "https://x.example/a")
PART = {"content-range": "bytes 10-19/1000", "content-length": "10", "etag": '"a"'}

numbers = st.one_of(st.integers(-5, 1100).map(str), st.text(max_size=20), st.just("9" * 30))
headers = st.fixed_dictionaries(
    {},
    optional={
        "content-length": numbers,
        "content-range": st.one_of(
            st.tuples(numbers, numbers, numbers).map(lambda three: f"bytes {three[0]}-{three[1]}/{three[2]}"),
            st.text(max_size=40),
        ),
        "content-encoding": st.sampled_from(["identity", "gzip", "", "Identity"]),
        "etag": st.sampled_from(['"a"', '"b"', 'W/"a"', "a", ""]),
        "last-modified": st.sampled_from(["Mon, 02 Nov 2026 10:00:00 GMT", "yesterday", ""]),
        "retry-after": numbers,
    },
)


@given(
    st.sampled_from([200, 206, 206, 206, 403, 404, 416, 429, 503, 500, 302, 999]),
    headers,
    st.integers(0, 1000),
    st.one_of(st.none(), st.integers(1, 1200)),
    st.sampled_from([None, KNOWN]),
)
def test_bytes_are_taken_only_from_where_they_were_asked(
    status: int, given_headers: dict[str, str], start: int, length: int | None, known: RemoteFile | None
) -> None:
    stop = None if length is None else start + length
    question = Question("x.example", start, stop, known)
    try:
        answer = read_answer(question, status, given_headers, "https://x.example/a")
    except SourceError as error:
        assert str(error)
        return
    assert answer.start == start and answer.start < answer.stop <= answer.file.length
    assert stop is None or answer.stop <= stop or status == 200
    assert known is None or answer.file.is_same(known)
    assert answer.file.accepts_ranges == (status == 206)


def test_a_part_that_is_right_is_taken() -> None:
    answer = read_answer(Question("x", 10, 20, KNOWN), 206, PART, "u")
    assert (answer.start, answer.stop, answer.file.length, answer.file.etag) == (10, 20, 1000, '"a"')


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"etag": '"b"'}, ChangedError),
        ({"content-range": "bytes 10-19/1001"}, ChangedError),
        ({"content-range": "bytes 9-18/1000"}, SourceError),
        ({"content-range": "bytes 10-20/1000", "content-length": "11"}, SourceError),
        ({"content-range": "bytes 10-19/*"}, SourceError),
        ({"content-type": "multipart/byteranges; boundary=x", "content-range": ""}, SourceError),
        ({"content-length": "9"}, SourceError),
        ({"content-encoding": "gzip"}, SourceError),
    ],
)
def test_a_part_that_is_wrong_is_not(change: dict[str, str], kind: type[SourceError]) -> None:
    with pytest.raises(kind):
        read_answer(Question("x", 10, 20, KNOWN), 206, {**PART, **change}, "u")


def test_a_weak_mark_is_none_and_the_date_stands_in() -> None:
    weak = {**PART, "etag": 'W/"a"', "last-modified": "Mon, 02 Nov 2026 10:00:00 GMT"}
    file = read_answer(Question("x", 10, 20), 206, weak, "u").file
    assert file.etag is None and file.validator == "Mon, 02 Nov 2026 10:00:00 GMT"
    assert Question("x", 5, 10, file).headers()["if-range"] == file.validator
    other = {**weak, "last-modified": "Tue, 03 Nov 2026 10:00:00 GMT"}
    with pytest.raises(ChangedError):
        read_answer(Question("x", 10, 20, file), 206, other, "u")


def test_the_hubs_own_name_for_a_version_counts_more_than_a_servers_marks() -> None:
    file = read_answer(Question("x", 10, 20, None, "sha"), 206, PART, "u").file
    assert read_answer(Question("x", 10, 20, file, "sha"), 206, {**PART, "etag": '"other"'}, "u").file == file
    assert "if-range" not in Question("x", 10, 20, file, "sha").headers()


def test_whole_files_and_waiting_are_told_apart() -> None:
    whole = {"content-length": "1000", "etag": '"a"'}
    assert read_answer(Question("x", 0, 1), 200, whole, "u").stop == 1000
    with pytest.raises(NoRangesError):
        read_answer(Question("x", 5, 10, KNOWN), 200, whole, "u")
    with pytest.raises(ChangedError):
        read_answer(Question("x", 5, 10, KNOWN), 200, {**whole, "etag": '"b"'}, "u")
    with pytest.raises(PassingError) as caught:
        read_answer(Question("x"), 503, {"retry-after": "7"}, "u")
    assert caught.value.retry_after_s == 7.0
