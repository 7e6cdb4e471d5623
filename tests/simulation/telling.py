"""What a serving peer sends besides the table's own traffic: the product's `LoadTeller` over gossip, and its readings.

The rule this file keeps: what is told, and when others of the model are read, the product decides; only the layers are
imagined. Readings are spread over their period, as those of peers that started at different times are.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from tests.simulation.peers import Peer

from meshswarm.serving.load import LoadTeller
from meshswarm.serving.reading import Holders, read_after_s


def tell(peer: Peer, n_layers: int, rng: random.Random, *, is_new: bool) -> Holders:
    """`peer` goes on saying what it does with its record, of a model of `n_layers`, and reading who else serves that.
    `is_new`: it has read nothing yet."""
    assert peer.gossip is not None and peer.record is not None
    record, clock = peer.record, peer.network.loop.time
    holders = Holders(peer.dht, record.model_id, n_layers, clock)
    if not is_new:
        holders._read_at = clock() - rng.uniform(0.0, read_after_s(len(peer.dht.known_peers())))
    serving: Any = SimpleNamespace(
        record=lambda: record,
        public_record=lambda: record,
        model=SimpleNamespace(model_id=record.model_id, n_layers=n_layers),
        holders=holders,
    )
    spans: Any = SimpleNamespace(sessions=(), n_parked=0, draining=False)
    teller = LoadTeller(peer.peer_id, peer.gossip, peer.dht, spans, lambda: serving, frozenset)
    peer.run(teller.run())
    return holders
