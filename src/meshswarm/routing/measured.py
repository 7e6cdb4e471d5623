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
from numpy.typing import NDArray

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


class MeasuredSpeeds:
    """What `own`, a head, has seen of other peers."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._seen: OrderedDict[bytes, deque[_Seen]] = OrderedDict()

    def note(self, model_id: bytes, shares: Sequence[Share], compute_s: float, now: float) -> None:
        """A usual step over the spans of `shares` took `compute_s`, apart from the way."""
        seen = self._seen.pop(model_id, None) or deque(maxlen=MAX_SEEN)
        self._seen[model_id] = seen
        if len(self._seen) > MAX_MODELS:
            self._seen.popitem(last=False)
        seen.append(_Seen(tuple(shares), max(0.0, compute_s) * 1e6, now))

    def of(self, model_id: bytes, claims: Mapping[PeerId, float], now: float) -> dict[PeerId, MeasuredSpeed]:
        """What each other peer of `claims` (µs a layer, by its record) turned out to take; nothing of those that were
        not seen, or not lately."""
        lately = [each for each in self._seen.get(model_id, ()) if now - each.at < _FORGOTTEN * HALF_LIFE_S]
        if not lately:
            return {}
        peers = sorted({share.peer for each in lately for share in each.shares})
        first_claims = {share.peer: share.claimed_us for each in reversed(lately) for share in each.shares}
        explained = _explain(lately, peers, first_claims, self._own, now)
        found = {}
        for peer, us in zip(peers, explained, strict=True):
            claim = claims.get(peer)
            if claim is None or peer == self._own:
                continue
            times = [each.at for each in lately if any(share.peer == peer for share in each.shares)]
            kept = 0.5 ** (max(0.0, now - times[-1]) / HALF_LIFE_S)
            found[peer] = MeasuredSpeed(claim + (us - claim) * kept, len(times), times[-1])
        return found


def _explain(
    lately: Sequence[_Seen], peers: Sequence[PeerId], claims: Mapping[PeerId, float], own: PeerId, now: float
) -> NDArray[np.float64]:
    """µs a layer of each of `peers`, not below `_LEAST` of its claim. Normal equations, with the peers that end at
    their least held there."""
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
    weight = 0.5 ** (age / HALF_LIFE_S) / np.square(_NOISE * took + _NOISE_US)
    least = _LEAST * claimed
    held = np.zeros(len(peers), bool)
    speeds = claimed.copy()
    for _ in range(len(peers)):
        speeds[held] = least[held]
        rest = took - layers[:, held] @ speeds[held]
        loose = layers[:, ~held]
        normal = (loose * weight[:, None]).T @ loose + np.diag(1 / np.square(doubt[~held]))
        towards = (loose * weight[:, None]).T @ rest + claimed[~held] / np.square(doubt[~held])
        speeds[~held] = np.linalg.solve(normal, towards)
        below = speeds < least
        if not (below & ~held).any():
            break
        held |= below
        if held.all():
            break
    explained: NDArray[np.float64] = np.maximum(speeds, least)
    return explained
