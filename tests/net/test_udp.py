"""The socket: batches, errors by address, and a long life."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.net.eventually import eventually

from meshswarm.config import Address
from meshswarm.net.udp import BATCH_DATAGRAMS, UdpSocket


class Inbox:
    def __init__(self) -> None:
        self.datagrams: list[bytes] = []
        self.batches: list[int] = []
        self.refusals: list[tuple[Any, str]] = []

    def datagram_received(self, data: bytes, sockaddr: Any) -> None:
        self.datagrams.append(data)

    def batch_received(self) -> None:
        self.batches.append(len(self.datagrams))

    def refused(self, sockaddr: Any, reason: str) -> None:
        self.refusals.append((sockaddr, reason))


@pytest.fixture(params=["127.0.0.1", "::1"])
async def udp(request: pytest.FixtureRequest) -> AsyncIterator[tuple[UdpSocket, Inbox]]:
    inbox = Inbox()
    udp = UdpSocket(asyncio.get_running_loop(), Address(request.param, 0), inbox)
    yield udp, inbox
    udp.close()


Udp = tuple[UdpSocket, Inbox]


async def test_datagrams_arrive_in_batches_that_are_bounded(udp: Udp) -> None:
    sock, inbox = udp
    target = sock.sockaddr(sock.address.host, sock.address.port)
    sent = [bytes([number]) * (number + 1) for number in range(3 * BATCH_DATAGRAMS)]
    for datagram in sent:
        assert sock.send(datagram, target) == 0
    await eventually(lambda: len(inbox.datagrams) == len(sent))
    assert inbox.datagrams == sent
    sizes = [stop - start for start, stop in zip([0, *inbox.batches], inbox.batches, strict=False)]
    assert max(sizes) <= BATCH_DATAGRAMS


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say who refused")
async def test_a_refusal_names_the_address_and_the_socket_lives_on(udp: Udp) -> None:
    sock, inbox = udp
    with socket.socket(sock.family, socket.SOCK_DGRAM) as gone:
        gone.bind((sock.address.host, 0))
        nowhere = sock.sockaddr(sock.address.host, gone.getsockname()[1])
    here = sock.sockaddr(sock.address.host, sock.address.port)
    for number in range(5):
        assert sock.send(b"anybody?", nowhere) == 0
        assert sock.send(bytes([number]), here) == 0
    await eventually(lambda: len(inbox.datagrams) == 5 and inbox.refusals)
    assert {refusal[0][:2] for refusal in inbox.refusals} == {nowhere[:2]}
    assert {reason for _, reason in inbox.refusals} == {"ECONNREFUSED"}


async def test_what_cannot_be_sent_is_told_by_its_number(udp: Udp) -> None:
    sock, inbox = udp
    here = sock.sockaddr(sock.address.host, sock.address.port)
    assert sock.send(bytes(65_600), here) == errno.EMSGSIZE
    assert sock.send(b"fine", here) == 0
    await eventually(lambda: inbox.datagrams == [b"fine"])


async def test_addresses_of_another_family_are_refused(udp: Udp) -> None:
    sock, _ = udp
    with pytest.raises(OSError):
        sock.sockaddr("::1" if sock.family == socket.AF_INET else "127.0.0.1", 1)


async def test_a_wildcard_takes_both_families() -> None:
    sock = UdpSocket(asyncio.get_running_loop(), Address("::", 0), Inbox())
    try:
        assert sock.takes_ipv4
        assert sock.sockaddr("127.0.0.1", 5) == ("::ffff:127.0.0.1", 5, 0, 0)
        assert sock.sockaddr("::1", 5) == ("::1", 5, 0, 0)
    finally:
        sock.close()


async def test_a_full_send_buffer_is_waited_for_and_nothing_gets_lost(
    udp: Udp, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, inbox = udp
    here = sock.sockaddr(sock.address.host, sock.address.port)

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def sendto(self, *_arguments: Any) -> int:
            raise BlockingIOError

    real = sock._socket
    monkeypatch.setattr(sock, "_socket", Full())
    assert sock.send(b"one", here) == sock.send(b"two", here) == 0
    monkeypatch.setattr(sock, "_socket", real)
    await eventually(lambda: inbox.datagrams == [b"one", b"two"])


async def test_a_receiver_that_raises_does_not_stop_the_socket(udp: Udp) -> None:
    sock, inbox = udp
    here = sock.sockaddr(sock.address.host, sock.address.port)
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    receive = inbox.datagram_received
    inbox.datagram_received = lambda data, sockaddr: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    sock.send(b"trouble", here)
    await eventually(lambda: complaints)
    sock._receiver = inbox
    inbox.datagram_received = receive  # type: ignore[method-assign]
    sock.send(b"fine", here)
    await eventually(lambda: inbox.datagrams == [b"fine"])
