"""The coverage summaries of others: a few authors for each model, a bounded number of models.

The rule this file keeps: one author has one summary of a model, and no flood of authors or models pushes out what this
peer cares about; which strangers' opinions are kept is drawn by a secret of this peer's own.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from meshswarm.identity import PeerId
from meshswarm.routing.gossip.messages import MAX_DIGEST, STEP_MS, Digest, tag
from meshswarm.routing.gossip.summary import Summary

FRESH_S = 150.0
RENEWED_S = 75.0  # who has not spoken again for this long makes room for others
MAX_MODELS = 64
MAX_AUTHORS = 4
ENOUGH_AUTHORS = 3
_NEWER_STEPS = 15_000 // STEP_MS


@dataclass(slots=True)
class _Known:
    summary: Summary
    heard_at: float
    tag: int
    rank: bytes


class Summaries:
    """`secret`: 16 bytes that nobody else knows."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._models: OrderedDict[bytes, dict[PeerId, _Known]] = OrderedDict()  # heard of longest ago first

    def of(self, model_id: bytes, now: float) -> Sequence[Summary]:
        """Fresh opinions on one model, those that know of most peers first."""
        known = self._models.get(model_id, {}).values()
        fresh = [each.summary for each in known if now - each.heard_at <= FRESH_S]
        return sorted(fresh, key=lambda summary: (-summary.n_peers, summary.author))

    def models(self, now: float) -> list[bytes]:
        """Models somebody has summed up lately."""
        return [model_id for model_id in self._models if self.of(model_id, now)]

    def number(self, model_id: bytes, author: PeerId) -> int:
        known = self._models.get(model_id, {}).get(author)
        return -1 if known is None else known.summary.number

    def has_enough(self, model_id: bytes, n_peers: int, own: PeerId, now: float) -> bool:
        """Whether enough others who know at least about as many peers have spoken."""
        others = [each for each in self.of(model_id, now) if each.author != own and each.n_peers >= 0.8 * n_peers]
        return len(others) >= ENOUGH_AUTHORS

    def is_wanted(self, summary: Summary, now: float, cares: Collection[bytes]) -> bool:
        """Whether there is room for it, before its signature is checked. `cares`: models that matter here."""
        authors = self._models.get(summary.model_id)
        if authors is None:
            return len(self._models) < MAX_MODELS or summary.model_id in cares or self._is_old(now)
        known = authors.get(summary.author)
        if known is not None:
            return summary.number > known.summary.number
        if len(authors) < MAX_AUTHORS or any(now - each.heard_at > RENEWED_S for each in authors.values()):
            return True
        return self._rank(summary) < max(each.rank for each in authors.values())

    def take(self, summary: Summary, now: float, cares: Collection[bytes]) -> None:
        """Keeps a wanted and verified summary."""
        authors = self._models.pop(summary.model_id, {})
        tag_of = tag(summary.author.key + summary.model_id)
        authors[summary.author] = _Known(summary, now, tag_of, self._rank(summary))
        if len(authors) > MAX_AUTHORS:
            worst = max(authors, key=lambda peer: (now - authors[peer].heard_at > RENEWED_S, authors[peer].rank))
            del authors[worst]
        self._models[summary.model_id] = authors
        if len(self._models) > MAX_MODELS:
            del self._models[next((each for each in self._models if each not in cares), next(iter(self._models)))]

    def expel(self, admits: Callable[[PeerId], bool]) -> None:
        """Forget the summaries of authors who are not admitted."""
        for model_id, authors in list(self._models.items()):
            self._models[model_id] = {author: known for author, known in authors.items() if admits(author)}
            if not self._models[model_id]:
                del self._models[model_id]

    def digest(self, now: float, rng: random.Random) -> Digest:
        entries = [
            (known.tag, known.summary.number // STEP_MS)
            for authors in self._models.values()
            for known in authors.values()
            if now - known.heard_at <= FRESH_S
        ]
        if len(entries) <= MAX_DIGEST:
            return Digest(tuple(entries))
        return Digest(tuple(rng.sample(entries, MAX_DIGEST)), is_all=False)

    def lacking(self, digest: Digest, now: float, rng: random.Random) -> list[Summary]:
        """What the asker has older or not at all."""
        listed = dict(digest.entries)
        found = []
        for authors in self._models.values():
            for known in authors.values():
                if now - known.heard_at > RENEWED_S:
                    continue
                step = listed.get(known.tag)
                if step is None and not digest.is_all and rng.random() < 0.75:
                    continue  # it has more than it could list, probably this one too
                if step is None or known.summary.number // STEP_MS - step >= _NEWER_STEPS:
                    found.append(known.summary)
        rng.shuffle(found)
        return found

    def _is_old(self, now: float) -> bool:
        """Whether the model heard of longest ago is not worth keeping."""
        authors = next(iter(self._models.values()), {})
        return all(now - known.heard_at > FRESH_S for known in authors.values())

    def _rank(self, summary: Summary) -> bytes:
        return hashlib.sha256(self._secret + summary.author.key + summary.model_id).digest()[:8]
