"""How fast peers turned out to be: what a head saw in its own sessions, which outranks what their records claim.

A head sees how long a step took on the whole route, never what each span took of it. From steps over several routes it
follows who was slow: the speeds that explain best what was seen lately, by least squares, each drawn a little towards
the peer's claim where nothing is known (ridge regression). A peer that was only ever seen beside others shares their
blame; one that was also seen without them does not.

The rule this file keeps: what was seen is forgotten by time, not by claims. A peer that turned out slow is priced by
it whatever it says now, and the excess halves every `HALF_LIFE_S` after it was last seen: a peer twice as slow as it
said is tried again soon, one a hundred times as slow after an hour, and one session teaches the same again.

Sans-IO: seconds are passed in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshswarm.identity import PeerId

HALF_LIFE_S = 600.0
MAX_SEEN = 64  # of one model: older ones make room
MAX_MODELS = 16
_NOISE = 0.15  # of what was seen: how far it may be off because of others' work
_NOISE_US = 500.0  # and of the transport's
_OWN_DOUBT = 0.1  # of its own speed: this machine measured itself
_DOUBT = 4.0  # times the slowest layers ever seen: how far a stranger's claim may be off
_LEAST = 0.25  # of its claim: faster than that no peer is taken to be
_FORGOTTEN = 12  # half-lives
_STALE_S = HALF_LIFE_S / 10


@dataclass(frozen=True, slots=True)
class Share:
    """What one span did of a step: layers, each of which takes `batch` times what a lone row takes. `claimed_us`: µs a
    layer takes for a lone row, by its record."""

    peer: PeerId
    claimed_us: float
    n_layers: int
    batch: float = 1.0


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """µs one layer takes for a lone row, from what was seen `n_sightings` times, the last time at `at`."""

    us_per_layer: float
    n_sightings: int
    at: float


@dataclass(frozen=True, slots=True)
class _Seen:
    shares: tuple[Share, ...]
    compute_us: float
    at: float


@dataclass(frozen=True, slots=True)
class _Explained:
    """For each peer µs a layer and when it was seen, as worked out `at`."""

    speeds: Mapping[PeerId, tuple[float, tuple[float, ...]]]
    at: float


class MeasuredSpeeds:
    """What `own`, a head, has seen of other peers."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._seen: OrderedDict[bytes, deque[_Seen]] = OrderedDict()
        self._explained: dict[bytes, _Explained] = {}

    def note(self, model_id: bytes, shares: Sequence[Share], compute_s: float, now: float) -> None:
        """A usual step over the spans of `shares` took `compute_s`, apart from the way."""
        seen = self._seen.pop(model_id, None) or deque(maxlen=MAX_SEEN)
        self._seen[model_id] = seen
        self._explained.pop(model_id, None)
        if len(self._seen) > MAX_MODELS:
            self._explained.pop(self._seen.popitem(last=False)[0], None)
        seen.append(_Seen(tuple(shares), max(0.0, compute_s) * 1e6, now))

    def of(self, model_id: bytes, claims: Mapping[PeerId, float], now: float) -> dict[PeerId, MeasuredSpeed]:
        """What each other peer of `claims` (µs a layer, by its record) turned out to take; nothing of those that were
        not seen, or not lately."""
        explained = self._explain(model_id, now)
        found = {}
        for peer, (us, times) in explained.speeds.items():
            claim, at = claims.get(peer), times[-1]
            if claim is not None and peer != self._own and now - at < _FORGOTTEN * HALF_LIFE_S:
                kept = 0.5 ** (max(0.0, now - at) / HALF_LIFE_S)
                found[peer] = MeasuredSpeed(claim + (us - claim) * kept, len(times), at)
        return found

    def _explain(self, model_id: bytes, now: float) -> _Explained:
        """Worked out again when something was seen, or some of what was seen has become a little less true."""
        known = self._explained.get(model_id)
        if known is not None and abs(now - known.at) < _STALE_S:
            return known
        lately = [each for each in self._seen.get(model_id, ()) if now - each.at < _FORGOTTEN * HALF_LIFE_S]
        speeds = _explain(lately, self._own, now) if lately else {}
        times = {
            peer: tuple(each.at for each in lately if any(share.peer == peer for share in each.shares))
            for peer in speeds
        }
        explained = _Explained({peer: (us, times[peer]) for peer, us in speeds.items()}, now)
        if lately:
            self._explained[model_id] = explained
        return explained


def _explain(lately: Sequence[_Seen], own: PeerId, now: float) -> dict[PeerId, float]:
    """µs a layer of each peer that was seen, not below `_LEAST` of its claim: the least squares of what is left
    unexplained and of how far each peer is from its claim, both in units of their doubt. Peers that would be faster
    than their least are held there, and the others found again."""
    claims = {share.peer: share.claimed_us for each in reversed(lately) for share in each.shares}
    peers = sorted(claims)
    at = {peer: column for column, peer in enumerate(peers)}
    claimed = np.array([claims[peer] for peer in peers])
    layers = np.zeros((len(lately), len(peers)))
    for row, each in enumerate(lately):
        for share in each.shares:
            layers[row, at[share.peer]] += share.n_layers * share.batch
    took = np.array([each.compute_us for each in lately])
    slowest = max(float(np.max(took / layers.sum(axis=1))), 1.0)
    doubt = np.array([_OWN_DOUBT * claims[peer] if peer == own else _DOUBT * slowest for peer in peers])
    age = np.array([max(0.0, now - each.at) for each in lately])
    sureness = np.sqrt(0.5 ** (age / HALF_LIFE_S)) / (_NOISE * took + _NOISE_US)
    least = _LEAST * claimed
    held = np.zeros(len(peers), bool)
    speeds = claimed.copy()
    while not held.all():
        speeds[held] = least[held]
        rest = took - layers[:, held] @ speeds[held] - layers[:, ~held] @ claimed[~held]
        rows = layers[:, ~held] * sureness[:, None] * doubt[~held]
        n_free = rows.shape[1]
        system, wanted = np.vstack([rows, np.eye(n_free)]), np.concatenate([rest * sureness, np.zeros(n_free)])
        speeds[~held] = claimed[~held] + doubt[~held] * np.linalg.lstsq(system, wanted, rcond=None)[0]
        below = (speeds < least) & ~held
        if not below.any():
            break
        held |= below
    return {peer: float(us) for peer, us in zip(peers, np.maximum(speeds, least), strict=True)}
