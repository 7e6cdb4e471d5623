"""How a prompt is cut into steps: of the size that is fastest on its route (`routing/prompt_time.py`), and so that a
next turn finds places to go on from.

The rule this file keeps: every row is in exactly one step, and a checkpoint stands only where a step ends.
"""

from __future__ import annotations

from dataclasses import dataclass

TAIL_ROWS = 8  # what a chat template puts behind the last message, and renders otherwise once it is answered


@dataclass(frozen=True, slots=True)
class Cut:
    """One step of a prompt. `is_checkpoint`: the spans save their states behind it."""

    n_rows: int
    is_checkpoint: bool = False


def cut_prompt(n_rows: int, size: int, n_checkpoints: int, *, is_first: bool) -> list[Cut]:
    """The steps of a prompt, of `size` rows each.

    Where there are checkpoints, one stands a little before the end: behind it come the marks that open an answer, and
    the template of a model that thinks writes others in their place when the answer is part of the next prompt. The
    first prompt of a session has more of them, 1, 2, 4, ... steps further on, for a prompt that begins alike.
    """
    tail = TAIL_ROWS if n_checkpoints else 0
    if tail and (n_rows - tail) % size == 1:  # a lone row can be no checkpoint
        tail += 1
    if not tail or n_rows < tail + 2:
        return [Cut(rows) for rows in _chunks(n_rows, size)]
    body = _chunks(n_rows - tail, size)
    marked = {len(body) - 1}
    if is_first:
        marked |= {len(body) - 1 - 2**at for at in range(n_checkpoints - 1)}
    return [*(Cut(rows, at in marked) for at, rows in enumerate(body)), Cut(tail)]


def _chunks(n_rows: int, size: int) -> list[int]:
    n_full, rest = divmod(n_rows, size)
    return [size] * n_full + ([rest] if rest else [])
