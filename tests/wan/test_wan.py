"""The emulated wide-area network: its links on a virtual clock, and real hosts where this machine can have them."""

from __future__ import annotations

import json
import random
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wan

WAN = [sys.executable, wan.__file__]


def packet(destination: int, size: int = 100, label: int = 0) -> bytes:
    """The least of an IPv4 packet to host `destination`: version, address, and a label to tell packets apart."""
    return bytes([0x45]) + bytes(15) + bytes([10, 99, 0, destination + 1]) + label.to_bytes(4, "big") + bytes(size - 24)


def links(hosts: int = 3, rtt_ms: float = 40.0, **settings: float) -> wan.Links:
    return wan.Links(wan.LinkSettings(wan.same_rtt(hosts, rtt_ms), **settings))


class TestLinks:
    def test_one_way_takes_half_a_round_trip(self) -> None:
        net = links(rtt_ms=40.0)
        net.send(0, packet(2), now=10.0)
        assert net.next_due() == pytest.approx(10.020)
        assert list(net.due(10.0199)) == []
        assert list(net.due(10.0201)) == [(2, packet(2))]
        assert net.next_due() is None

    def test_rate_puts_packets_behind_each_other_and_a_full_buffer_drops(self) -> None:
        net = links(rtt_ms=0.0, rate_mbit_s=1.0)
        for _ in range(100):
            net.send(0, packet(1, size=1250), now=0.0)  # 10 ms on the wire each
        assert net.next_due() == pytest.approx(0.010)
        delivered = list(net.due(10.0))
        assert len(delivered) in (50, 51)  # 0.5 s of buffer, and the one on the wire
        assert net.counters.overflow == 100 - len(delivered)

    def test_all_links_of_a_host_share_its_line_each_way(self) -> None:
        net = links(rtt_ms=0.0, line_mbit_s=1.0)
        for _ in range(5):
            net.send(0, packet(1, size=1250), now=0.0)  # 10 ms on the line each
            net.send(0, packet(2, size=1250), now=0.0)
        assert len(list(net.due(0.0501))) == 4, "one goes up while the last comes down"
        assert len(list(net.due(1.0))) == 6
        for source in (0, 1):
            for _ in range(5):
                net.send(source, packet(2, size=1250), now=2.0)
        assert len(list(net.due(2.0601))) == 5, "two lines that are free end in one"
        assert len(list(net.due(2.1101))) == 5

    def test_a_full_line_drops_and_keeps_no_room_for_what_it_dropped(self) -> None:
        net = links(rtt_ms=0.0, line_mbit_s=1.0)
        for _ in range(100):
            net.send(0, packet(1, size=1250), now=0.0)
        n_delivered = len(list(net.due(10.0)))
        assert n_delivered in (50, 51) and net.counters.overflow == 100 - n_delivered
        net.send(0, packet(1, size=1250), now=20.0)
        assert net.next_due() == pytest.approx(20.020)

    @given(st.lists(st.floats(0, 0.01), max_size=50), st.integers(0, 2**32))
    def test_jitter_never_reorders(self, gaps: list[float], seed: int) -> None:
        net = wan.Links(wan.LinkSettings(wan.same_rtt(2, 10.0), jitter_ms=20.0), seed)
        now = 0.0
        for label, gap in enumerate(gaps):
            now += gap
            net.send(0, packet(1, label=label), now)
        assert [data for _, data in net.due(1e9)] == [packet(1, label=label) for label in range(len(gaps))]

    def test_unplugged_host_gets_and_sends_nothing(self) -> None:
        net = links(rtt_ms=0.0)
        wan.obey(net, json.dumps({"do": "cut", "host": 1}).encode())
        net.send(0, packet(1), 0.0)
        net.send(1, packet(2), 0.0)
        net.send(0, packet(2), 0.0)
        assert [host for host, _ in net.due(1.0)] == [2]
        wan.obey(net, json.dumps({"do": "heal", "host": 1}).encode())
        net.send(0, packet(1), 2.0)
        assert [host for host, _ in net.due(3.0)] == [1]

    def test_loss_is_about_what_was_asked_for(self) -> None:
        net = links(rtt_ms=0.0, loss_percent=10.0)
        for _ in range(2000):
            net.send(0, packet(1), 0.0)
        assert 120 < net.counters.lost < 280

    @given(st.binary(max_size=64), st.integers(0, 2))
    def test_any_bytes_are_forwarded_unchanged_or_ignored(self, data: bytes, source: int) -> None:
        net = links()
        net.send(source, data, 0.0)
        assert all(received == data and host != source for host, received in net.due(1e9))

    def test_settings_change_while_it_runs(self) -> None:
        net = links(rtt_ms=40.0, loss_percent=1.0)
        wan.obey(net, json.dumps({"do": "set", "rtt_ms": 100.0}).encode())
        assert net.settings == wan.LinkSettings(wan.same_rtt(3, 100.0), loss_percent=1.0)
        assert b"no host 7" in wan.obey(net, json.dumps({"do": "cut", "host": 7}).encode())


