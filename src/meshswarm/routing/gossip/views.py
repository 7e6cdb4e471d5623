"""What this peer has heard of the swarm, for whoever wants to know: who is gone, busy, served, asked for.

The rule this file keeps: no one peer's claim counts for more than one peer can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.loads import Loads
from meshswarm.routing.gossip.meter import DemandMeter
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.standing import Standings
from meshswarm.routing.gossip.summaries import FRESH_S as SAID_S
from meshswarm.routing.gossip.summaries import Summaries
from meshswarm.routing.gossip.summary import Summary
from meshswarm.routing.gossip.told import Told, together

CREDIBLE_PER_S = 10.0  # requests a second of one peer's clients for one model; what it claims beyond counts for nothing


class Views:
    """`own`: this peer. `secret`: 16 bytes that nobody else knows. `knows`: whom it knows by more than gossip."""

    def __init__(self, own: PeerId, secret: bytes, knows: Callable[[PeerId], bool]) -> None:
        self.own = own
        self.meter = DemandMeter()
        self.standings = Standings(knows)
        self.loads = Loads()
        self.summaries = Summaries(secret)
        self._knows = knows

    def gone(self, now: float) -> frozenset[PeerId]:
        """Peers that are dead or have left."""
        return self.standings.gone(now)

    def draining(self, now: float) -> frozenset[PeerId]:
        """Peers that said they take nothing new."""
        return frozenset(report.peer for report in self.loads.fresh(now) if report.draining)

    def reports(self, now: float) -> dict[PeerId, LoadReport]:
        """Fresh reports of others that are not gone."""
        gone = self.gone(now)
        return {report.peer: report for report in self.loads.fresh(now) if report.peer not in gone}

    def coverage(self, model_id: bytes, now: float) -> Sequence[Summary]:
        return self.summaries.of(model_id, now)

    def told(self, model_id: bytes, n_layers: int, now: float) -> Told | None:
        """What a few peers that are known here say together of a model. None where too few speak of it, or where
        somebody who held layers of it has gone since: then it is not as they said."""
        gone = self.gone(now)
        served = (report.peer for report in self.loads.fresh(now, SAID_S) if report.model_id == model_id)
        if any(peer in gone for peer in served):
            return None
        said = self.summaries.of(model_id, now)
        return together([each for each in said if each.author == self.own or self._knows(each.author)], n_layers)

    def demand(self, now: float) -> dict[bytes, float]:
        """Requests a second by model: this peer's own and those in fresh reports; or what authors of summaries have
        heard where that is more (the median of them, so that one of several moves little)."""
        heard = self.heard_demand(now)
        for model_id in self.summaries.models(now):
            told = sorted(summary.requests_per_s for summary in self.summaries.of(model_id, now))
            heard[model_id] = max(told[(len(told) - 1) // 2], heard.get(model_id, 0.0))
        return heard

    def heard_demand(self, now: float) -> dict[bytes, float]:
        heard = self.meter.rates(now)
        for report in self.loads.fresh(now):
            for model_id, per_s in report.demand:
                heard[model_id] = heard.get(model_id, 0.0) + min(per_s, CREDIBLE_PER_S)
        return heard
