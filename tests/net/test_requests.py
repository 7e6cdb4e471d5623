"""Questions and answers: what comes back, and what an error on the other side becomes here."""

from __future__ import annotations

import asyncio
import logging

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.net.conftest import Bind
from tests.net.eventually import eventually

from meshswarm.errors import MeshswarmError, PeerUnreachableError, RefusedError, RemoteProtocolError
from meshswarm.identity import PeerId
from meshswarm.net import requests
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint

PEER = PeerId(b"p" * 32)


@pytest.fixture(params=["network", "loopback"])
async def pair(request: pytest.FixtureRequest, bind: Bind) -> tuple[Connection, Endpoint]:
    here = await bind()
    there = here if request.param == "loopback" else await bind()
    return await here.dial(there.peer_id, [there.address]), there


Pair = tuple[Connection, Endpoint]


def answer_with(there: Endpoint, outcome: bytes | Exception, *, max_reply_bytes: int = 100_000) -> None:
    async def answer(_peer: PeerId, _payload: bytes) -> bytes:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    there.handle_request("ask", answer, max_request_bytes=1000, max_reply_bytes=max_reply_bytes)


async def test_the_answerer_gets_the_askers_key_and_payload(pair: Pair) -> None:
    connection, there = pair
    seen: list[tuple[PeerId, bytes]] = []

    async def answer(peer: PeerId, payload: bytes) -> bytes:
        seen.append((peer, payload))
        return payload[::-1]

    there.handle_request("reverse", answer, max_request_bytes=100_000, max_reply_bytes=100_000)
    for payload in (b"", b"abc", b"x" * 100_000):
        assert await connection.request("reverse", payload) == payload[::-1]
    assert len(seen) == 3 and seen[1][1] == b"abc"


async def test_many_at_once_each_get_their_own_answer(pair: Pair) -> None:
    connection, there = pair

    async def answer(_peer: PeerId, payload: bytes) -> bytes:
        await asyncio.sleep(0.001 * (payload[0] % 5))
        return payload

    there.handle_request("ask", answer, max_request_bytes=10, max_reply_bytes=10)
    payloads = [bytes([number]) for number in range(100)]
    assert await asyncio.gather(*(connection.request("ask", payload) for payload in payloads)) == payloads


async def test_a_refusal_arrives_with_its_reason_and_when_to_come_back(pair: Pair) -> None:
    connection, there = pair
    answer_with(there, RefusedError("no slot is free", retry_after_s=2.5))
    with pytest.raises(RefusedError, match=f"peer {there.peer_id.short} answered a 'ask' request: no slot") as caught:
        await connection.request("ask", b"")
    assert caught.value.retry_after_s == 2.5
    assert caught.value.peer == str(there.peer_id)


async def test_a_protocol_error_arrives_as_one(pair: Pair) -> None:
    connection, there = pair
    answer_with(there, RemoteProtocolError("topic is not 20 bytes"))
    with pytest.raises(RemoteProtocolError, match="topic is not 20 bytes"):
        await connection.request("ask", b"")