@pytest.mark.parametrize("arguments", [["--rtt-matrix", "0,1;2"], ["--nat", "1=round"], ["--nat", "cone"]])
def test_impossible_networks_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        wan.parse_arguments(["up", "--hosts", "2", *arguments])


def test_prefixes_that_run_into_host_numbers_are_refused() -> None:
    with pytest.raises(SystemExit):
        wan.parse_arguments(["--prefix", "ms1", "stats"])


# -- real hosts

ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("0.0.0.0", 9000))
print("listening", flush=True)
while True:
    data, sender = s.recvfrom(2048)
    s.sendto(data, sender)
"""
PING = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(float(sys.argv[2]))
for _ in range(5):
    started = time.monotonic()
    s.sendto(b"ping", (sys.argv[1], 9000))
    try:
        s.recv(2048)
    except TimeoutError:
        sys.exit("no answer")
    print(time.monotonic() - started)
"""


def needs(*, nat: bool = False) -> None:
    if (lack := wan.missing(nat=nat)) is not None:
        pytest.skip(f"no emulated network here: {lack}")


@contextmanager
def network(*arguments: str) -> Iterator[str]:
    """A network that is up; gives its prefix, and checks that it leaves no namespace behind."""
    prefix = "t" + "".join(random.choices(string.ascii_lowercase, k=6))
    command = [*WAN, "--prefix", prefix, "up", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "hosts up" not in line and "failed" in line:
            pytest.skip(f"this machine cannot have an emulated network: {line.strip()}")
        assert "hosts up" in line, line
        yield prefix
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not list(Path("/run/netns").glob(f"{prefix}*"))


@contextmanager
def echo_on(prefix: str, host: int) -> Iterator[None]:
    command = ["ip", "netns", "exec", f"{prefix}{host}", sys.executable, "-c", ECHO]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline().strip() == "listening"
        yield
    finally:
        process.kill()
        process.wait()


def ping(prefix: str, host: int, address: str, timeout_s: float = 5.0) -> list[float] | None:
    """Five round-trip times in seconds, or None when one got no answer."""
    command = ["ip", "netns", "exec", f"{prefix}{host}", sys.executable, "-c", PING, address, str(timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return [float(line) for line in done.stdout.split()] if done.returncode == 0 else None


@pytest.mark.wan
def test_two_hosts_are_a_round_trip_apart_and_can_be_cut() -> None:
    needs()
    with network("--hosts", "2", "--rtt", "20") as prefix, echo_on(prefix, 1):
        times = ping(prefix, 0, "10.99.0.2")
        assert times is not None and min(times) >= 0.020
        subprocess.run([*WAN, "--prefix", prefix, "cut", "1"], check=True, stdout=subprocess.DEVNULL)
        assert ping(prefix, 0, "10.99.0.2", timeout_s=0.3) is None
        subprocess.run([*WAN, "--prefix", prefix, "heal", "1"], check=True, stdout=subprocess.DEVNULL)
        assert ping(prefix, 0, "10.99.0.2") is not None


@pytest.mark.wan
def test_a_second_network_of_one_prefix_is_refused() -> None:
    needs()
    with network("--hosts", "1") as prefix:
        again = [*WAN, "--prefix", prefix, "up", "--hosts", "1"]
        second = subprocess.run(again, capture_output=True, text=True, check=False)
        assert second.returncode == 1 and "already up" in second.stderr
        assert Path(f"/run/netns/{prefix}0").exists()


@pytest.mark.wan
@pytest.mark.parametrize("kind", ["cone", "symmetric"])
def test_behind_a_nat_only_what_was_asked_for_comes_in(kind: str) -> None:
    needs(nat=True)
    with network("--hosts", "2", "--nat", f"1={kind}") as prefix:
        with echo_on(prefix, 0):
            assert ping(prefix, 1, "10.99.0.1") is not None
        with echo_on(prefix, 1):
            assert ping(prefix, 0, "10.99.0.2", timeout_s=0.3) is None
