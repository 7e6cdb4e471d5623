"""Reducing a row of logits to its k largest and the mass of all others: what a last span sends instead of 200 KB.

The rule this file keeps: the reduction is exact. Ids, logits and order are those of a full stable sort; only the sum in
the tail's mass is subject to rounding.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from meshswarm.stage.engine.jobs import EngineError, TopK

_GROUP_ROWS = 64
_SMALLEST_SAFE_SUM = 1e-25
"""Above it, what a float32 exponential rounds down to zero does not count; below, the tail is summed anew, shifted."""


class TopKReducer:
    """Reduces rows of `n_vocab` logits, with one scratch buffer; for one thread."""

    def __init__(self, n_vocab: int) -> None:
        self._scratch = np.empty(n_vocab, np.float32)

    def reduce(self, row: NDArray[np.float32], k: int, temperature: float) -> TopK:
        """`row` float32 [n_vocab]; 1 <= k (cut to n_vocab). Raises EngineError when the row holds NaN or +inf.

        At temperature 0 nobody draws from the tail: its mass is not summed up, and given as 0.
        """
        ids = _largest(row, min(k, row.size))
        logits = row[ids]
        largest = float(logits.max(initial=-math.inf))  # of none where NaN kept everything from comparing
        if temperature > 0:
            tail_log_mass = self._tail_log_mass(row, ids, largest, temperature)
        else:
            tail_log_mass = math.nan if math.isnan(float(row.max())) else 0.0
        if math.isnan(tail_log_mass) or not math.isfinite(largest):
            raise EngineError("the model computed logits that are not numbers")
        return TopK(ids, logits, tail_log_mass)

    def _tail_log_mass(
        self, row: NDArray[np.float32], ids: NDArray[np.int32], largest: float, temperature: float
    ) -> float:
        """log(sum(exp(logit / temperature))) over every id not in `ids`; `largest` is the row's maximum.

        NaN when any of them is, or when the largest is not finite.
        """
        if ids.size == row.size or not math.isfinite(largest):
            return largest - math.inf
        mass = self._sum_of_exp(row, ids, largest, temperature)
        if mass < _SMALLEST_SAFE_SUM:
            np.copyto(self._scratch, row)
            self._scratch[ids] = -np.inf
            largest = float(self._scratch.max())
            if largest == -math.inf:
                return -math.inf
            mass = self._sum_of_exp(row, ids, largest, temperature)
        return largest / temperature + math.log(mass)

    def _sum_of_exp(self, row: NDArray[np.float32], ids: NDArray[np.int32], shift: float, temperature: float) -> float:
        """Sum of exp((logit - shift) / temperature) over every id not in `ids`."""
        scratch = self._scratch
        np.subtract(row, np.float32(shift), out=scratch)
        scratch[ids] = -np.inf
        if temperature != 1.0:
            scratch *= np.float32(min(1.0 / temperature, 1e30))  # 0 * inf is not a number
        np.exp(scratch, out=scratch)
        return float(scratch.sum())


def _largest(row: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """Ids of the `k` largest entries, descending, the lower id first among equals: int32 [k].

    The k-th largest of the maxima of disjoint groups is a lower bound of the k-th largest entry, so everything that
    counts is at or above it, and little else: no partition of the whole row is needed. NaN has no place in this order.
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
