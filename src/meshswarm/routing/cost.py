"""What a route costs: the predicted time of one token, from measured speeds and measured round trips.

The rule this file keeps: every number is a whole count of nanoseconds, so that sums do not depend on their order and
equal routes are equal. Latency is directed: a token crosses each link once, in half its round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from meshswarm.dht.records import RTT_PREFIX_BYTES, CoverageRecord
from meshswarm.identity import PeerId

HOP_S = 1.0e-3
"""What a hop to another peer costs beyond compute and distance: one frame through QUIC, and the hand-over to the
engine's thread and back. A first prototype spent 1.9 ms a token on two such hops; `scripts/bench` measures today's."""

LOCAL_HOP_S = 0.1e-3
"""The same for layers in the head's own process: only the hand-over to the engine's thread and back."""

DEFAULT_RTT_S = 0.1
"""The round trip to a peer nobody has measured yet: far enough that a measured neighbour is preferred."""

RttOf = Callable[[PeerId, PeerId], float | None]


class CostModel:
    """Costs between `records`, in ns. Positions in `records` name the peers.

    `rtt_s(head, peer)`: what the head measured itself, None when it has not; only asked for pairs with the head. Other
    pairs come from the records: when both ends tell a round trip the longer one counts, so that no peer can make itself
    look near on its own. A pair nobody measured is bounded by the triangle inequality: at most the way over the head.
    `queue_s`: how long a step is expected to wait at a peer before its turn. `sessions`: how many others the head has
    at a peer, whose steps share turns with this one's.
    """

    def __init__(
        self,
        records: Sequence[CoverageRecord],
        *,
        head: PeerId,
        rtt_s: RttOf,
        queue_s: Mapping[PeerId, float],
        sessions: Mapping[PeerId, int] = MappingProxyType({}),
    ) -> None:
        head_claims_us = _head_claims_us(records, head)
        self.layer_ns = [round(turn_us(record, 1 + sessions.get(record.peer, 0)) * 1000) for record in records]
        self.half_rtt_ns = [_half_head_ns(record.peer, head, rtt_s, head_claims_us) for record in records]
        """The way from or to the head."""
        self.hop_ns = [_ns(LOCAL_HOP_S if record.peer == head else HOP_S) for record in records]
        self.queue_ns = [_ns(max(0.0, queue_s.get(record.peer, 0.0))) for record in records]
        self.measured_ns = _measured_ns(records, head)
        """For each record the ways to other records that are known better than over the head."""

    def way_ns(self, source: int, target: int) -> int:
        """One way between two different records."""
        return self.measured_ns[source].get(target, self.half_rtt_ns[source] + self.half_rtt_ns[target])


def turn_us(record: CoverageRecord, n_rows: int) -> float:
    """Microseconds one layer takes for the decode rows of `n_rows` sessions together, between and beyond the figures
    of the record on straight lines. A peer that did not measure turns of several rows counts as if it had room for all;
    no turn is taken to be faster than a smaller one, whatever a record says."""
    known = [(1, record.us_per_layer)]
    for rows, us in ((4, record.us_per_layer_4), (16, record.us_per_layer_16)):
        if us:
            known.append((rows, max(us, known[-1][1])))
    if len(known) == 1 or n_rows <= 1:
        return record.us_per_layer
    at = next((position for position in range(1, len(known)) if n_rows <= known[position][0]), len(known) - 1)
    (rows_a, us_a), (rows_b, us_b) = known[at - 1 : at + 1]
    return us_a + (us_b - us_a) * (n_rows - rows_a) / (rows_b - rows_a)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _head_claims_us(records: Sequence[CoverageRecord], head: PeerId) -> dict[PeerId, int]:
    """The longest round trip told between the head and each peer, by either of them."""
    by_prefix = {_prefix(record.peer): record.peer for record in records}
    claims: dict[PeerId, int] = {}
    for record in records:
        for prefix, rtt_us in record.rtts:
            peer = by_prefix.get(prefix) if record.peer == head else record.peer if prefix == _prefix(head) else None
            if peer is not None:
                claims[peer] = max(claims.get(peer, 0), rtt_us)
    return claims


def _half_head_ns(peer: PeerId, head: PeerId, rtt_s: RttOf, claims_us: dict[PeerId, int]) -> int:
    if peer == head:
        return 0
    measured_s = rtt_s(head, peer)
    if measured_s is None:
        measured_s = claims_us[peer] / 1e6 if peer in claims_us else DEFAULT_RTT_S
    return _ns(max(0.0, measured_s) / 2)


def _measured_ns(records: Sequence[CoverageRecord], head: PeerId) -> list[dict[int, int]]:
    at: dict[bytes, list[int]] = {}
    for position, record in enumerate(records):
        at.setdefault(_prefix(record.peer), []).append(position)
    head_prefix = _prefix(head)
    measured: list[dict[int, int]] = [{} for _ in records]
    for source, record in enumerate(records):
        if record.peer == head:
            continue
        ways = measured[source]
        for prefix, rtt_us in record.rtts:
            if prefix == head_prefix:
                continue
            for target in at.get(prefix, ()):
                way_ns = max(rtt_us * 500, ways.get(target, 0))
                ways[target] = measured[target][source] = way_ns
    for together in at.values():  # one peer's own spans
        for source in together:
            measured[source].pop(source, None)
            measured[source].update({target: 0 for target in together if target != source})
    return measured


def _prefix(peer: PeerId) -> bytes:
    return peer.key[:RTT_PREFIX_BYTES]