@pytest.mark.parametrize("error", [ValueError("secret path /home/bob"), MeshswarmError("secret path /home/bob")])
async def test_a_bug_is_told_as_a_failure_without_its_insides(
    pair: Pair, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    connection, there = pair
    answer_with(there, error)
    with caplog.at_level(logging.CRITICAL), pytest.raises(RefusedError, match="failed while handling") as caught:
        await connection.request("ask", b"")
    assert "secret" not in str(caught.value)


async def test_an_unknown_question_is_refused(pair: Pair) -> None:
    connection, _ = pair
    with pytest.raises(RefusedError, match="does not know streams of kind 'riddle'"):
        await connection.request("riddle", b"")


async def test_no_answer_names_peer_address_question_and_time(pair: Pair) -> None:
    connection, there = pair
    cancelled = asyncio.Event()

    async def never(_peer: PeerId, _payload: bytes) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    there.handle_request("slow", never, max_request_bytes=10, max_reply_bytes=10)
    with pytest.raises(PeerUnreachableError) as caught:
        await connection.request("slow", b"", timeout_s=0.1)
    assert str(caught.value) == (
        f"peer {there.peer_id.short} at {there.address} gave no answer to a 'slow' request in 0.1 s"
    )
    async with asyncio.timeout(5):
        await cancelled.wait()  # whoever answers is told that nobody waits any more


async def test_a_cancelled_question_cancels_the_answer(pair: Pair) -> None:
    connection, there = pair
    running: list[asyncio.Task[None] | None] = []

    async def never(_peer: PeerId, _payload: bytes) -> bytes:
        running.append(asyncio.current_task())
        await asyncio.Event().wait()
        return b""

    there.handle_request("slow", never, max_request_bytes=10, max_reply_bytes=10)
    asking = asyncio.create_task(connection.request("slow", b"", timeout_s=30))
    await eventually(lambda: running)
    asking.cancel()
    (task,) = running
    assert task is not None
    await eventually(task.cancelled)


async def test_the_end_of_the_connection_ends_the_question(pair: Pair) -> None:
    connection, there = pair

    async def never(_peer: PeerId, _payload: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    there.handle_request("slow", never, max_request_bytes=10, max_reply_bytes=10)
    asking = asyncio.create_task(connection.request("slow", b"", timeout_s=30))
    await asyncio.sleep(0.05)
    connection.close("over")
    with pytest.raises(PeerUnreachableError, match="over"):
        await asking


async def test_who_asks_much_at_once_and_has_not_read_it_is_refused_more(
    bind: Bind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header has megabytes, and asking for it takes one packet."""
    here, other, there = await bind(), await bind(), await bind()
    connection = await here.dial(there.peer_id, [there.address])
    another = await other.dial(there.peer_id, [there.address])
    long = bytes(1_000_000)
    answer_with(there, long, max_reply_bytes=2_000_000)

    async def ask(connection: Connection) -> bytes | MeshswarmError:
        try:
            return await connection.request("ask", b"", timeout_s=30.0, max_reply_bytes=2_000_000)
        except RefusedError as error:
            assert error.retry_after_s
            return error

    answers, of_another = await asyncio.gather(asyncio.gather(*(ask(connection) for _ in range(60))), ask(another))
    n_given = answers.count(long)
    assert requests.MAX_SENDING_TO_ONE_BYTES // 2_000_000 < n_given < 60
    assert of_another == long, "others are not refused for it"
    assert await ask(connection) == long, "what has been read does not count"
    monkeypatch.setattr(requests, "MAX_SENDING_TO_ONE_BYTES", 1000)
    monkeypatch.setattr(requests, "MAX_SENDING_BYTES", 1000)
    assert await ask(connection) == long, "one answer may be of any length"


async def test_an_answer_above_the_askers_limit_is_an_error(pair: Pair) -> None:
    connection, there = pair
    answer_with(there, b"x" * 50_001)
    with pytest.raises(RemoteProtocolError):
        await connection.request("ask", b"", max_reply_bytes=50_000)
    answer_with(there, b"x" * 50_000)
    assert len(await connection.request("ask", b"", max_reply_bytes=50_000)) == 50_000


async def test_an_answer_above_its_own_limit_is_a_failure_there(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    connection, there = pair
    answer_with(there, b"x" * 11, max_reply_bytes=10)
    with caplog.at_level(logging.CRITICAL), pytest.raises(RefusedError):
        await connection.request("ask", b"")


async def test_two_frames_are_no_question(pair: Pair) -> None:
    connection, there = pair
    answer_with(there, b"fine")
    stream = connection.open_stream("ask", max_frame_bytes=1000)
    stream.send(b"one")
    stream.send(b"two")
    with pytest.raises((RemoteProtocolError, RefusedError)):
        while True:
            await stream.receive(timeout_s=5)


async def test_no_frame_at_all_is_no_question(pair: Pair) -> None:
    connection, there = pair
    answer_with(there, b"fine")
    stream = connection.open_stream("ask", max_frame_bytes=1000)
    stream.finish()
    with pytest.raises(MeshswarmError, match="gave up"):
        await stream.receive(timeout_s=5)


def test_when_to_come_back_is_a_time_that_a_person_can_be_told() -> None:
    def refused(retry_after_s: float) -> bytes:
        return bytes([requests.Status.REFUSED]) + msgpack.packb(["no", retry_after_s])

    for told, heard in ((-3.0, 0.0), (2.5, 2.5), (1e300, 3600.0)):
        with pytest.raises(RefusedError) as caught:
            requests._open_reply(refused(told), "ask", PEER, 1000)
        assert caught.value.retry_after_s == heard
    for nonsense in (float("inf"), float("nan")):
        with pytest.raises(RemoteProtocolError):
            requests._open_reply(refused(nonsense), "ask", PEER, 1000)


VALUES = st.recursive(
    st.none() | st.text(max_size=5) | st.floats() | st.booleans(), lambda inner: st.lists(inner, max_size=3)
)
REPLIES = st.builds(lambda status, value: bytes([status]) + msgpack.packb(value), st.integers(0, 3), VALUES)


@given(st.binary(max_size=60) | REPLIES)
def test_any_reply_is_an_answer_or_an_error_of_ours(reply: bytes) -> None:
    try:
        answer = requests._open_reply(reply, "ask", PEER, 1000)
    except (RefusedError, RemoteProtocolError) as error:
        assert str(error)
    else:
        assert answer == reply[1:]
