"""How many states a span saves of a session whose layers keep a running state, to go back to later.

The rule this file keeps: what a session takes beside its memory in llama.cpp is bounded and known before it begins. A
state is as large at the first position as at the last, so the number follows from the layers alone
(`kv_layers.LayerKv.saved_bytes`), and the memory plan counts what the engine will keep.
"""

from __future__ import annotations

MAX_CHECKPOINTS = 4
CHECKPOINT_BYTES = 64 << 20
"""Of each session in a span. Who holds layers with a larger state than that has room for a second one."""


def n_checkpoints(state_bytes: int) -> int:
    """How many checkpoints a span keeps of each session, whose state takes so many bytes there."""
    if not state_bytes:
        return MAX_CHECKPOINTS
    return max(1, min(MAX_CHECKPOINTS, CHECKPOINT_BYTES // state_bytes))


def saved_bytes(state_bytes: int) -> int:
    """Bytes of the states that are saved of each session: the checkpoints, and the one before its latest rows."""
    return (n_checkpoints(state_bytes) + 1) * state_bytes
