"""The row-count profile of a session: how many rows one engine turn may compute at a time.

Floating-point results depend on which kernel runs, and the kernel depends on the number of rows. Measured on CPU: 2 to
48 rows give identical bits whoever else is in the batch; one row, or 64 and more, may differ in the last bit. That
holds for some encodings of weights only: a model with any other has no `EXACT`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

EXACT_MIN_ROWS = 2
EXACT_MAX_ROWS = 48
EXACT_ENCODINGS = frozenset(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "TQ1_0", "TQ2_0"}
)
"""Weights in these give a row the same bits in any batch of 2 to 48 rows. One stands here when a test proved it.

Not the K-quants and their kin: from 8 rows on, llama.cpp 0.3.36 may multiply them by another kernel, which sums in
another order. With experts it counts the rows each one gets, so what a row meets depends on other sessions' rows.
"""
_TABLES = frozenset({"I32"})
"""Numbers that a model looks up and never multiplies: which experts work on a token."""


class Profile(StrEnum):
    """`FAST`: any row count, identical bits at equal chunking. `EXACT`: always 2 to 48, identical in any company."""

    FAST = "fast"
    EXACT = "exact"


def exact_obstacle(encodings: Iterable[str]) -> str | None:
    """Why a model whose weights are stored in `encodings` cannot be computed in `EXACT`; None when it can."""
    others = sorted(set(encodings) - EXACT_ENCODINGS - _TABLES)
    if not others:
        return None
    return (
        f"this model has no exact profile: it has weights in {', '.join(others)}, and what they give a row may "
        "depend on how many others are computed with it"
    )
