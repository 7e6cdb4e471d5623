"""The local network by mDNS: on this machine's loopback, and between hosts in namespaces of their own."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from meshswarm.config import Address
from meshswarm.discovery import lan as module
from meshswarm.discovery.candidate import Candidate, Source, SourceError
from meshswarm.discovery.label import is_of_swarm
from meshswarm.discovery.lan import SERVICE, LanSource, own_addresses
from meshswarm.identity import Identity, PeerId
from meshswarm.net.swarm import DAY_S, Swarm

IPV4 = frozenset({socket.AF_INET})
NOW = 2_000_000_000.0 // DAY_S * DAY_S + DAY_S / 2


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def source(swarm: Swarm, port: int, peer: PeerId | None = None, **settings: Any) -> LanSource:
    return LanSource(swarm, peer or Identity.generate().peer_id, Address("127.0.0.1", port), IPV4, **settings)


@contextlib.asynccontextmanager
async def looking(*sources: LanSource) -> AsyncIterator[list[asyncio.Queue[Candidate]]]:
    """What each of `sources` gives while it looks."""
    found: list[asyncio.Queue[Candidate]] = [asyncio.Queue() for _ in sources]

    async def look(each: LanSource, into: asyncio.Queue[Candidate]) -> None:
        async for candidate in each.candidates():
            into.put_nowait(candidate)

    tasks = [asyncio.create_task(look(each, into)) for each, into in zip(sources, found, strict=True)]
    try:
        async with asyncio.timeout(10):
            yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def listener() -> Iterator[socket.socket]:
    """Somebody on the network who reads whatever is sent by multicast."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        ear.bind(("", 5353))
        group = struct.pack("4s4s", socket.inet_aton("224.0.0.251"), socket.inet_aton("127.0.0.1"))
        ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        ear.setblocking(False)
        yield ear


def heard(ear: socket.socket) -> bytes:
    packets = []
    with contextlib.suppress(BlockingIOError):
        while True:
            packets.append(ear.recv(9000))
    return b"".join(packets)


async def test_two_peers_of_a_public_swarm_find_each_other_by_key_and_address(swarm: Swarm) -> None:
    one, two = Identity.generate().peer_id, Identity.generate().peer_id
    async with looking(source(swarm, 4801, one), source(swarm, 4802, two)) as (first, second):
        assert await first.get() == Candidate(two, (Address("127.0.0.1", 4802),), Source.LAN)
        assert await second.get() == Candidate(one, (Address("127.0.0.1", 4801),), Source.LAN)


async def test_members_of_a_private_swarm_find_each_other_by_address_alone() -> None:
    swarm = Swarm("office", secrets.token_bytes(32))
    async with looking(source(swarm, 4801), source(swarm, 4802)) as (first, second):
        assert await first.get() == Candidate(None, (Address("127.0.0.1", 4802),), Source.LAN)
        assert await second.get() == Candidate(None, (Address("127.0.0.1", 4801),), Source.LAN)


async def test_peers_of_other_swarms_are_not_even_asked_where_they_are(swarm: Swarm) -> None:
    name = f"office-{secrets.token_hex(4)}"
    private, same_name = Swarm(name, secrets.token_bytes(32)), Swarm(name, secrets.token_bytes(32))
    sources = [source(each, 4801 + n) for n, each in enumerate((swarm, private, same_name, Swarm(name)))]
    companion = source(private, 4809)
    async with looking(*sources, companion) as found:
        await found[1].get()
        await asyncio.sleep(1.2)
        assert [queue.qsize() for queue in found] == [0, 0, 0, 0, 1]
        assert int(sources[0].note.removesuffix(" peers of other swarms there")) >= 4


async def test_who_only_listens_is_not_seen(swarm: Swarm) -> None:
    async with looking(source(swarm, 4801), source(swarm, 4802, announces=False)) as (first, second):
        assert (await second.get()).addresses == (Address("127.0.0.1", 4801),)
        await asyncio.sleep(1.2)
        assert first.empty()


