"""What a route costs: the predicted time of one token, from measured speeds and measured round trips.

What this head measured itself outranks what peers say; what nobody measured is assumed, and `Basis` tells which it was.

The rule this file keeps: every number is a whole count of nanoseconds, so that sums do not depend on their order and
equal routes are equal. Latency is directed: a token crosses each link once, in half its round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
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


class Basis(Enum):
    """Who says how far two peers are apart."""

    OWN = "the same peer"
    HERE = "measured here"
    BOTH = "told by both, the longer counts"
    ONE = "told by one of them"
    OVER_HEAD = "not measured: as far as the way over this peer"
    ASSUMED = "not measured by anybody: assumed"


class CostModel:
    """Costs between `records`, in ns. Positions in `records` name the peers.

    `rtt_s(head, peer)`: what the head measured itself, None when it has not; only asked for pairs with the head. Other
    pairs come from the records: when both ends tell a round trip the longer one counts, so that no peer can make itself
    look near on its own. A pair nobody measured is bounded by the triangle inequality: at most the way over the head.
    `queue_s`: how long a step is expected to wait at a peer before its turn. `sessions`: how many others the head has
    at a peer, whose steps share turns with this one's. `measured_us`: what a lone row turned out to take in a layer of
    a peer, whatever it says.
    """

    def __init__(
        self,
        records: Sequence[CoverageRecord],
        *,
        head: PeerId,
        rtt_s: RttOf,
        queue_s: Mapping[PeerId, float],
        sessions: Mapping[PeerId, int] = MappingProxyType({}),
        measured_us: Mapping[PeerId, float] = MappingProxyType({}),
    ) -> None:
        head_claims_us = _head_claims_us(records, head)
        self.layer_ns = [
            round(layer_us(record, 1 + sessions.get(record.peer, 0), measured_us.get(record.peer)) * 1000)
            for record in records
        ]
        ways = [_head_way(record.peer, head, rtt_s, head_claims_us) for record in records]
        self.half_rtt_ns = [half_ns for half_ns, _ in ways]
        """The way from or to the head."""
        self.head_basis = [basis for _, basis in ways]
        """Who says so."""
        numbers: dict[PeerId, int] = {}
        self.peer_ids = [numbers.setdefault(record.peer, len(numbers)) for record in records]
        """A number for each peer, quicker to compare than its key."""
        self.hop_ns = [_ns(LOCAL_HOP_S if record.peer == head else HOP_S) for record in records]
        self.queue_ns = [_ns(max(0.0, queue_s.get(record.peer, 0.0))) for record in records]
        self.measured_ns = _measured_ns(records, head)
        """For each record the ways to other records that are known better than over the head."""

    def way_ns(self, source: int, target: int) -> int:
        """One way between two different records."""
        return self.measured_ns[source].get(target, self.half_rtt_ns[source] + self.half_rtt_ns[target])


def layer_us(record: CoverageRecord, n_rows: int, measured_us: float | None = None) -> float:
    """Microseconds one layer takes for a turn of `n_rows`. `measured_us`: what a lone row turned out to take, None
    where nobody saw it. Then weights that memory has no room for count as read again in every turn, as fast as the
    peer's disk gives them back; a peer whose own figure was taken while it paged is not charged twice."""
    us = turn_us(record, n_rows)
    if measured_us is not None:
        return us * measured_us / record.us_per_layer
    if not record.read_bytes_per_s:
        return us
    return max(us, record.paged_bytes / len(record.span) / record.read_bytes_per_s * 1e6)


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


def unmeasured(records: Sequence[CoverageRecord], head: PeerId, rtt_s: RttOf) -> set[PeerId]:
    """The peers whose distance from the head neither of them has measured."""
    claims = _head_claims_us(records, head)
    peers = {record.peer for record in records}
    return {peer for peer in peers if _head_way(peer, head, rtt_s, claims)[1] is Basis.ASSUMED}


def way_basis(records: Sequence[CoverageRecord], costs: CostModel, source: int, target: int) -> Basis:
    """Who says how far two different records are apart."""
    one, other = records[source], records[target]
    if one.peer == other.peer:
        return Basis.OWN
    if target not in costs.measured_ns[source]:
        return Basis.OVER_HEAD
    told = [_prefix(y.peer) in dict(x.rtts) for x, y in ((one, other), (other, one))]
    return Basis.BOTH if all(told) else Basis.ONE


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _head_claims_us(records: Sequence[CoverageRecord], head: PeerId) -> dict[PeerId, int]:
    """The longest round trip told between the head and each peer, by either of them."""
    claims: dict[PeerId, int] = {}
    head_prefix = _prefix(head)
    for record in records:
        if record.peer == head:
            by_prefix = {_prefix(other.peer): other.peer for other in records}
            told = [(by_prefix[prefix], us) for prefix, us in record.rtts if prefix in by_prefix]
        else:
            told = [(record.peer, us) for prefix, us in record.rtts if prefix == head_prefix]
        for peer, rtt_us in told:
            claims[peer] = max(claims.get(peer, 0), rtt_us)
    return claims


def _head_way(peer: PeerId, head: PeerId, rtt_s: RttOf, claims_us: Mapping[PeerId, int]) -> tuple[int, Basis]:
    """Half the round trip in ns, and who says so."""
    if peer == head:
        return 0, Basis.OWN
    measured_s = rtt_s(head, peer)
    if measured_s is not None:
        return _ns(max(0.0, measured_s) / 2), Basis.HERE
    if peer in claims_us:
        return _ns(claims_us[peer] / 1e6 / 2), Basis.ONE
    return _ns(DEFAULT_RTT_S / 2), Basis.ASSUMED


def _measured_ns(records: Sequence[CoverageRecord], head: PeerId) -> list[dict[int, int]]:
    at: dict[bytes, list[int]] = {}
    for position, record in enumerate(records):
        at.setdefault(_prefix(record.peer), []).append(position)
    own = at.pop(_prefix(head), [])
    measured: list[dict[int, int]] = [{} for _ in records]
    for source, record in enumerate(records):
        if source in own:
            continue
        ways = measured[source]
        for prefix, rtt_us in record.rtts:
            for target in at.get(prefix, ()):
                way_ns = rtt_us * 500
                if way_ns >= ways.get(target, 0):
                    ways[target] = measured[target][source] = way_ns
    for together in [*at.values(), own]:  # one peer's own spans
        for source in together:
            measured[source].pop(source, None)
            if len(together) > 1:
                measured[source].update({target: 0 for target in together if target != source})
    return measured


def _prefix(peer: PeerId) -> bytes:
    return peer.key[:RTT_PREFIX_BYTES]
