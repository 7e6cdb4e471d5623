"""A datagram larger than the link takes is reported once, and never keeps the socket's owner busy afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.wan.test_wan import needs, network

SEND_TOO_MUCH = """
import asyncio, errno
from meshswarm.config import Address
from meshswarm.net.udp import UdpSocket

class Receiver:
    wakeups = 0
    def datagram_received(self, data, sockaddr): ...
    def refused(self, sockaddr, reason): ...
    def batch_received(self):
        self.wakeups += 1

async def main():
    receiver = Receiver()
    socket = UdpSocket(asyncio.get_running_loop(), Address("10.99.0.1", 0), receiver)
    assert socket.send(bytes(1700), ("10.99.0.2", 9)) == errno.EMSGSIZE
    await asyncio.sleep(0.2)
    socket.close()
    print(receiver.wakeups)

asyncio.run(main())
"""


@pytest.mark.wan
def test_a_datagram_above_the_path_limit_leaves_no_error_that_wakes_for_ever() -> None:
    needs()
    with network("--hosts", "2") as prefix:
        command = ["ip", "netns", "exec", f"{prefix}0", sys.executable, "-c", SEND_TOO_MUCH]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10