async def test_a_private_swarm_s_packets_say_nothing_of_it_or_of_the_peer() -> None:
    swarm, peer = Swarm("the-office", secrets.token_bytes(32)), Identity.generate().peer_id
    with listener() as ear:
        async with looking(source(swarm, 4801, peer), source(swarm, 4802)) as (first, _):
            await first.get()
            await asyncio.sleep(0.5)
            said = heard(ear)
    assert SERVICE.split(".")[0].encode() in said, "the listener hears what is announced"
    secret: list[str | bytes] = [str(peer), peer.key, swarm.name, swarm.swarm_id, swarm.swarm_id.hex()]
    host = socket.gethostname().partition(".")[0].encode()
    secret += [swarm.lan_name(time.time()), bytes([len(host)]) + host]  # as DNS writes a name
    for each in secret:
        assert (each.encode() if isinstance(each, str) else each) not in said


async def test_a_public_swarm_s_packets_name_the_peer(swarm: Swarm) -> None:
    """The other side of the test above: what it looks for would be heard."""
    peer = Identity.generate().peer_id
    with listener() as ear:
        async with looking(source(swarm, 4801, peer), source(swarm, 4802)) as (first, _):
            await first.get()
            await asyncio.sleep(0.5)
            assert str(peer).encode() in heard(ear)


async def test_a_private_peer_has_another_name_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    swarm, clock = Swarm("office", secrets.token_bytes(32)), Clock()
    today = source(swarm, 4801, clock=clock)
    async with looking(today, source(swarm, 4802, clock=clock)) as (_, found):
        await found.get()
        (first,) = today._own
        clock.now += DAY_S
        await found.get()  # the same address under the new name
        (second,) = today._own - {first}
    labels = [name.removesuffix(f".{SERVICE}") for name in (first, second)]
    assert not set(labels[0].split("-")) & set(labels[1].split("-"))
    assert [is_of_swarm(label, swarm, NOW + 3 * DAY_S) for label in labels] == [False, False]


