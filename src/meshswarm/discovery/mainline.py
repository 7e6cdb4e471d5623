"""A rendezvous on BitTorrent's mainline DHT (BEP 5), through libtorrent: millions of nodes that are none of ours.

A peer announces its port there under hashes that follow from its swarm and change every day, and looks up who else did.
What comes back are addresses and nothing more. Out there the node only asks (BEP 43, read-only): nobody asks it.
The rule this file keeps: nothing of BitTorrent but the DHT: no torrents, no trackers, no local discovery, no mapped
ports; and nothing here waits in the event loop, where libtorrent's alerts arrive through a file descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from meshswarm.config import Address, packed_host
from meshswarm.discovery.candidate import Candidate, Source, SourceError
from meshswarm.discovery.dht_nodes import load_nodes, save_nodes, unpack_nodes
from meshswarm.net.swarm import Swarm

ROUND_S = 12.0
ASK_AT_S = (0.0, 2.0, 5.0, 9.0)  # within a round: the first nodes take a while to be found, and answers get lost
BOOTSTRAP_S = 1.0
MEASURE_S = 1.0
SILENCE_S = 6.0  # when not one node has answered by then, none will in this round
MAX_PER_ROUND = 64
SILENT = "no node of the DHT has answered; is UDP to the internet blocked?"
QUIET: dict[str, Any] = {
    "enable_dht": True,
    "dht_read_only": True,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_tcp": False,
    "enable_outgoing_tcp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "dht_upload_rate_limit": 4000,
    "user_agent": "",
    "alert_queue_size": 2000,
}
CLOSED_NETWORK: dict[str, Any] = {
    "dht_read_only": False,
    "dht_restrict_routing_ips": False,
    "dht_restrict_search_ips": False,
    "dht_ignore_dark_internet": False,
    "dht_prefer_verified_node_ids": False,
    "dht_block_ratelimit": 1000,  # packets a second from one address, which may be that of many nodes
}
"""Where nodes are named by hand they may be few and share an address or a subnet, and this one is a full node too."""


class MainlineSource:
    """`port`: where peers are to dial this one. `host`: the address its socket is bound to. `nodes`: whom to start
    from in a closed network, instead of libtorrent's public ones. `remembered`: a file for nodes that answered, to
    start from next time. `clock`: Unix time."""

    source = Source.RENDEZVOUS

    def __init__(
        self,
        swarm: Swarm,
        host: str,
        port: int,
        *,
        nodes: Sequence[Address] = (),
        remembered: Path | None = None,
        announces: bool = True,
        patience_s: float = 4.0,  # of a start that waits for somebody to be found
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._swarm = swarm
        self._host = host
        self._port = port
        self._nodes = tuple(nodes)
        self._remembered = remembered
        self._announces = announces
        self.patience_s = patience_s
        self._clock = clock
        self._session: _Session | None = None

    @property
    def note(self) -> str:
        if self._session is None:
            return ""
        if not self._session.bytes_in:
            return SILENT
        n = self._session.n_nodes
        return f"{n} nodes known" if n > 1 else "the DHT answers"

    async def candidates(self) -> AsyncIterator[Candidate]:
        session = await self._open()
        loop = asyncio.get_running_loop()
        given: set[Address] = set()
        await session.bootstrapped(BOOTSTRAP_S)
        bytes_before = await session.measure()
        begun = loop.time()
        end = begun + ROUND_S
        asking = [begun + at for at in ASK_AT_S]
        while (now := loop.time()) < end and len(given) < MAX_PER_ROUND:
            if now >= begun + SILENCE_S and not given and await session.measure() == bytes_before:
                break
            if asking and now >= asking[0]:
                asking.pop(0)
                session.ask(self._swarm.rendezvous_hashes(self._clock()), self._port if self._announces else None)
            next_at = min(at for at in (*asking, begun + SILENCE_S, end) if at > now)
            for address in await session.found(next_at - now):
                if address not in given and len(given) < MAX_PER_ROUND and self._is_worth_a_dial(address):
                    given.add(address)
                    yield Candidate(None, (address,), Source.RENDEZVOUS)
        if await session.measure() == bytes_before:
            raise SourceError(SILENT)
        await self._remember(session)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _remember(self, session: _Session) -> None:
        if self._remembered is not None:
            await asyncio.to_thread(save_nodes, self._remembered, await session.nodes())

    async def _open(self) -> _Session:
        if self._session is None:
            try:
                earlier = [] if self._remembered is None else await asyncio.to_thread(load_nodes, self._remembered)
                self._session = await _Session.start(self._host, self._nodes, earlier)
            except ImportError:
                raise SourceError("the package libtorrent is not installed, so there is no rendezvous") from None
            except (OSError, RuntimeError) as error:
                raise SourceError(f"libtorrent cannot start: {error}") from None
        return self._session

    def _is_worth_a_dial(self, address: Address) -> bool:
        """Nobody on the internet may aim this peer at its own network; in a closed network they may be anywhere."""
        raw = packed_host(address.host)
        return raw is not None and address.port > 0 and (bool(self._nodes) or ipaddress.ip_address(raw).is_global)


class _Session:
    """libtorrent's session, as much of it as a rendezvous needs. Make one with `start`."""

    def __init__(self, session: Any, libtorrent: Any, earlier: Sequence[Address]) -> None:
        self.bytes_in = 0
        """What the DHT's nodes have sent, when last measured."""
        self._is_measured = asyncio.Event()
        self.n_nodes = 0
        self._session = session
        self._libtorrent = libtorrent
        self._earlier = earlier
        self._arrived: list[Address] = []
        self._change = asyncio.Event()
        self._is_bootstrapped = False
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        session.set_alert_fd(self._writer.fileno())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._drain)

    @classmethod
    async def start(cls, host: str, nodes: Sequence[Address], earlier: Sequence[Address] = ()) -> _Session:
        import libtorrent

        categories = libtorrent.alert.category_t
        listen = {"0.0.0.0": "0.0.0.0:0", "::": "0.0.0.0:0,[::]:0"}.get(
            host, f"[{host}]:0" if ":" in host else f"{host}:0"
        )
        settings: Any = {
            **QUIET,
            "listen_interfaces": listen,
            "alert_mask": categories.dht_operation_notification
            | categories.dht_notification
            | categories.error_notification
            | categories.stats_notification,
        }
        if nodes:
            settings |= CLOSED_NETWORK
            settings["dht_bootstrap_nodes"] = ",".join(map(str, nodes))
        parameters = libtorrent.session_params()
        parameters.settings = settings
        session = await asyncio.to_thread(libtorrent.session, parameters)
        return cls(session, libtorrent, earlier)

    async def nodes(self) -> list[Address]:
        """The nodes in its routing table: plain addresses, without the id that this one goes by."""
        return await asyncio.to_thread(_nodes_of, self._session, self._libtorrent)

    async def bootstrapped(self, timeout_s: float) -> None:
        """Waits until the first nodes have answered, or none has in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._is_bootstrapped:
                    await self._changed()

    async def measure(self) -> int:
        """`bytes_in` as it is now."""
        self._is_measured.clear()
        self._count()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_S):
                await self._is_measured.wait()
        return self.bytes_in

    def ask(self, hashes: Sequence[bytes], port: int | None) -> None:
        """Looks up who is under `hashes`, and puts `port` there unless it is None; then the look-up is part of that."""
        if not self.bytes_in:
            for node in self._earlier:  # not sooner: libtorrent takes none before it has looked up where to start
                self._session.add_dht_node((node.host, node.port))
        for each in hashes:
            target = self._libtorrent.sha1_hash(each)
            if port is None:
                self._session.dht_get_peers(target)
            else:
                self._session.dht_announce(target, port, 0)  # not implied_port: that is libtorrent's own
        self._loop.call_later(MEASURE_S, self._count)  # for who wants to know meanwhile

    async def found(self, timeout_s: float) -> list[Address]:
        """Who was found since the last call; waits for somebody."""
        if not self._arrived:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, timeout_s)):
                    await self._changed()
        arrived, self._arrived = self._arrived, []
        return arrived

    async def close(self) -> None:
        """The session ends on a thread: it says goodbye to nobody, but takes a moment."""
        self._loop.remove_reader(self._reader)
        session, self._session = self._session, None
        await asyncio.to_thread(_end, [session], self._writer)
        self._reader.close()

    def _count(self) -> None:
        if self._session is not None:
            self._session.post_session_stats()

    async def _changed(self) -> None:
        self._change.clear()
        await self._change.wait()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        lt = self._libtorrent
        for alert in self._session.pop_alerts():
            match alert:
                case lt.dht_get_peers_reply_alert():
                    for host, port in alert.peers():
                        with contextlib.suppress(ValueError):
                            self._arrived.append(Address(host, port))
                    del self._arrived[: -10 * MAX_PER_ROUND]
                case lt.dht_bootstrap_alert():
                    self._is_bootstrapped = True
                case lt.session_stats_alert():
                    self.bytes_in = alert.values["dht.dht_bytes_in"]
                    self._is_measured.set()
                    self.n_nodes = alert.values["dht.dht_nodes"]
        self._change.set()


def _nodes_of(session: Any, libtorrent: Any) -> list[Address]:
    flag = libtorrent.save_state_flags_t.save_dht_state
    saved = libtorrent.bdecode(libtorrent.write_session_params_buf(session.session_state(flag), flag))
    state = saved.get(b"dht state", {})
    return unpack_nodes([*state.get(b"nodes", []), *state.get(b"nodes6", [])])


def _end(only_reference: list[Any], writer: socket.socket) -> None:
    """Lets the session go where its end may take its time; its alert descriptor must outlive it."""
    only_reference.clear()
    writer.close()
