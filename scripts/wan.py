#!/usr/bin/env python3
"""A wide-area network on one machine: hosts in namespaces, joined by links with delay, jitter, loss and bandwidth.

    wan.py up   --hosts 4 --rtt 40 --jitter 2 --loss 0.1 --rate 100     # stays in the foreground; Ctrl-C removes it all
    wan.py up   --hosts 3 --rtt-matrix "0,10,80;10,0,80;80,80,0"
    wan.py up   --hosts 4 --nat 1=cone --nat 2=symmetric                # hosts 1 and 2 sit behind NATs of their own
    wan.py exec 0 -- python3 -m http.server                             # run something on host 0
    wan.py set  --rtt 120 --loss 1                                      # change the links while it runs
    wan.py cut  2      /  wan.py heal 2                                 # unplug host 2, plug it back

It needs nothing but TUN devices from the kernel, no `netem`: each host's traffic goes through a TUN device into this
process, where one loop forwards whole IP packets when they are due. Programs run on it unchanged.

Host i is the namespace `{prefix}{i}` with address 10.99.0.{i+1}; behind a NAT it is 192.168.{i+1}.2, and 10.99.0.{i+1}
is its router. Units: ms, percent, Mbit/s. Needs root and iproute2, and nftables for --nat. The namespaces of one prefix
belong to one `up`: give another --prefix to run two networks side by side. More in docs/wan.md.

The rule this file keeps: it may delay and drop, never reorder or change a packet, and it leaves no namespace behind.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import random
import re
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
QUEUE_LIMIT_S = 0.5  # a link's buffer: packets that would wait longer for the wire are dropped
MAX_HOSTS = 64
NAMESPACES = Path("/run/netns")
# A symmetric NAT takes another port for every destination, which is what defeats plain hole punching.
MASQUERADE = {"cone": "masquerade", "symmetric": "masquerade fully-random"}
ROUTER_RULES = """
table ip nat {{
  chain outbound {{
    type nat hook postrouting priority 100
    oifname "wan0" {masquerade}
  }}
}}
table ip filter {{
  chain through {{
    type filter hook forward priority 0; policy drop
    iifname "lan0" accept
    ct state established,related accept
  }}
  chain inbound {{
    type filter hook input priority 0; policy drop
    iifname {{ "lan0", "lo" }} accept
    ct state established,related accept
  }}
}}
"""


class WanError(Exception):
    """Why the network cannot be had; a sentence for a person."""


@dataclass(frozen=True)
class LinkSettings:
    """What every link does to a packet. `rtt_ms[a][b]`: round trip between hosts a and b; one way takes half."""

    rtt_ms: tuple[tuple[float, ...], ...]
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    rate_mbit_s: float = 0.0  # per direction of a link; 0: no limit
    line_mbit_s: float = 0.0  # per direction of a host's line, which all its links share; 0: no limit

    def changed(self, message: dict[str, Any]) -> LinkSettings:
        """These settings with those that `message` names replaced."""
        names = ("jitter_ms", "loss_percent", "rate_mbit_s", "line_mbit_s")
        given: dict[str, Any] = {name: message[name] for name in names if name in message}
        if "rtt_ms" in message:
            given["rtt_ms"] = same_rtt(len(self.rtt_ms), message["rtt_ms"])
        return replace(self, **given)


@dataclass
class Counters:
    """Packets since the network came up."""

    forwarded: int = 0
    lost: int = 0
    overflow: int = 0
    bytes: int = 0


def same_rtt(hosts: int, rtt_ms: float) -> tuple[tuple[float, ...], ...]:
    return ((rtt_ms,) * hosts,) * hosts


class Links:
    """All links between the hosts: takes packets in, says when each is due where. No I/O; `now` in seconds."""

    def __init__(self, settings: LinkSettings, seed: int = 0) -> None:
        self.settings = settings
        self.hosts = len(settings.rtt_ms)
        self.unplugged: set[int] = set()
        self.counters = Counters()
        self._random = random.Random(seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []  # due, arrival number, destination, packet
        self._arrivals = 0
        self._wire_free = [[0.0] * self.hosts for _ in range(self.hosts)]
        self._line_up_free = [0.0] * self.hosts
        self._line_down_free = [0.0] * self.hosts
        self._last_due = [[0.0] * self.hosts for _ in range(self.hosts)]

    def send(self, source: int, packet: bytes, now: float) -> None:
        """Take in an IPv4 packet from host `source`; anything not addressed to another host here is ignored."""
        if len(packet) < 20 or packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x63\x00":
            return
        destination = packet[19] - 1
        if not 0 <= destination < self.hosts or destination == source:
            return
        settings = self.settings
        if {source, destination} & self.unplugged or self._random.random() * 100 < settings.loss_percent:
            self.counters.lost += 1
            return
        start = self._through_wires(source, destination, len(packet) * 8 / 1e6, now)
        if start is None:
            self.counters.overflow += 1
            return
        jitter_ms = abs(self._random.gauss(0, settings.jitter_ms)) if settings.jitter_ms else 0.0
        due = start + settings.rtt_ms[source][destination] / 2000 + jitter_ms / 1000
        due = self._last_due[source][destination] = max(due, self._last_due[source][destination])  # never reorder
        self._arrivals += 1
        heapq.heappush(self._waiting, (due, self._arrivals, destination, packet))

    def _through_wires(self, source: int, destination: int, megabits: float, now: float) -> float | None:
        """When a packet that comes to the source's line now has left the destination's; None: a buffer is full."""
        settings = self.settings
        wires = (
            (settings.line_mbit_s, self._line_up_free, source),
            (settings.rate_mbit_s, self._wire_free[source], destination),
            (settings.line_mbit_s, self._line_down_free, destination),
        )
        leaves, free_at = now, []
        for rate, free, index in wires:
            if rate:
                start = max(leaves, free[index])
                if start - leaves > QUEUE_LIMIT_S:
                    return None
                leaves = start + megabits / rate
                free_at.append((free, index, leaves))
        for free, index, at in free_at:
            free[index] = at
        return leaves

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Every (destination, packet) whose time has come, in order."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, destination, packet = heapq.heappop(self._waiting)
            yield destination, packet

    def next_due(self) -> float | None:
        """When the next packet is due."""
        return self._waiting[0][0] if self._waiting else None


# -- hosts: namespaces with a TUN device each


def run(*command: str, stdin: str | None = None) -> None:
    done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=False)
    if done.returncode:
        raise WanError(f"`{' '.join(command)}` failed: {done.stderr.strip() or f'exit status {done.returncode}'}")


def missing(*, nat: bool) -> str | None:
    """What this machine lacks for an emulated network, or None when it has all."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "it needs Linux and root"
    for program, package in (("ip", "iproute2"), ("nft", "nftables")) if nat else (("ip", "iproute2"),):
        if shutil.which(program) is None:
            return f"it needs the program {program} (Debian package {package})"
    if not Path("/dev/net/tun").exists():
        return "it needs /dev/net/tun"
    return None


