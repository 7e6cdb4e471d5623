"""Nobody hears from a session whom it was not told to connect to."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.artifacts.torrent.peers import LOOPBACK, Shared, StartSession

from meshswarm.artifacts.torrent.settings import session_settings

SCRIPT = """
import asyncio, random, socket, sys
from pathlib import Path
import psutil
from meshswarm.artifacts.merkle import piece_layer
from meshswarm.artifacts.torrent.content import Content, piece_length_of
from meshswarm.artifacts.torrent.session import TorrentSession

def sent():
    return psutil.net_io_counters(pernic=True)["d0"].packets_sent

async def main(folder):
    path = folder / "file"
    path.write_bytes(random.Random(1).randbytes(700_000))
    root, layer = piece_layer(path, piece_length_of(700_000))
    before = sent()
    one = await TorrentSession.start("10.9.9.1", folder=folder / "one")
    other = await TorrentSession.start("0.0.0.0", folder=folder / "other", secret=b"s" * 32)
    await one.seed(Content(700_000, root), path, layer)
    torrent = await other.open(Content(700_000, root), folder / "got", layer)
    await asyncio.sleep(1.5)
    await one.close()
    await other.close()
    print(sent() - before)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.sendto(b"counted", ("203.0.113.1", 9))
    print(sent() - before)

asyncio.run(main(Path(sys.argv[1])))
"""
NAMESPACE = """
set -e
sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
ip link set lo up
ip link add d0 type veth peer name d1
ip link set d1 up
ip link set d0 arp off
ip addr add 10.9.9.1/24 dev d0
ip link set d0 up multicast on
ip route add default dev d0
exec "$0" -c "$1" "$2"
"""


def test_no_packet_leaves_an_interface_that_leads_everywhere(tmp_path: Path) -> None:
    """In a network namespace of its own, whose only way out counts what takes it."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a network namespace needs root")
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", NAMESPACE, sys.executable, SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"], "packets of the sessions, and with one sent on purpose"


async def test_a_session_has_its_own_socket_and_no_other(shared: Shared, start_session: StartSession) -> None:
    process = psutil.Process()

    def sockets() -> set[tuple[int, str, int, str]]:
        kinds = socket.SOCK_STREAM, socket.SOCK_DGRAM
        return {
            (int(each.type), each.laddr.ip, each.laddr.port, each.status)
            for each in process.net_connections("inet")
            if each.type in kinds
        }

    before = sockets()
    session = await start_session()
    await session.seed(shared.content, shared.path, shared.layer)
    await asyncio.sleep(0.5)
    new = sockets() - before
    assert {(kind, host) for kind, host, _port, _status in new} <= {
        (socket.SOCK_STREAM, LOOPBACK),
        (socket.SOCK_DGRAM, LOOPBACK),
    }
    assert {port for _kind, _host, port, _status in new} == {session.port}
    assert not [status for *_, status in new if status in ("SYN_SENT", "ESTABLISHED")]


def test_whatever_would_tell_others_is_off() -> None:
    settings = session_settings("127.0.0.1:0")
    for name in ("enable_dht", "enable_lsd", "enable_upnp", "enable_natpmp"):
        assert settings[name] is False
    assert settings["dht_bootstrap_nodes"] == settings["webtorrent_stun_server"] == ""
