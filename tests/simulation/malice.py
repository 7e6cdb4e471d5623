"""Peers that lie: kinds of answers an honest peer would never give, put in place of its handlers.

They are members of the swarm with keys of their own, answer in good form and in time, and work together. The rule this
file keeps: a liar may say anything, but not in another's name: it cannot sign for others, nor answer at their address.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

from tests.simulation.network import Answerer
from tests.simulation.peers import Peer

from meshswarm.dht import messages
from meshswarm.dht.contact import Contact
from meshswarm.dht.keys import distance, node_id
from meshswarm.dht.messages import FIND, STORE, StoreAnswer, StoreStatus
from meshswarm.identity import Identity, PeerId

_GRINDS = 60


class Malice(Enum):
    """POISON: invented contacts that seem near, and forged, altered and foreign records. COLLUDE: names only its own
    kind, knows of no record, and forgets what it is given to keep while saying that it keeps it. SWALLOW: answers well,
    but forgets and hides records."""

    POISON = "poison"
    COLLUDE = "collude"
    SWALLOW = "swallow"


def corrupt(peers: Sequence[Peer], malice: Malice, fellows: Iterable[Peer] = ()) -> None:
    """Turns `peers` into liars. `fellows`: whom those that collude name, themselves included by default."""
    known = [peer.contact for peer in ([*fellows] or peers)]
    for peer in peers:
        handlers = peer.endpoint.handlers
        handlers[FIND] = _finder(peer, malice, known, handlers[FIND])
        if malice is not Malice.POISON:
            handlers[STORE] = _forgetter(peer)


def grind(target: bytes, seed: bytes, *, closer_than: int, tries: int = 200_000) -> Identity | None:
    """A key whose place is nearer to `target` than `closer_than` (an XOR distance), as an attacker makes it."""
    for number in range(tries):
        identity = Identity.from_seed(number.to_bytes(8) + seed[8:])
        if distance(node_id(identity.peer_id), target) < closer_than:
            return identity
    return None


def _finder(peer: Peer, malice: Malice, known: Sequence[Contact], honest: Answerer) -> Answerer:
    rng = peer.network.rng

    async def answer(asker: PeerId, data: bytes) -> bytes:
        found = messages.decode_found(await honest(asker, data))
        keys = messages.decode_find(data).keys
        if malice is Malice.POISON:
            invented = tuple(Contact(_invented(rng.choice(keys), rng.randbytes(8)), (peer.endpoint.address,))
                             for _ in range(20))  # fmt: skip
            lies = replace(found, contacts=invented, records=tuple(_spoilt(record, rng.randrange(2**30))
                           for record in found.records))  # fmt: skip
        elif malice is Malice.COLLUDE:
            named = {c.peer: c for key in keys
                     for c in sorted(known, key=lambda c, k=key: distance(c.node_id, k))[:20]}  # fmt: skip
            named.pop(asker, None)
            lies = replace(found, contacts=tuple(named.values())[: messages.MAX_CONTACTS], records=())
        else:
            lies = replace(found, records=())
        return messages.encode_found(lies)

    return answer


def _forgetter(peer: Peer) -> Answerer:
    async def answer(asker: PeerId, data: bytes) -> bytes:
        question = messages.decode_store(data)
        statuses = tuple((StoreStatus.STORED,) * len(keys) for _, keys in question.items)
        return messages.encode_stored(StoreAnswer(peer.dht._core.sender, statuses))

    return answer


def _invented(key: bytes, salt: bytes) -> PeerId:
    """Nobody, but nearer to `key` than most who are somebody."""
    tries = (PeerId(salt + number.to_bytes(24)) for number in range(_GRINDS))
    return min(tries, key=lambda peer: distance(_place(peer), key))


def _place(peer: PeerId) -> bytes:
    return bytes(node_id.__wrapped__(peer))  # not remembered: there is no end to them


def _spoilt(record: bytes, at: int) -> bytes:
    """The record with one bit changed, somewhere."""
    at %= len(record) * 8
    changed = bytearray(record)
    changed[at // 8] ^= 1 << at % 8
    return bytes(changed)