class Hosts:
    """The namespaces of one prefix and the TUN device of each, by host number."""

    def __init__(self, prefix: str, count: int, nat: dict[int, str]) -> None:
        self.prefix = prefix
        self.tun: list[int] = []
        try:
            self.remove()
            for host in range(count):
                self.tun.append(self._build(host, nat.get(host)))
        except BaseException:
            self.remove()
            raise

    def name(self, host: int) -> str:
        return f"{self.prefix}{host}"

    def remove(self) -> None:
        for descriptor in self.tun:
            os.close(descriptor)
        self.tun = []
        for host in range(MAX_HOSTS):
            for name in (self.name(host), f"{self.name(host)}r"):
                if (NAMESPACES / name).exists():
                    with contextlib.suppress(WanError):
                        run("ip", "netns", "del", name)

    def _build(self, host: int, nat: str | None) -> int:
        edge = self.name(host)
        run("ip", "netns", "add", edge)
        run("ip", "-n", edge, "link", "set", "lo", "up")
        if nat is not None:
            edge = self._build_router(host, nat)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        device = f"{self.prefix}w{host}"
        try:
            fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
            run("ip", "link", "set", device, "netns", edge)
            run("ip", "-n", edge, "link", "set", device, "name", "wan0")
            run("ip", "-n", edge, "addr", "add", f"10.99.0.{host + 1}/24", "dev", "wan0")
            run("ip", "-n", edge, "link", "set", "wan0", "mtu", "1500", "txqueuelen", "10000", "up")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _build_router(self, host: int, nat: str) -> str:
        """Put the host behind a router of its own; returns the router's namespace."""
        inside, router = self.name(host), f"{self.name(host)}r"
        ends = {inside: (f"{self.prefix}l{host}", 2), router: (f"{self.prefix}r{host}", 1)}
        run("ip", "netns", "add", router)
        run("ip", "-n", router, "link", "set", "lo", "up")
        (inner, _), (outer, _) = ends.values()
        run("ip", "link", "add", inner, "netns", inside, "type", "veth", "peer", "name", outer, "netns", router)
        for namespace, (device, last_byte) in ends.items():
            run("ip", "-n", namespace, "link", "set", device, "name", "lan0")
            run("ip", "-n", namespace, "addr", "add", f"192.168.{host + 1}.{last_byte}/24", "dev", "lan0")
            run("ip", "-n", namespace, "link", "set", "lan0", "up")
        run("ip", "-n", inside, "route", "add", "default", "via", f"192.168.{host + 1}.1")
        run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        rules = ROUTER_RULES.format(masquerade=MASQUERADE[nat])
        run("ip", "netns", "exec", router, "nft", "-f", "-", stdin=rules)
        return router


