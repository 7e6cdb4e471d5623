"""Summing up a model: who holds which of its layers, from the DHT's records and from newer load reports.

The rule this file keeps: a peer sums up what it serves itself, and stays silent where enough others who know as much
have spoken lately; so every model has a few authors, however many peers serve it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping

from meshswarm.identity import Identity, PeerId
from meshswarm.routing.gossip.report import LoadReport
from meshswarm.routing.gossip.summaries import Summaries
from meshswarm.routing.gossip.summary import Holding, Summary

SUMMARY_S = 30.0
MAX_SURVEYS = 8
_UNMEASURED_US = 1000


class Surveys:
    """What is known of whole models."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._surveys: dict[bytes, tuple[int, dict[PeerId, Holding]]] = {}
        self._due_at: dict[bytes, float] = {}

    def take(self, model_id: bytes, n_layers: int, holdings: Iterable[Holding]) -> None:
        """The DHT's newest answer about a model."""
        self._surveys.pop(model_id, None)
        self._surveys[model_id] = n_layers, {holding.peer: holding for holding in holdings}
        while len(self._surveys) > MAX_SURVEYS:
            del self._surveys[next(iter(self._surveys))]

    def holds(self, peer: PeerId) -> bool:
        return any(peer in holdings for _, holdings in self._surveys.values())

    def holders(self) -> set[PeerId]:
        return {peer for _, holdings in self._surveys.values() for peer in holdings}

    def sum_up(
        self,
        identity: Identity,
        scope: bytes,
        own: LoadReport,
        loads: Mapping[PeerId, LoadReport],
        gone: Collection[PeerId],
        summaries: Summaries,
        requests_per_s: Mapping[bytes, float],
        number: int,
        now: float,
    ) -> Summary | None:
        """A summary of the model served here, when it is time for one."""
        model_id = own.model_id
        if model_id is None or not own.n_layers:
            return None
        if now < self._due_at.setdefault(model_id, now + SUMMARY_S * self._rng.uniform(0.2, 0.8)):
            return None  # the first one too waits until something is known
        self._due_at = {model_id: now + SUMMARY_S * self._rng.uniform(0.8, 1.2)}
        n_layers, surveyed = self._surveys.get(model_id, (own.n_layers, {}))
        holdings = {peer: holding for peer, holding in surveyed.items() if peer not in gone}
        for report in (*loads.values(), own):
            if report.model_id == model_id and report.span is not None and report.peer not in gone:
                known = holdings.get(report.peer)
                us = report.us_per_layer or (known.us_per_layer if known is not None else _UNMEASURED_US)
                holdings[report.peer] = Holding(report.peer, report.span, us)
            else:
                holdings.pop(report.peer, None)  # it serves something else by now
        if summaries.has_enough(model_id, len(holdings), own.peer, now):
            return None
        asked = requests_per_s.get(model_id, 0.0)
        return Summary.sign(identity, scope, number, model_id, n_layers, holdings.values(), asked)
