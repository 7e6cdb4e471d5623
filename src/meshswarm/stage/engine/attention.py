"""Whether attention is computed by llama.cpp's flash attention, where nobody chose.

The rule this file keeps: on a CPU it is off as long as the scores it would save fit into a bounded work space. Measured
with llama-cpp-python 0.3.36 on SmolLM2, one thread, 2,000 positions deep: a turn of 1 row takes 36 ms without it and
77 ms with it, one of 16 rows 193 and 853 ms. Only from 64 rows on, where tiles of rows are computed together, is it
faster: 599 against 731 ms.
"""

from __future__ import annotations

from dataclasses import replace

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.stage.engine.devices import Offload
from meshswarm.stage.engine.llama_options import LlamaOptions
from meshswarm.stage.engine.settings import Settings
from meshswarm.stage.families.table import FAMILIES

MAX_SCORES_BYTES = 128 << 20
"""Scores of more than this, as in long contexts of models with many heads, are left to flash attention."""
_F32 = 4


def scores_bytes(header: GgufHeader, *, n_rows: int, n_cells: int) -> int:
    """Bytes of the attention scores that a batch of `n_rows` rows over sessions of `n_cells` cells keeps at a time, of
    each head, row and cell; 0 where flash attention does without them."""
    settings = Settings(header)
    family = FAMILIES.get(settings.architecture)
    n_bytes = _F32 * settings.highest("attention.head_count", 1) * n_rows * n_cells
    needs_flash_attention = family is not None and family.needs_flash_attention
    return 0 if needs_flash_attention or n_bytes > MAX_SCORES_BYTES else n_bytes


def with_attention(
    options: LlamaOptions, header: GgufHeader, *, n_rows: int, n_cells: int, offload: Offload
) -> LlamaOptions:
    """`options` with `flash_attn` settled, for batches of `n_rows` rows over sessions of `n_cells` cells."""
    if options.flash_attn is not None:
        return options
    is_needed = bool(offload.devices) or options.has_flash_attention
    return replace(options, flash_attn=is_needed or not scores_bytes(header, n_rows=n_rows, n_cells=n_cells))
