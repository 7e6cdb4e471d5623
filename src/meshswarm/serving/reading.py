"""Reading who serves a model when nobody asks for an answer, and how often.

The rule this file keeps: the more strangers there are, the rarer. In a swarm of strangers, where each question needs a
new connection, one reading of an 80-layer model is about 2 MB (docs/scale.md).
"""

from __future__ import annotations

from collections.abc import Callable

from meshswarm.dht.known_peers import MAX_KNOWN_PEERS
from meshswarm.dht.node import Dht
from meshswarm.dht.records import CoverageRecord

READ_S = ((8, 0.0), (24, 120.0), (MAX_KNOWN_PEERS - 1, 300.0))
"""How many peers are known at most, and how many seconds then lie between two readings: each dials nearly all of them,
and what a peer sends in all is to stay under 4 KB/s."""
MANY_READ_S = 1200.0


def read_after_s(n_known: int) -> float:
    """Seconds between two readings where so many peers are known."""
    return next((after_s for n_most, after_s in READ_S if n_known <= n_most), MANY_READ_S)


class Holders:
    """Who serves layers of one model, as last read. `clock`: seconds that rise."""

    def __init__(self, dht: Dht, model_id: bytes, n_layers: int, clock: Callable[[], float]) -> None:
        self._dht = dht
        self._model_id = model_id
        self._n_layers = n_layers
        self._clock = clock
        self._records: list[CoverageRecord] = []
        self._read_at = float("-inf")

    async def read(self) -> list[CoverageRecord]:
        """Reads them unless that was done lately. Raises MeshswarmError."""
        if self._clock() - self._read_at >= read_after_s(len(self._dht.known_peers())):
            self._records = await self._dht.coverage(self._model_id, self._n_layers)
            self._read_at = self._clock()
        return self._records
