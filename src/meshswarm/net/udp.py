"""The one UDP socket of a peer: datagrams in batches, errors by address, never a reason to stop.

A raw non-blocking socket on the event loop: one wake-up reads many datagrams, and a datagram leaves by one system call
without passing through a transport's buffer. The rule this file keeps: whatever the network reports (refused, too
large, unreachable) concerns one address; the socket itself lives until `close`.

On Linux the kernel says which address refused (IP_RECVERR). Such a report makes the socket "in error" for `poll`, which
libuv takes as its end; so an epoll object stands between socket and loop, and the loop only sees it become readable.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import struct
import sys
from collections import deque
from typing import Any, Protocol

from meshswarm.config import Address
from meshswarm.errors import ConfigError

logger = logging.getLogger(__name__)

BATCH_DATAGRAMS = 16  # then what was answered leaves before more is read
_MAX_DATAGRAM_BYTES = 65536
_WANTED_BUFFER_BYTES = 4 * 1024 * 1024
_MAX_WAITING_DATAGRAMS = 1024
_RETRY_S = 0.001

# <linux/in.h>, <linux/in6.h>, <linux/errqueue.h>: not in Python's socket module
_IP_MTU_DISCOVER, _IP_RECVERR, _IPV6_MTU_DISCOVER, _IPV6_RECVERR, _PMTUDISC_PROBE = 10, 11, 23, 25, 3
_IP_DONTFRAG, _IPV6_DONTFRAG = 28, 62  # the same on macOS
_EXTENDED_ERR = struct.Struct("=IBBBxII")  # sock_extended_err: errno, origin, type, code, info, data
_UNREACHABLE = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


class ListenError(ConfigError):
    """The address to listen on cannot be used."""


class Receiver(Protocol):
    """Who gets what the socket brings."""

    def datagram_received(self, data: bytes, sockaddr: Any) -> None: ...
    def batch_received(self) -> None:
        """The last of some datagrams was handed over."""

    def refused(self, sockaddr: Any, reason: str) -> None:
        """The network says that nobody is at `sockaddr`. Anybody on the path could forge that."""


class UdpSocket:
    """Bound to `address`; one family, or both when it is an IPv6 wildcard and the machine allows it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, receiver: Receiver) -> None:
        self._loop = loop
        self._receiver = receiver
        self._socket = _bind(address)
        self.family = self._socket.family
        host, port = self._socket.getsockname()[:2]
        self.address = Address(host, port)
        self.receive_buffer_bytes = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._waiting: deque[tuple[bytes, Any]] = deque()  # the kernel had no room for these
        self._retry: asyncio.TimerHandle | None = None
        self._epoll: select.epoll | None = None
        if sys.platform == "linux":
            self._epoll = select.epoll()
            self._epoll.register(self._socket.fileno(), select.EPOLLIN)
        self._reader = self._socket.fileno() if self._epoll is None else self._epoll.fileno()
        loop.add_reader(self._reader, self._on_readable)

    def close(self) -> None:
        self._loop.remove_reader(self._reader)
        if self._retry is not None:
            self._retry.cancel()
        if self._epoll is not None:
            self._epoll.close()
        self._socket.close()

    def sockaddr(self, host: str, port: int) -> Any:
        """What this socket calls the IP address `host`. Raises OSError when it cannot send there."""
        if self.family == socket.AF_INET:
            socket.inet_pton(socket.AF_INET, host)
            return (host, port)
        if ":" not in host:
            if not self.takes_ipv4:
                raise OSError("this socket takes IPv6 only")
            host = f"::ffff:{host}"
        name, _, scope = host.partition("%")
        return (name, port, 0, socket.if_nametoindex(scope) if scope else 0)

    @property
    def takes_ipv4(self) -> bool:
        return self.family == socket.AF_INET or not self._socket.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)

    # -- sending

    def send(self, data: bytes, sockaddr: Any) -> int:
        """Send one datagram. Returns 0, or the errno of what this machine had against it."""
        try:
            self._socket.sendto(data, sockaddr)
        except (BlockingIOError, InterruptedError):
            self._wait_with(data, sockaddr)
        except OSError as error:
            self._read_errors()  # Linux queues the report as well, of a datagram too large too
            if error.errno not in _UNREACHABLE:
                return error.errno or errno.EIO
            try:  # it was an earlier datagram's fate, reported on this call
                self._socket.sendto(data, sockaddr)
            except (BlockingIOError, InterruptedError):
                self._wait_with(data, sockaddr)
            except OSError as again:
                return again.errno or errno.EIO
        return 0

    def _wait_with(self, data: bytes, sockaddr: Any) -> None:
        if len(self._waiting) < _MAX_WAITING_DATAGRAMS:
            self._waiting.append((data, sockaddr))
        if self._retry is None:
            self._retry = self._loop.call_later(_RETRY_S, self._send_waiting)

    def _send_waiting(self) -> None:
        self._retry = None
        waiting, self._waiting = self._waiting, deque()
        for data, sockaddr in waiting:
            self.send(data, sockaddr)

    # -- receiving

    def _on_readable(self) -> None:
        receive, handle = self._socket.recvfrom, self._receiver.datagram_received
        try:
            for received in range(BATCH_DATAGRAMS):
                try:
                    data, sockaddr = receive(_MAX_DATAGRAM_BYTES)
                except (BlockingIOError, InterruptedError):
                    if received == 0:  # then reports woke the loop, and do so for ever until they are read
                        self._read_errors()
                    break
                except OSError:  # what became of an earlier datagram, said here
                    self._read_errors()
                    continue
                if len(sockaddr) == 4 and "%" in sockaddr[0]:
                    sockaddr = (sockaddr[0].partition("%")[0], *sockaddr[1:])
                handle(data, sockaddr)
        finally:
            self._receiver.batch_received()

    def _read_errors(self) -> None:
        if self._epoll is None:
            return
        for _ in range(BATCH_DATAGRAMS):
            try:
                _, ancillary, _, sockaddr = self._socket.recvmsg(0, 256, socket.MSG_ERRQUEUE)
            except OSError:
                return
            for _, _, payload in ancillary:
                number = _EXTENDED_ERR.unpack_from(payload)[0] if len(payload) >= _EXTENDED_ERR.size else 0
                if number in _UNREACHABLE and sockaddr:
                    self._receiver.refused(sockaddr, errno.errorcode[number])


def _bind(address: Address) -> socket.socket:
    """Raises ListenError with what to do."""
    try:
        family, _, _, _, sockaddr = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address.is_unspecified else 1)
        _set_options(sock)
        sock.bind(sockaddr)
    except OSError as error:
        sock.close()
        hint = "; stop what uses it, or choose another port" if error.errno == errno.EADDRINUSE else ""
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}{hint}") from error
    return sock


def _set_options(sock: socket.socket) -> None:
    """Room for bursts, no fragments (path probes must tell the truth), reports by address: each if it can be had."""
    options = [(socket.SOL_SOCKET, name, _WANTED_BUFFER_BYTES) for name in (socket.SO_RCVBUF, socket.SO_SNDBUF)]
    if sys.platform == "linux":
        options += [
            (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE),
            (socket.IPPROTO_IP, _IP_RECVERR, 1),
            (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE),
            (socket.IPPROTO_IPV6, _IPV6_RECVERR, 1),
        ]
    elif sys.platform == "darwin":
        options += [(socket.IPPROTO_IP, _IP_DONTFRAG, 1), (socket.IPPROTO_IPV6, _IPV6_DONTFRAG, 1)]
    for level, name, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, name, value)
