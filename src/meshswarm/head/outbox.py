"""The rows of one session on their way out: cut into steps, numbered, hashed, and held back until there is room.

The rule this file keeps: what is counted as work is what was sent, in the order it was sent, so that the head and every
span count the same.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

from meshswarm.head.chunking import cut_prompt
from meshswarm.head.history import History
from meshswarm.routing.prompt_time import Pace, chunk_rows, max_chunk_rows, with_links
from meshswarm.stage.engine.profile import Profile
from meshswarm.stage.sessions.messages import MAX_DRAFT, Dtype, Flag, RowHash, Step
from meshswarm.stage.sessions.session import Work


class Outbox:
    """`history`: what the session holds already. `route`: how fast each span is, empty when nobody knows.
    `n_checkpoints`: how many the spans keep, 0 where there are none or none are needed."""

    def __init__(self, session: bytes, n_ctx: int, profile: Profile, route: Sequence[Pace], history: History) -> None:
        self.history = history
        self.length = len(history.tokens)  # positions sent so far
        self.turn = 0
        self.sent = Work()
        self.n_checkpoints = 0
        self._n_ctx = n_ctx
        self._profile = profile
        self._route = route
        self._next_seq = 0
        self._hash = RowHash(session, "step")
        self._steps: deque[Step] = deque()  # wait for room

    def __bool__(self) -> bool:
        return bool(self._steps)

    def chunk_rows(self, n_rows: int, link_row_s: float) -> int:
        """Rows per step for a prompt of `n_rows`, each of which takes `link_row_s` from span to span."""
        return chunk_rows(n_rows, with_links(self._route, link_row_s), self._profile)

    def push(self, tokens: list[int], truncate_to: int | None, n_draft: int, size: int) -> Step:
        """Takes rows up, in steps of `size` or all in one with a draft, and returns the step whose logits are wanted,
        the last one. Raises ValueError for rows that cannot be sent; nothing has changed then."""
        size = len(tokens) if n_draft else size
        if not 0 <= n_draft <= MAX_DRAFT or (n_draft and not n_draft < size <= max_chunk_rows(self._profile)):
            raise ValueError(f"a draft of {n_draft} among {len(tokens)} tokens does not fit one step")
        start = self.length if truncate_to is None else truncate_to
        if not 0 <= start <= self.length:
            raise ValueError(f"cannot truncate to position {start}: the session stands at {self.length}")
        if not tokens or start + len(tokens) > self._n_ctx:
            raise ValueError(f"{len(tokens)} tokens do not fit the {self._n_ctx} positions of the session")
        if truncate_to == self.length:
            truncate_to = None  # there is nothing to take back
        goes_on = start >= self.length - self.history.n_open and bool(self.history.checkpoints)
        if truncate_to is not None:
            self.length = truncate_to
            self.history.truncate(truncate_to)
        n_checkpoints = 0 if n_draft else self.n_checkpoints
        at = 0
        for cut in cut_prompt(len(tokens), size, n_checkpoints, is_first=start == 0):
            chunk = tokens[at : at + cut.n_rows]
            at += cut.n_rows
            self.history.add(chunk, n_draft)
            if cut.is_checkpoint:
                self.history.add_checkpoint(n_checkpoints)
                self.history.pinned = self.history.pinned if goes_on else len(self.history.tokens)
            step = self._step(chunk, truncate_to, n_draft, is_last=at == len(tokens), is_checkpoint=cut.is_checkpoint)
            truncate_to = None
            self._steps.append(step)
        return step

    def _step(
        self, tokens: list[int], truncate_to: int | None, n_draft: int, *, is_last: bool, is_checkpoint: bool
    ) -> Step:
        packed = struct.pack(f"<{len(tokens)}i", *tokens)
        step = Step(
            seq=self._next_seq,
            pos0=self.length,
            n_rows=len(tokens),
            truncate_to=truncate_to,
            flags=(Flag.EMIT if is_last else 0) | (Flag.DRAFT if n_draft else 0),
            tokens=packed,
            dtype=Dtype.F32,
            hidden=None,
            running_hash=self._hash.step(self._next_seq, self.length, len(tokens), packed, None),
            n_outputs=1 + n_draft,
            turn=self.turn,
            checkpoints=tuple(self.history.checkpoints) if is_checkpoint else None,
        )
        self._next_seq += 1
        self.length += len(tokens)
        return step

    def allowed(self, room: int) -> list[Step]:
        """The steps that may leave while there is room for so many more rows."""
        leaving = []
        while self._steps and self._steps[0].n_rows <= room:
            step = self._steps.popleft()
            room -= step.n_rows
            self.sent.add(step)
            leaving.append(step)
        return leaving

    def clear(self) -> None:
        """What has not left will not."""
        self._steps.clear()