# -- the loop and its control socket


def control_address(prefix: str) -> str:
    return f"\0meshswarm-wan-{prefix}"  # an abstract socket: it goes when its process goes


def obey(links: Links, request: bytes) -> bytes:
    """Carry out one control message; the answer is the counters, or an error."""
    message = json.loads(request)
    if message["do"] == "set":
        links.settings = links.settings.changed(message)
    elif message["do"] in ("cut", "heal"):
        if not 0 <= message["host"] < links.hosts:
            return json.dumps({"error": f"there is no host {message['host']}"}).encode()
        (links.unplugged.add if message["do"] == "cut" else links.unplugged.discard)(message["host"])
    return json.dumps(asdict(links.counters)).encode()


def open_control(prefix: str) -> socket.socket:
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        control.bind(control_address(prefix))
    except OSError:
        control.close()
        raise WanError(f"a network is already up under the prefix {prefix!r}; give this one another --prefix") from None
    control.setblocking(False)
    return control


def forward(links: Links, hosts: Hosts, control: socket.socket) -> None:
    """Forward packets and obey the control socket, for ever."""
    selector = selectors.DefaultSelector()
    for host, descriptor in enumerate(hosts.tun):
        selector.register(descriptor, selectors.EVENT_READ, host)
    selector.register(control, selectors.EVENT_READ, None)
    names = f"{hosts.name(0)} to {hosts.name(links.hosts - 1)}"
    print(f"wan: {links.hosts} hosts up, {names}, from 10.99.0.1 on", flush=True)
    while True:
        deliver(links, hosts)
        due = links.next_due()
        # The selector sleeps whole milliseconds: spin through the last one, or every hop gains up to 1 ms.
        timeout_s = None if due is None else max(0.0, due - time.monotonic() - 0.001)
        for key, _ in selector.select(timeout_s):
            if key.data is None:
                request, sender = control.recvfrom(65536)
                with contextlib.suppress(OSError):  # it may have gone
                    control.sendto(obey(links, request), sender)
            else:
                take_in(links, key.data, key.fd)


def deliver(links: Links, hosts: Hosts) -> None:
    for destination, packet in links.due(time.monotonic()):
        try:
            os.write(hosts.tun[destination], packet)
        except BlockingIOError:
            links.counters.overflow += 1
        else:
            links.counters.forwarded += 1
            links.counters.bytes += len(packet)


