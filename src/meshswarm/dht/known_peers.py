"""The peers of last time, as plain JSON signed with this peer's own key: whom to ask first at the next start.

The rule this file keeps: the file is a hint that only this peer may have written, about this swarm. One that somebody
changed, or that belongs to another peer or swarm, is refused with a sentence and never keeps a peer from starting; it
is written whole or not at all; and who was met once is forgotten only for somebody met later, or after a long time.
However many a stranger has this peer meet, those of one network have a share, and those of earlier times keep theirs.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshswarm.config import Address
from meshswarm.dht.networks import network_of
from meshswarm.dht.wire import MAX_ADDRESSES
from meshswarm.errors import LocalError
from meshswarm.identity import Identity, PeerId

MAX_KNOWN_PEERS = 64  # that are named to other parts of the program
MAX_SAVED = 128
MAX_SAVED_OF_NETWORK = 8
MIN_EARLIER = MAX_SAVED // 4  # places of those met before, when so many were
MAX_AGE_S = 180 * 86400.0
_MAX_FILE_BYTES = 256 * 1024
_VERSION = 2
_PURPOSE = "known-peers"

KnownPeer = tuple[PeerId, tuple[Address, ...]]

logger = logging.getLogger(__name__)


class KnownPeersError(LocalError):
    """The file of known peers cannot be used."""


@dataclass(frozen=True, slots=True)
class SeenPeer:
    """A peer that proved its key at one of `addresses`, best first. `last_s`: when it was last heard, Unix time."""

    peer: PeerId
    addresses: tuple[Address, ...]
    last_s: float


class KnownPeers:
    """The file of the peer `identity` in the swarm `swarm_id`; it lies beside `path`, with the swarm in its name."""

    def __init__(self, path: Path, identity: Identity, swarm_id: bytes) -> None:
        self.path = path.with_name(f"{path.stem}-{swarm_id[:8].hex()}{path.suffix}")
        self._identity = identity
        self._swarm_id = swarm_id

    def load(self, now_s: float) -> list[SeenPeer]:
        """The best first, as they were saved; none when there is no such file. Raises KnownPeersError for one that is
        not this peer's own, or that cannot be read."""
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError("it is far too large")
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            seen = self._read(saved)
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise KnownPeersError(f"the known peers in {self.path} are ignored: {_reason(error)}") from None
        recent = [SeenPeer(each.peer, each.addresses, min(each.last_s, now_s)) for each in seen]
        return [each for each in recent if now_s - each.last_s <= MAX_AGE_S]

    def save(self, met: Iterable[SeenPeer], now_s: float) -> None:
        """Puts `met`, the best first, before those that are there. When that fails, there is a warning and the old file
        stays."""
        try:
            earlier = self.load(now_s)
        except KnownPeersError:
            earlier = []
        entries = [
            {"peer": str(each.peer), "addresses": [str(address) for address in each.addresses], "last_s": each.last_s}
            for each in _chosen(met, earlier)
        ]
        body = {"version": _VERSION, "swarm": self._swarm_id.hex(), "peers": entries}
        signature = self._identity.sign(_PURPOSE, _signed(body)).hex()
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps({**body, "signature": signature}, indent=1), encoding="utf-8")
            temporary.replace(self.path)
        except OSError as error:
            logger.warning("the known peers could not be saved to %s: %s", self.path, error.strerror or error)
            temporary.unlink(missing_ok=True)

    def _read(self, saved: Any) -> list[SeenPeer]:
        if not isinstance(saved, dict) or saved.get("version") != _VERSION:
            raise ValueError("it has another form")
        body = {name: value for name, value in saved.items() if name != "signature"}
        if not self._identity.peer_id.verify(_PURPOSE, _signed(body), bytes.fromhex(saved["signature"])):
            raise ValueError("this peer did not write it, or somebody changed it since")
        if body["swarm"] != self._swarm_id.hex():
            raise ValueError("it is about another swarm")
        return [_entry(entry) for entry in body["peers"][:MAX_SAVED]]


def _chosen(met: Iterable[SeenPeer], earlier: Iterable[SeenPeer]) -> list[SeenPeer]:
    """Those worth the places there are."""
    of_network: Counter[bytes] = Counter()

    def shared(peers: Iterable[SeenPeer]) -> Iterator[SeenPeer]:
        for each in peers:
            network = network_of(each.addresses[0]) if each.addresses else None
            if network is not None:
                of_network[network] += 1
            if each.addresses and (network is None or of_network[network] <= MAX_SAVED_OF_NETWORK):
                yield each

    now = {each.peer: each for each in shared({each.peer: each for each in met}.values())}
    before = list(shared(each for each in earlier if each.peer not in now))
    n_now = MAX_SAVED - min(len(before), max(MIN_EARLIER, MAX_SAVED - len(now)))
    return [*list(now.values())[:n_now], *before][:MAX_SAVED]


def _entry(entry: Any) -> SeenPeer:
    addresses = tuple(Address.parse(text) for text in entry["addresses"][:MAX_ADDRESSES])
    if not addresses:
        raise ValueError("no addresses")
    return SeenPeer(PeerId.parse(entry["peer"]), addresses, float(entry["last_s"]))


def _signed(body: dict[str, Any]) -> bytes:
    """The same bytes for the same content, however it is laid out in the file."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if type(error) is ValueError else "it is damaged"
