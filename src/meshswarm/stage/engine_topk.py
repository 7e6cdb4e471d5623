"""Reducing a row of logits to its k largest and the mass of all others: what a last span sends instead of 200 KB.

The rule this file keeps: the reduction is exact. Ids, logits and order are those of a full stable sort; only the sum in
the tail's mass is subject to rounding.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from meshswarm.stage.engine_jobs import EngineError, TopK

_GROUP_ROWS = 64


class TopKReducer:
    """Reduces rows of `n_vocab` logits, with one scratch buffer; for one thread."""

    def __init__(self, n_vocab: int) -> None:
        self._scratch = np.empty(n_vocab, np.float32)

    def reduce(self, row: NDArray[np.float32], k: int, temperature: float) -> TopK:
        """`row` float32 [n_vocab]; 1 <= k (cut to n_vocab). Raises EngineError when the row holds NaN or +inf."""
        if not math.isfinite(float(row.max())):  # NaN wins every max
            raise EngineError("the model computed logits that are not numbers")
        ids = _largest(row, min(k, row.size))
        return TopK(ids, row[ids], self._tail_log_mass(row, ids, temperature if temperature > 0 else 1.0))

    def _tail_log_mass(self, row: NDArray[np.float32], ids: NDArray[np.int32], temperature: float) -> float:
        """log(sum(exp(logit / temperature))) over every id not in `ids`, shifted by the tail's own maximum."""
        tail = self._scratch
        np.copyto(tail, row)
        tail[ids] = -np.inf
        largest = float(tail.max())
        if largest == -math.inf:
            return -math.inf
        tail -= np.float32(largest)
        if temperature != 1.0:
            tail *= np.float32(min(1.0 / temperature, 1e30))  # 0 * inf is not a number
        np.exp(tail, out=tail)
        return largest / temperature + math.log(float(tail.sum()))


def _largest(row: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """Ids of the `k` largest entries, descending, the lower id first among equals: int32 [k].

    The k-th largest of the maxima of disjoint groups is a lower bound of the k-th largest entry, so everything that
    counts is at or above it, and little else: no partition of the whole row is needed.
    """
    if k == 1:
        return np.array([row.argmax()], np.int32)  # the first of equals
    n_groups = row.size // _GROUP_ROWS
    if n_groups >= 2 * k:
        maxima = row[: n_groups * _GROUP_ROWS].reshape(_GROUP_ROWS, n_groups).max(axis=0)
        bound = np.partition(maxima, n_groups - k)[n_groups - k]
    else:
        bound = np.partition(row, row.size - k)[row.size - k]
    candidates = np.flatnonzero(row >= bound)
    order = np.argsort(-row[candidates], kind="stable")[:k]
    return candidates[order].astype(np.int32)
