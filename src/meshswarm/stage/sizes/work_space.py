"""An estimate, from above, of the memory llama.cpp takes to compute with a slice, beside weights and K and V.

The rule this file keeps: never less than llama.cpp 0.3.36 reports when it reserves its graphs, and for models of a size
worth splitting not more than about three times as much: the numbers here were fitted to those reports, which
`tests/stage/sizes/test_memory.py` repeats. What is in use after load is known from the engine.
"""

from __future__ import annotations

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.stage.engine.attention import scores_bytes
from meshswarm.stage.engine.settings import Settings
from meshswarm.stage.slices.slicing import MIDDLE_VOCABULARY

_F32 = 4
_FIXED_BYTES = 1 << 20
_SLIDES_UNASKED = frozenset({"gemma2", "llama4"})
"""Have a sliding window whether or not a setting says so."""
_CELL_BYTES = {"plain": 4, "sliding": 8, "indexed": 14, "deepseek4": 18}
"""Of each pair of a computed row and a cell it may see: the mask, two of them where windows slide, and an
indexer's scores."""


def work_space_bytes(header: GgufHeader, *, n_rows: int, n_cells: int, has_vocabulary: bool) -> int:
    """Bytes for batches of `n_rows` rows over sessions of `n_cells` cells. `has_vocabulary`: it is a model's first span
    or its last, whose slice carries the token embedding."""
    settings = Settings(header)
    heads = max(1, settings.highest("attention.head_count", 1))
    head_size = settings.n_embd // heads
    n_used = settings.highest("expert_used_count", 0)
    dense = settings.highest("feed_forward_length", 0)
    state_space = settings.number("ssm.inner_size", 0)
    state_space += settings.number("ssm.group_count", 0) * settings.number("ssm.state_size", 0)
    head = settings.number("attention.key_length", head_size) + settings.number("attention.value_length", head_size)
    a_row = (
        (settings.n_vocab if has_vocabulary else MIDDLE_VOCABULARY)
        + (6 * settings.number("hyper_connection.count", 1) + n_used) * settings.n_embd
        + 2 * heads * head
        + 3 * max(dense, n_used * settings.highest("expert_feed_forward_length", dense))
        + 6 * state_space
    )
    scores = scores_bytes(header, n_rows=n_rows, n_cells=n_cells)
    return _FIXED_BYTES + n_rows * (_F32 * a_row + n_cells * _CELL_BYTES[_kind(settings)]) + scores


def _kind(settings: Settings) -> str:
    if settings.has("attention.compress_ratios"):
        return "deepseek4"
    if settings.has("attention.indexer.key_length"):
        return "indexed"
    slides = settings.has("attention.sliding_window") or settings.architecture in _SLIDES_UNASKED
    return "sliding" if slides else "plain"
