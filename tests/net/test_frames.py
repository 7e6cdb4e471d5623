"""Frames survive any cutting of the stream, and a length is refused before memory is spent on it."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from meshswarm.net.frames import FrameDecoder, frame_header

LIMIT = 300


def encode(frames: list[bytes]) -> bytes:
    return b"".join(frame_header(len(frame)) + frame for frame in frames)


@given(frames=st.lists(st.binary(max_size=LIMIT), max_size=12), data=st.data())
def test_any_chunking_gives_the_same_frames(frames: list[bytes], data: st.DataObject) -> None:
    wire = encode(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=40)))
    decoder = FrameDecoder(LIMIT)
    received: list[bytes] = []
    for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        received += decoder.feed(wire[start:stop])
    assert received == frames
    assert decoder.is_between_frames


@given(frames=st.lists(st.binary(max_size=LIMIT), max_size=6))
def test_byte_by_byte(frames: list[bytes]) -> None:
    decoder = FrameDecoder(LIMIT)
    received = [frame for byte in encode(frames) for frame in decoder.feed(bytes([byte]))]
    assert received == frames


@given(frames=st.lists(st.binary(max_size=LIMIT), max_size=6), data=st.data())
def test_frames_before_an_oversize_one_arrive_however_the_stream_is_cut(
    frames: list[bytes], data: st.DataObject
) -> None:
    wire = encode(frames) + frame_header(LIMIT + 1) + b"tail"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=20)))
    decoder = FrameDecoder(LIMIT)
    received: list[bytes] = []
    for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        received += decoder.feed(wire[start:stop])
    assert received == frames
    assert decoder.error is not None
    assert decoder.feed(encode([b"more"])) == []


@given(garbage=st.lists(st.binary(max_size=64), max_size=30))
def test_garbage_never_holds_more_than_one_frame(garbage: list[bytes]) -> None:
    decoder = FrameDecoder(LIMIT)
    for piece in garbage:
        assert all(len(frame) <= LIMIT for frame in decoder.feed(piece))
        assert decoder.buffered_bytes < LIMIT + 4


def test_a_frame_at_the_limit_passes_and_one_above_is_refused_from_its_header_alone() -> None:
    assert FrameDecoder(LIMIT).feed(encode([b"x" * LIMIT])) == [b"x" * LIMIT]
    decoder = FrameDecoder(LIMIT)
    assert decoder.feed(frame_header(LIMIT + 1)[:3]) == []
    assert decoder.error is None
    assert decoder.feed(frame_header(LIMIT + 1)[3:]) == []
    assert str(decoder.error) == "a frame of 301 bytes is above this stream's limit of 300"


def test_a_cut_off_frame_is_noticed_at_the_end() -> None:
    decoder = FrameDecoder(LIMIT)
    decoder.feed(frame_header(5))
    assert not decoder.is_between_frames
    decoder.feed(b"abc")
    assert not decoder.is_between_frames
    assert decoder.feed(b"de") == [b"abcde"]
    assert decoder.is_between_frames


def test_an_announced_length_allocates_nothing_and_tiny_pieces_stay_cheap() -> None:
    size = 1 << 20
    piece = memoryview(bytes(range(256)) * (size // 256))
    decoder = FrameDecoder(8 << 20)
    tracemalloc.start()
    try:
        decoder.feed(frame_header(8 << 20))
        assert tracemalloc.get_traced_memory()[0] < 4096
        for start in range(0, size, 16):
            decoder.feed(bytes(piece[start : start + 16]))
        assert decoder.buffered_bytes == size
        assert tracemalloc.get_traced_memory()[0] < 2 * size
    finally:
        tracemalloc.stop()
