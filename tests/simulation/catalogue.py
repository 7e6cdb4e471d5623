"""What a simulated swarm serves: one large model that many share, and smaller ones.

The rule this file keeps: records are made and signed by the product, and stored by its own store at the peers that are
truly nearest to their keys, as if each had been published some minutes ago. Saying them again is then the product's
own affair.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.simulation.peers import Crowd, Peer, coverage_record

from meshswarm.dht.signed import RecordKind
from meshswarm.dht.upkeep import Periods
from meshswarm.span import Span

LARGE_LAYERS, LARGE_SPAN = 80, 10
SMALL_LAYERS = 32
REPUBLISH_S = Periods().republish_s
MAX_LARGE = 200


@dataclass(frozen=True, slots=True)
class Model:
    """A model's id and shape; `span_layers`: how many layers a peer takes, from and up to."""

    model_id: bytes
    n_layers: int
    span_layers: tuple[int, int]

    def random_span(self, rng: random.Random) -> Span:
        length = rng.randint(*self.span_layers)
        start = rng.randint(0, self.n_layers - length)
        return Span(start, start + length)


class Catalogue:
    """Some of the peers serve the large model, the others one of the small ones, `peers_per_model` each.

    Those of the large model are `large_share` of all, but no more than `MAX_LARGE`: a key keeps 64 records
    (`dht/storage.py`), and where more would belong under it, who comes last is not found under it."""

    def __init__(self, n_peers: int, *, large_share: float = 0.04, peers_per_model: int = 50) -> None:
        large_share = min(large_share, MAX_LARGE / n_peers)
        n_small = max(1, round(n_peers * (1 - large_share) / peers_per_model))
        self.large = Model(_model_id(0), LARGE_LAYERS, (LARGE_SPAN, LARGE_SPAN))
        self.small = [Model(_model_id(1 + number), SMALL_LAYERS, (6, 16)) for number in range(n_small)]
        self.large_share = large_share

    def pick(self, rng: random.Random) -> Model:
        """What somebody who comes now will serve."""
        return self.large if rng.random() < self.large_share else rng.choice(self.small)

    def n_layers(self, peer: Peer) -> int:
        """Of the model that `peer` serves."""
        assert peer.record is not None
        return next(model.n_layers for model in (self.large, *self.small) if model.model_id == peer.record.model_id)

    async def serve(self, peer: Peer) -> None:
        """`peer` publishes as a real one does."""
        rng = peer.network.rng
        model = self.pick(rng)
        await peer.serve(coverage_record(peer, model.model_id, model.random_span(rng)))

    def have_served(self, crowd: Crowd, peers: Iterable[Peer]) -> None:
        """`peers` have published some time within the last `REPUBLISH_S`."""
        nearest: dict[bytes, Sequence[Peer]] = {}
        rng = crowd.network.rng
        now = crowd.loop.unix_s()
        for peer in peers:
            model = self.pick(rng)
            peer.record = coverage_record(peer, model.model_id, model.random_span(rng))
            span, core = peer.record.span, peer.dht._core
            said_at = now - rng.uniform(0.0, REPUBLISH_S)
            layers = (span.start, span.stop)
            for record in core.publications.say(
                RecordKind.COVERAGE, model.model_id, peer.record.body(), said_at, layers=layers
            ):
                for key in core.topics.of_record(record):
                    if key not in nearest:
                        nearest[key] = crowd.nearest(key)
                    for keeper in nearest[key]:
                        keeper.dht._core.store.put(record, [key], now)


def _model_id(number: int) -> bytes:
    return hashlib.sha256(b"simulated model" + number.to_bytes(4)).digest()