async def test_a_machine_that_comes_into_another_network_is_announced_there(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ["127.0.0.1"]
    monkeypatch.setattr(module, "CHECK_S", 0.05)
    monkeypatch.setattr(module, "own_addresses", lambda *_: list(here))
    async with looking(source(swarm, 4801), source(swarm, 4802)) as (found, _):
        assert (await found.get()).addresses == (Address("127.0.0.1", 4802),)
        here[:] = ["127.0.0.2"]
        while (await found.get()).addresses != (Address("127.0.0.2", 4802),):
            pass


async def test_hostile_announcements_end_nothing(swarm: Swarm) -> None:
    """Right label, wrong everything else: no address, a foreign key, an address that is nobody's."""
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    def info(label_port: int, hosts: list[str], properties: dict[bytes, bytes]) -> AsyncServiceInfo:
        label = module.make_label(swarm.lan_name(NOW), label_port.to_bytes(8))
        name = f"{label}.{SERVICE}"
        return AsyncServiceInfo(
            SERVICE, name, port=label_port, parsed_addresses=hosts, properties=properties, server=f"{label}.local."
        )

    mallory = AsyncZeroconf(interfaces=["127.0.0.1"])
    try:
        async with looking(source(swarm, 4801)) as (found,):
            for each in (
                info(1, ["224.0.0.1", "0.0.0.0"], {}),
                info(2, [f"10.0.{n}.1" for n in range(40)], {b"id": b"\xff" * 200}),
                info(3, ["10.0.0.3"], {b"id": b"nonsense"}),
            ):
                await mallory.async_register_service(each, cooperating_responders=True)
            got = sorted([await found.get(), await found.get()], key=lambda each: len(each.addresses))
            await asyncio.sleep(0.3)
            assert found.empty() and [each.peer for each in got] == [None, None]
            assert got[0].addresses == (Address("10.0.0.3", 3),)
            assert len(got[1].addresses) == module.MAX_ADDRESSES
    finally:
        await mallory.async_close()


async def test_an_address_this_machine_has_not_is_a_sentence(swarm: Swarm) -> None:
    elsewhere = LanSource(swarm, Identity.generate().peer_id, Address("203.0.113.9", 1), IPV4)
    with pytest.raises(SourceError, match="the local network cannot be searched"):
        async for _ in elsewhere.candidates():
            pass


async def test_no_zeroconf_is_a_sentence(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("zeroconf"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SourceError, match="zeroconf is not installed"):
        async for _ in source(swarm, 1).candidates():
            pass


def test_what_is_announced_are_addresses_others_can_dial() -> None:
    assert own_addresses(Address("192.0.2.7", 1), IPV4) == ["192.0.2.7"]
    everywhere = own_addresses(Address("::", 1), frozenset({socket.AF_INET, socket.AF_INET6}))
    assert len(everywhere) <= 6 and not any(host.startswith("127.") or host == "::1" for host in everywhere)


# -- hosts of their own

PEER = """
import asyncio, contextlib, sys
from meshswarm.config import Address
from meshswarm.discovery.finder import Finder
from meshswarm.discovery.lan import LanSource
from meshswarm.identity import Identity
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

async def main(listen, name, key):
    swarm = Swarm(name, bytes.fromhex(key) or None)
    endpoint = await Endpoint.bind(Identity.generate(), Address.parse(listen), swarm=swarm)
    source = LanSource(swarm, endpoint.peer_id, endpoint.address, endpoint.families)
    met = []
    async def meet(peers):
        met.extend(peers)
        print(endpoint.peer_id, "met", peers[0][0], *peers[0][1], flush=True)
    finder = Finder([source], endpoint, meet, lambda: [peer for peer, _ in met])
    task = asyncio.create_task(finder.run())
    await asyncio.to_thread(sys.stdin.read)
    print(finder.reports()[0].sentence, flush=True)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await endpoint.close()

asyncio.run(main(*sys.argv[1:]))
"""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no local network can be emulated here: ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them: 10.98.0.1 and 10.98.0.2, and link-local IPv6."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("no local network can be emulated here: that needs Linux and root")
    prefix = f"lan{secrets.token_hex(3)}"
    hosts = f"{prefix}0", f"{prefix}1"
    try:
        for host in hosts:
            ip("netns", "add", host)
        ip("link", "add", "eth0", "netns", hosts[0], "type", "veth", "peer", "name", "eth0", "netns", hosts[1])
        for number, host in enumerate(hosts):
            ip("-n", host, "address", "add", f"10.98.0.{number + 1}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", host, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


@contextlib.contextmanager
def peer_on(host: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", host, sys.executable, "-c", PEER, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("key", ["", "6b" * 32])
@pytest.mark.timeout(40)
def test_two_hosts_that_know_nothing_of_each_other_meet(two_hosts: tuple[str, str], key: str) -> None:
    name, listen = f"test-{secrets.token_hex(4)}", "0.0.0.0:4810"
    with peer_on(two_hosts[0], listen, name, key) as one, peer_on(two_hosts[1], listen, name, key) as two:
        lines = [line_of(one).split(), line_of(two).split()]
        assert lines[0][0] == lines[1][2] and lines[1][0] == lines[0][2]
        assert lines[0][3].startswith("10.98.0.2:") and lines[1][3].startswith("10.98.0.1:")


@pytest.mark.timeout(40)
def test_hosts_with_ipv6_alone_meet(two_hosts: tuple[str, str]) -> None:
    for host in two_hosts:
        ip("-n", host, "-4", "address", "flush", "dev", "eth0")
    wait_for_ipv6(two_hosts)
    name = f"test-{secrets.token_hex(4)}"
    with peer_on(two_hosts[0], "[::]:4810", name, "") as one, peer_on(two_hosts[1], "[::]:4810", name, "") as two:
        lines = [line_of(one).split(), line_of(two).split()]
        assert lines[0][0] == lines[1][2] and all("fe80" in address for address in lines[0][3:])
        assert any("%eth0" in address for address in lines[0][3:])


def wait_for_ipv6(hosts: tuple[str, str]) -> None:
    """Until duplicate address detection is over, some two seconds; skips where IPv6 is off."""
    for host in hosts:
        for _ in range(100):
            shown = subprocess.run(
                ["ip", "-n", host, "-6", "address", "show", "dev", "eth0"], capture_output=True, text=True, check=True
            ).stdout
            if "fe80" in shown and "tentative" not in shown:
                break
            time.sleep(0.05)
        else:
            pytest.skip("no IPv6 on the emulated network")
