"""How often this peer's own clients ask for each model: requests a second, as an exponential average."""

from __future__ import annotations

import math

from meshswarm.routing.gossip.report import MAX_DEMANDS, MAX_REQUESTS_PER_S

AVERAGED_S = 60.0
_MAX_MODELS = 256
_FORGOTTEN = 1e-4  # requests a second


class DemandMeter:
    """Counts requests; `rates` are what the last minute or so weighs most in."""

    def __init__(self) -> None:
        self._rates: dict[bytes, tuple[float, float]] = {}  # requests a second, when that was true

    def count(self, model_id: bytes, now: float) -> None:
        """A client asked for this model."""
        self._rates[model_id] = self._rate(model_id, now) + 1 / AVERAGED_S, now
        if len(self._rates) > _MAX_MODELS:
            del self._rates[min(self._rates, key=lambda each: self._rate(each, now))]

    def rates(self, now: float) -> dict[bytes, float]:
        for model_id in [each for each in self._rates if self._rate(each, now) < _FORGOTTEN]:
            del self._rates[model_id]
        return {model_id: self._rate(model_id, now) for model_id in self._rates}

    def most(self, now: float) -> tuple[tuple[bytes, float], ...]:
        """The models most asked for, as many as a report has room for."""
        rates = self.rates(now)
        chosen = sorted(rates, key=lambda model_id: (-rates[model_id], model_id))[:MAX_DEMANDS]
        return tuple((model_id, min(rates[model_id], MAX_REQUESTS_PER_S)) for model_id in chosen)

    def _rate(self, model_id: bytes, now: float) -> float:
        rate, since = self._rates.get(model_id, (0.0, now))
        return rate * math.exp(-max(0.0, now - since) / AVERAGED_S)
