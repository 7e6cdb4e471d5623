"""The row-count profile of a session: how many rows one engine turn may compute at a time.

Floating-point results depend on which kernel runs, and the kernel depends on the number of rows. Measured on CPU: 2 to
48 rows give identical bits whoever else is in the batch; one row, or 64 and more, may differ in the last bit.
"""

from __future__ import annotations

from enum import StrEnum

EXACT_MIN_ROWS = 2
EXACT_MAX_ROWS = 48


class Profile(StrEnum):
    """`FAST`: any row count, identical bits at equal chunking. `EXACT`: always 2 to 48, identical in any company."""

    FAST = "fast"
    EXACT = "exact"