def take_in(links: Links, host: int, descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # then see to the others
            links.send(host, os.read(descriptor, 65536), time.monotonic())


def ask(prefix: str, message: dict[str, Any]) -> dict[str, Any]:
    """Send a control message to the network of `prefix`; returns its counters."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        client.bind(f"{control_address(prefix)}-{os.getpid()}")
        client.settimeout(5)
        try:
            client.sendto(json.dumps(message).encode(), control_address(prefix))
            answer: dict[str, Any] = json.loads(client.recv(65536))
        except (ConnectionRefusedError, TimeoutError):
            raise WanError(f"no network is up under the prefix {prefix!r}") from None
    if "error" in answer:
        raise WanError(str(answer["error"]))
    return answer


# -- the command line


def parse_matrix(text: str) -> tuple[tuple[float, ...], ...]:
    rows = tuple(tuple(float(cell) for cell in row.split(",")) for row in text.split(";"))
    if any(len(row) != len(rows) for row in rows):
        raise argparse.ArgumentTypeError("it must be square: one row per host, rows separated by ;")
    return rows


def parse_nat(text: str) -> tuple[int, str]:
    host, _, kind = text.partition("=")
    if not host.isdigit() or kind not in MASQUERADE:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST=cone or HOST=symmetric")
    return int(host), kind


def parse_prefix(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9-]{0,9}[A-Za-z-])?", text):  # a final digit would run into host numbers
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 11 letters, digits or hyphens, and not end in a digit")
    return text


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=parse_prefix, default="ms", help="names of the namespaces (default: ms)")
    commands = parser.add_subparsers(dest="do", required=True)
    up = commands.add_parser("up")
    up.add_argument("--hosts", type=int, required=True)
    up.add_argument("--rtt", type=float, default=0.0, metavar="MS")
    up.add_argument("--rtt-matrix", type=parse_matrix, metavar="MS,MS;MS,MS")
    up.add_argument("--jitter", type=float, default=0.0, metavar="MS")
    up.add_argument("--loss", type=float, default=0.0, metavar="PERCENT")
    up.add_argument("--rate", type=float, default=0.0, metavar="MBIT", help="per direction of a link; 0: no limit")
    up.add_argument("--line", type=float, default=0.0, metavar="MBIT", help="per direction of a host; 0: no limit")
    up.add_argument("--nat", type=parse_nat, action="append", default=[], metavar="HOST=cone|symmetric")
    up.add_argument("--seed", type=int, default=0)
    change = commands.add_parser("set")
    names = {
        "rtt": "rtt_ms",
        "jitter": "jitter_ms",
        "loss": "loss_percent",
        "rate": "rate_mbit_s",
        "line": "line_mbit_s",
    }
    for option, name in names.items():
        change.add_argument(f"--{option}", dest=name, type=float, default=argparse.SUPPRESS)
    for name in ("cut", "heal"):
        commands.add_parser(name).add_argument("host", type=int)
    commands.add_parser("stats")
    execute = commands.add_parser("exec")
    execute.add_argument("host", type=int)
    execute.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(arguments)


def bring_up(options: argparse.Namespace) -> None:
    if not 1 <= options.hosts <= MAX_HOSTS:
        raise WanError(f"--hosts must be 1 to {MAX_HOSTS}")
    rtt_ms = options.rtt_matrix or same_rtt(options.hosts, options.rtt)
    if len(rtt_ms) != options.hosts:
        raise WanError(f"--rtt-matrix must be {options.hosts} by {options.hosts}")
    if (lack := missing(nat=bool(options.nat))) is not None:
        raise WanError(f"no emulated network here: {lack}")
    links = Links(LinkSettings(rtt_ms, options.jitter, options.loss, options.rate, options.line), options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    control = open_control(options.prefix)  # first: it shows whether somebody else's network has these names
    hosts = Hosts(options.prefix, options.hosts, dict(options.nat))
    try:
        forward(links, hosts, control)
    except KeyboardInterrupt:
        pass
    finally:
        hosts.remove()


def main() -> None:
    options = parse_arguments(None)
    try:
        if options.do == "up":
            bring_up(options)
        elif options.do == "exec":
            command = options.command[1:] if options.command[:1] == ["--"] else options.command
            os.execvp("ip", ["ip", "netns", "exec", f"{options.prefix}{options.host}", *command])
        else:
            message = {name: value for name, value in vars(options).items() if name != "prefix"}
            print(json.dumps(ask(options.prefix, message)))
    except WanError as error:
        sys.exit(f"wan: {error}")


if __name__ == "__main__":
    main()
