"""Whose round trip is worth measuring before a route is chosen.

A peer nobody has measured is taken to be far. It may be near: what it would save at no distance at all, over the tokens
of an answer, is weighed against what it costs to ask.

The rule this file keeps: nobody is asked who could not be chosen whatever the answer, and a request never asks more
than `MAX_PROBES` peers at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshswarm.dht.records import CoverageRecord
from meshswarm.identity import PeerId
from meshswarm.routing.cost import DEFAULT_RTT_S, unmeasured
from meshswarm.routing.planner import Planning, Situation

MAX_PROBES = 8
PROBE_S = 3 * DEFAULT_RTT_S
"""What it costs to ask a stranger: a handshake, and one round trip, as far away as a stranger is taken to be."""


def worth_probing(
    planning: Planning, records: Sequence[CoverageRecord], situation: Situation, n_tokens: int
) -> list[PeerId]:
    """The peers to measure before an answer of `n_tokens` goes through the best route of `planning`, which was made of
    these records in this situation."""
    unknown = unmeasured(records, situation.head, situation.rtt_s)
    if not unknown:
        return []
    best_s = planning.routes[0].predicted_tpot_s

    def hoped(head: PeerId, peer: PeerId) -> float | None:
        return 0.0 if peer in unknown else situation.rtt_s(head, peer)

    hopeful = Planning.of(planning.n_layers, records, replace(situation, rtt_s=hoped))
    chosen: dict[PeerId, None] = {}
    for route in hopeful.routes:
        if (best_s - route.predicted_tpot_s) * n_tokens > PROBE_S:
            chosen.update(dict.fromkeys(hop.peer for hop in route.hops if hop.peer in unknown))
    return list(chosen)[:MAX_PROBES]
