"""Finding who has pieces of a model, and bringing them together with its torrents.

The rule this file keeps: nobody is dialled that the swarm's owner has expelled or that sent wrong pieces before; pieces
are taken at the host where a holder's own connection was proved to come from; and who cannot be asked costs a moment
once, beside everything else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Collection, Sequence

from meshswarm.artifacts.merkle import check_piece_layer
from meshswarm.artifacts.torrent.content import Content
from meshswarm.artifacts.torrent.torrent import Torrent
from meshswarm.config import Address
from meshswarm.dht.holders import HolderRecord
from meshswarm.dht.networks import is_local
from meshswarm.dht.node import Dht
from meshswarm.errors import ArtifactError, MeshswarmError, PeerUnreachableError
from meshswarm.fetching.exchange import MAX_OTHERS, Pieces, all_of, ask_piece_layer, ask_pieces, in_words
from meshswarm.identity import PeerId
from meshswarm.net.connection import Connection
from meshswarm.net.endpoint import Endpoint
from meshswarm.net.swarm import Swarm

MAX_HOLDERS = 32
"""Asked at a time: more peers than that do not make a fetch faster."""
MAX_CONNECTIONS = 64
MAX_LINKS = 192
"""For one file, and for all files of a model together: a session has not more places, and the first files would have
them all."""
REACH_TIMEOUT_S = 3.0
DIAL_TIMEOUT_S = 5.0
GRACE_S = 0.5
"""How long the next answer is waited for once there is one."""


class Outlaws:
    """Peers whose pieces were wrong, for as long as this process lives."""

    def __init__(self) -> None:
        self._peers: set[PeerId] = set()

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._peers

    def add(self, peer: PeerId) -> bool:
        """Whether that is news."""
        is_new = peer not in self._peers
        self._peers.add(peer)
        return is_new


class Scout:
    """The holders of one model. `look` asks who they are and what they have; `join` connects torrents with them."""

    def __init__(
        self,
        endpoint: Endpoint,
        dht: Dht,
        swarm: Swarm,
        outlaws: Outlaws,
        model_id: bytes,
        contents: Sequence[Content],
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._rng = rng or random.Random()
        self._asking: dict[PeerId, asyncio.Task[None]] = {}
        self._endpoint = endpoint
        self._dht = dht
        self._swarm = swarm
        self._outlaws = outlaws
        self._model_id = model_id
        self._contents = contents
        self._where: dict[PeerId, Address] = {}  # of their torrent sessions
        self._others: dict[Address, None] = {}
        self._told: dict[PeerId, set[Address]] = {}  # of them, by each holder: no more than one answer has
        self._joined: dict[int, set[Address]] = {}  # by file
        self._turn = 0
        self.pieces: dict[PeerId, Pieces] = {}
        """What each holder that answered has."""
        self.silent: dict[PeerId, MeshswarmError] = {}
        """Why the others could not be asked."""
        self.n_servers = 0
        """Other peers that serve layers of the model, whether or not they give its files."""

    @property
    def n_holders(self) -> int:
        return len(self.pieces)

    def available(self, file: int) -> frozenset[int]:
        """The pieces of a file that some holder has."""
        content = self._contents[file]
        return frozenset().union(*(all_of(each.files[file], content) for each in self.pieces.values()))

    async def records(self) -> list[HolderRecord]:
        """Those that may be asked."""
        records = await self._dht.holders(self._model_id, fresh=True)
        return [
            record
            for record in records
            if record.peer != self._endpoint.peer_id
            and self._swarm.admits(record.peer)
            and record.peer not in self._outlaws
        ]

    async def look(self, torrent_port: int) -> None:
        """Ask holders what they have: those that answered before, those it is connected with, then any, whole ones
        first; whoever makes up a crowd of holders delays the honest ones and keeps none away. `torrent_port`: where
        this peer gives pieces to others, 0 for nowhere."""
        records = sorted(await self.records(), key=self._worth_asking)
        for record in with_newcomers(records, self.pieces.keys() | self.silent.keys()):
            if record.peer not in self._asking:
                self._asking[record.peer] = asyncio.create_task(self._ask(record, torrent_port))
        waiting = set(self._asking.values())
        while waiting:
            patience_s = GRACE_S if self.pieces else None
            done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                break  # somebody has answered; those that keep us waiting may still do so
        self._asking = {peer: task for peer, task in self._asking.items() if not task.done()}
        gone = {record.peer for record in records}
        for peer in [peer for peer in self.pieces if peer not in gone]:
            del self.pieces[peer]

    async def count_servers(self, n_layers: int) -> None:
        """See who serves the model. Raises MeshswarmError."""
        records = await self._dht.coverage(self._model_id, n_layers)
        self.n_servers = len({record.peer for record in records} - {self._endpoint.peer_id})

    async def close(self) -> None:
        """Wait for nobody's answer any more."""
        asking = list(self._asking.values())
        for asked in asking:
            asked.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _worth_asking(self, record: HolderRecord) -> tuple[bool, bool, bool, float]:
        """Sorts who is to be asked first."""
        is_strange = self._endpoint.connection(record.peer) is None
        return record.peer not in self.pieces, is_strange, not record.is_whole, self._rng.random()

    def join(self, torrents: Sequence[Torrent]) -> None:
        """Let torrents know where pieces may be had. Called again, it tells them of newcomers."""
        most = max(1, min(MAX_CONNECTIONS, MAX_LINKS // max(1, len(torrents))))
        for file, torrent in enumerate(torrents):
            joined = self._joined.setdefault(file, set())
            for address in self._in_turn(file):
                if len(joined) >= most:
                    break
                if address not in joined:
                    joined.add(address)
                    torrent.connect(address.host, address.port)

    def join_again(self) -> None:
        """Forget who was told of whom: connections may have ended. Where not all are joined, others have their turn."""
        self._joined.clear()
        self._turn += 1

    def _in_turn(self, file: int) -> list[Address]:
        """Where pieces of a file may be had: first those who say that they have some, for each file others of them."""
        has = [peer for peer in self._where if peer in self.pieces and self.pieces[peer].files[file] != frozenset()]
        at = (file + self._turn) % max(1, len(has))
        rest = [peer for peer in self._where if peer not in set(has)]
        return [*(self._where[peer] for peer in [*has[at:], *has[:at], *rest]), *self._others]

    def blame(self, torrents: Sequence[Torrent]) -> list[PeerId]:
        """Holders that torrents caught with wrong pieces, each told once; they are not asked again."""
        blamed = {(host, port) for torrent in torrents for host, port in torrent.blamed}
        caught = [peer for peer, address in self._where.items() if (address.host, address.port) in blamed]
        for host, port in blamed:
            self._others.pop(Address(host, port), None)
        for peer in caught:
            self._where.pop(peer, None)
            self.pieces.pop(peer, None)
        return [peer for peer in caught if self._outlaws.add(peer)]

    async def piece_layer(self, file: int) -> bytes:
        """A file's piece layer from the first holder that gives the right one. Raises ArtifactError, saying why nobody
        does."""
        content = self._contents[file]
        errors: list[MeshswarmError] = []
        for peer in list(self.pieces):
            try:
                connection = await self._endpoint.dial(peer)
                layer = await ask_piece_layer(connection, self._model_id, file, content)
                await asyncio.to_thread(check_piece_layer, content.length, content.root, content.piece_length, layer)
                return layer
            except MeshswarmError as error:
                errors.append(error)
        raise ArtifactError(f"no peer here gives the hashes of the model's pieces: {self.why_nobody(errors)}")

    def why_nobody(self, more: Sequence[MeshswarmError] = ()) -> str:
        """Why nothing comes, in words."""
        errors = [*more, *self.silent.values()]
        if errors or not self.n_servers:
            return in_words(errors) if errors else "nobody who holds it is known"
        serve = "1 peer serves it, but gives" if self.n_servers == 1 else f"{self.n_servers} peers serve it, but give"
        return (
            f"{serve} no files (--no-seed): get it another way (`meshswarm models import`, hf:OWNER/REPO/FILE.gguf, "
            "https://...), or start a peer that gives it"
        )

    async def unreachable(self) -> list[PeerId]:
        """Holders whose torrent port does not answer over TCP: behind a translator or a firewall, perhaps."""
        peers = list(self._where)
        reached = await asyncio.gather(*(_answers_tcp(self._where[peer]) for peer in peers))
        return [peer for peer, is_reached in zip(peers, reached, strict=True) if not is_reached]

    async def _ask(self, record: HolderRecord, torrent_port: int) -> None:
        peer = record.peer
        try:
            connection = await self._endpoint.dial(peer, record.addresses, timeout_s=DIAL_TIMEOUT_S)
            said = await ask_pieces(connection, self._model_id, self._contents, torrent_port)
        except MeshswarmError as error:
            self.silent[peer] = error
            self.pieces.pop(peer, None)
            if isinstance(error, PeerUnreachableError):
                self._dht.report_unreachable(peer)
            return
        self.silent.pop(peer, None)
        self.pieces[peer] = said
        self._learn(peer, connection, said)

    def _learn(self, peer: PeerId, connection: Connection, said: Pieces) -> None:
        """A holder is where its connection comes from, at the port it names."""
        here = connection.remote_address
        if said.torrent_port:
            self._where[peer] = Address(here.host, said.torrent_port)
        told = self._told.setdefault(peer, set())
        told.update(believable(here, said.others)[: max(0, MAX_OTHERS - len(told))])
        self._others.update(dict.fromkeys(told))


def with_newcomers(records: Sequence[HolderRecord], asked: Collection[PeerId]) -> list[HolderRecord]:
    """Whom of `records`, the likelier first, to ask now. Half of the places are for those that were not `asked` yet:
    however many holders answer and give nothing, every one has its turn."""
    new = [record for record in records if record.peer not in asked][: MAX_HOLDERS // 2]
    chosen = {record.peer for record in new}
    rest = [record for record in records if record.peer not in chosen]
    return rest[: MAX_HOLDERS - len(new)] + new


def believable(teller: Address, others: Sequence[Address]) -> list[Address]:
    """The addresses of others that a holder at `teller` may name: it must not aim this peer at a network that it is
    not in itself, nor at programs on this very machine."""
    return [other for other in others if _nearness(other) <= _nearness(teller)]


def _nearness(address: Address) -> int:
    """0: anywhere on the internet; 1: a local network; 2: one link; 3: this machine."""
    if not is_local(address):
        return 0
    ip = ipaddress.ip_address(address.host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return 3 if ip.is_loopback else 2 if ip.is_link_local else 1


async def _answers_tcp(address: Address) -> bool:
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
