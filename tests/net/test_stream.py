"""Streams as their users see them, over the network and over the loopback alike."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.net.conftest import Bind
from tests.net.eventually import Collector, echo, eventually

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.stream import Stream, StreamEndedError

LIMIT = 1_000_000


@pytest.fixture(params=["network", "loopback"])
async def pair(request: pytest.FixtureRequest, bind: Bind) -> tuple[Connection, Endpoint]:
    """A connection, and the endpoint at its other end."""
    here = await bind()
    there = here if request.param == "loopback" else await bind()
    return await here.dial(there.peer_id, [there.address]), there


Pair = tuple[Connection, Endpoint]


async def test_frames_come_back_in_order_and_whole(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    stream = connection.open_stream("echo", max_frame_bytes=LIMIT)
    collector = Collector(stream)
    sizes = [0, 1, 1199, 1200, 1201, 16_383, 16_384, 16_385, 200_000, LIMIT]
    sent = [bytes([index]) * size for index, size in enumerate(sizes)]
    for frame in sent:
        stream.send(frame)
    stream.finish()
    assert await collector.end() is None
    assert collector.frames == sent


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
async def test_any_buffer_is_sent_as_it_is_at_that_moment(pair: Pair, wrap: type) -> None:
    connection, there = pair
    there.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    stream = connection.open_stream("echo", max_frame_bytes=LIMIT)
    for size in (5, 50_000):
        buffer = bytearray(b"x" * size)
        stream.send(wrap(buffer))
        if wrap is not bytes:
            buffer[:] = b"y" * size  # what the sender does with it afterwards is its own affair
        assert await stream.receive(timeout_s=5) == b"x" * size


async def test_frames_that_came_before_the_reader_are_delivered_to_it(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    stream = connection.open_stream("echo", max_frame_bytes=LIMIT)
    for number in range(3):
        stream.send(bytes([number]))
    stream.finish()
    await eventually(lambda: stream.queued_bytes == 3)
    await asyncio.sleep(0.05)
    assert await stream.receive(timeout_s=1) == b"\0"
    collector = Collector(stream)
    assert collector.frames == [b"\1", b"\2"]
    assert await collector.end() is None


async def test_receiving_after_the_end_says_that_it_ended(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("once", lambda stream: stream.send(b"only", finish=True), max_frame_bytes=LIMIT)
    stream = connection.open_stream("once", max_frame_bytes=LIMIT)
    assert await stream.receive(timeout_s=5) == b"only"
    with pytest.raises(StreamEndedError, match="ended a 'once' stream"):
        await stream.receive(timeout_s=5)


async def test_silence_names_the_peer_and_the_kind(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("mute", lambda _stream: None, max_frame_bytes=LIMIT)
    stream = connection.open_stream("mute", max_frame_bytes=LIMIT)
    with pytest.raises(PeerUnreachableError, match=f"{there.peer_id.short} sent nothing on a 'mute' stream for 0.05 s"):
        await stream.receive(timeout_s=0.05)


async def test_an_unknown_kind_is_refused_and_the_connection_goes_on(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    collector = Collector(connection.open_stream("novelty/7", max_frame_bytes=LIMIT))
    end = await collector.end()
    assert isinstance(end, RefusedError)
    assert "does not know streams of kind 'novelty/7'" in str(end)
    known = connection.open_stream("echo", max_frame_bytes=LIMIT)
    known.send(b"still here")
    assert await known.receive(timeout_s=5) == b"still here"


async def test_a_handler_that_refuses_a_stream_ends_that_stream_alone(pair: Pair) -> None:
    connection, there = pair

    def refuse(_stream: Stream) -> None:
        raise RefusedError("no room")

    there.handle_stream("full", refuse, max_frame_bytes=LIMIT)
    there.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    end = await Collector(connection.open_stream("full", max_frame_bytes=LIMIT)).end()
    assert isinstance(end, RefusedError)
    other = connection.open_stream("echo", max_frame_bytes=LIMIT)
    other.send(b"x")
    assert await other.receive(timeout_s=5) == b"x"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RemoteProtocolError("bad position"), RemoteProtocolError),
        (MeshswarmError("own trouble"), RefusedError),
        (ZeroDivisionError("a bug"), RefusedError),
    ],
)
async def test_a_frame_handler_that_raises_ends_the_stream_on_both_sides(
    pair: Pair, error: Exception, expected: type, caplog: pytest.LogCaptureFixture
) -> None:
    connection, there = pair
    ends: list[MeshswarmError | None] = []

    def serve(stream: Stream) -> None:
        def on_frame(_frame: bytes) -> None:
            raise error

        stream.receive_with(on_frame, ends.append)

    there.handle_stream("fragile", serve, max_frame_bytes=LIMIT)
    collector = Collector(connection.open_stream("fragile", max_frame_bytes=LIMIT))
    with caplog.at_level(logging.CRITICAL):
        collector.stream.send(b"1")
        collector.stream.send(b"2")
        end = await collector.end()
    assert isinstance(end, expected)
    assert len(ends) == 1 and str(error) in str(ends[0])
    assert "a bug" not in str(end) and "own trouble" not in str(end)  # the other side is not told our insides


async def test_a_frame_above_the_receivers_limit_ends_the_stream(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("small", echo, max_frame_bytes=10)
    collector = Collector(connection.open_stream("small", max_frame_bytes=LIMIT))
    collector.stream.send(b"x" * 10)
    collector.stream.send(b"x" * 11)
    end = await collector.end()
    assert isinstance(end, RemoteProtocolError)
    assert collector.frames in ([b"x" * 10], [])


async def test_an_answer_above_the_openers_limit_ends_the_stream(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("big", lambda stream: stream.send(b"x" * 101), max_frame_bytes=LIMIT)
    end = await Collector(connection.open_stream("big", max_frame_bytes=100)).end()
    assert isinstance(end, RemoteProtocolError)
    assert "101 bytes is above this stream's limit of 100" in str(end)


async def test_after_a_reset_nothing_is_called_here_and_the_other_side_is_told(pair: Pair) -> None:
    connection, there = pair
    served: list[Collector] = []
    there.handle_stream("kept", lambda stream: served.append(Collector(stream)), max_frame_bytes=LIMIT)
    collector = Collector(connection.open_stream("kept", max_frame_bytes=LIMIT))
    collector.stream.send(b"x")
    await eventually(lambda: served and served[0].frames)
    collector.stream.reset()
    collector.stream.reset()
    collector.stream.send(b"ignored")
    end = await served[0].end()
    assert end is not None and "gave up a 'kept' stream" in str(end)
    served[0].stream.send(b"ignored too")
    await asyncio.sleep(0.05)
    assert collector.ends == [] and collector.frames == []


async def test_a_reset_wakes_whoever_waits(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("mute", lambda _stream: None, max_frame_bytes=LIMIT)
    stream = connection.open_stream("mute", max_frame_bytes=LIMIT)
    waiting = asyncio.create_task(stream.receive(timeout_s=30))
    await asyncio.sleep(0.02)
    stream.reset()
    with pytest.raises(StreamEndedError):
        await waiting


async def test_each_direction_ends_by_itself(pair: Pair) -> None:
    connection, there = pair
    received: list[Collector] = []
    there.handle_stream("half", lambda stream: received.append(Collector(stream)), max_frame_bytes=LIMIT)
    collector = Collector(connection.open_stream("half", max_frame_bytes=LIMIT))
    collector.stream.send(b"question", finish=True)
    await eventually(lambda: received and received[0].ends == [None])
    received[0].stream.send(b"answer", finish=True)
    assert await collector.end() is None
    assert collector.frames == [b"answer"]


async def test_the_end_of_the_connection_ends_every_stream_once(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("mute", lambda _stream: None, max_frame_bytes=LIMIT)
    collectors = [Collector(connection.open_stream("mute", max_frame_bytes=LIMIT)) for _ in range(3)]
    connection.close("done with it")
    for collector in collectors:
        assert isinstance(await collector.end(), PeerUnreachableError)
        collector.stream.send(b"too late")
        collector.stream.finish()
        collector.stream.reset()
    late = Collector(connection.open_stream("mute", max_frame_bytes=LIMIT))
    assert isinstance(await late.end(), PeerUnreachableError)


async def test_a_handler_may_answer_reset_or_open_from_inside_a_frame(pair: Pair) -> None:
    connection, there = pair
    there.handle_stream("echo", echo, max_frame_bytes=LIMIT)
    seen: list[bytes] = []
    first = connection.open_stream("echo", max_frame_bytes=LIMIT)
    second = connection.open_stream("echo", max_frame_bytes=LIMIT)

    def on_first(frame: bytes) -> None:
        seen.append(frame)
        second.send(b"from first")
        first.reset()

    first.receive_with(on_first, lambda _error: seen.append(b"never"))
    first.send(b"one")
    first.send(b"two")
    assert await second.receive(timeout_s=5) == b"from first"
    assert seen == [b"one"]
