"""An estimate, from above, of the memory llama.cpp takes to compute with a slice, beside weights and K and V.

The rule this file keeps: never less than llama.cpp 0.3.36 reports when it reserves its graphs, and for models of a size
worth splitting not more than about three times as much: the numbers here were fitted to those reports, which
`test_work_space` repeats. What is in use after load is known from the engine.
"""

from __future__ import annotations

from meshswarm.artifacts.gguf import GgufHeader, check_hyperparameters
from meshswarm.stage.slicing import MIDDLE_VOCABULARY

_F32 = 4
_FIXED_BYTES = 1 << 20
_SLIDES_UNASKED = frozenset({"gemma2", "llama4"})
"""Have a sliding window whether or not a setting says so."""
_CELL_BYTES = {"plain": 2, "sliding": 4, "indexed": 10, "deepseek4": 18}
"""Of each pair of a computed row and a cell it may see: the mask in half precision, two where windows slide, and an
indexer's scores."""


def work_space_bytes(header: GgufHeader, *, n_rows: int, n_cells: int, has_vocabulary: bool) -> int:
    """Bytes for batches of `n_rows` rows over sessions of `n_cells` cells. `has_vocabulary`: it is a model's first span
    or its last, whose slice carries the token embedding."""
    shape = check_hyperparameters(header)
    settings = _Settings(header, shape.architecture)
    streams = settings.number("hyper_connection.count", 1)
    heads = settings.highest("attention.head_count", 1)
    key_size = settings.number("attention.key_length", shape.n_embd // heads)
    value_size = settings.number("attention.value_length", shape.n_embd // heads)
    n_used = settings.highest("expert_used_count", 0)
    feed_forward = max(
        settings.highest("feed_forward_length", 0),
        n_used * settings.highest("expert_feed_forward_length", settings.highest("feed_forward_length", 0)),
    )
    state = settings.number("ssm.inner_size", 0) + settings.number("ssm.group_count", 0) * settings.number(
        "ssm.state_size", 0
    )
    a_row = (
        (shape.n_vocab if has_vocabulary else MIDDLE_VOCABULARY)
        + (6 * streams + n_used) * shape.n_embd
        + 2 * heads * (key_size + value_size)
        + 3 * feed_forward
        + 6 * state
    )
    return _FIXED_BYTES + n_rows * (_F32 * a_row + n_cells * _CELL_BYTES[_kind(settings)])


def _kind(settings: _Settings) -> str:
    if settings.has("attention.compress_ratios"):
        return "deepseek4"
    if settings.has("attention.indexer.key_length"):
        return "indexed"
    slides = settings.has("attention.sliding_window") or settings.architecture in _SLIDES_UNASKED
    return "sliding" if slides else "plain"


class _Settings:
    """Integer settings of a model by their name without the architecture's prefix."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.architecture = architecture
        self._header = header
        self._prefix = architecture + "."

    def has(self, name: str) -> bool:
        return self._prefix + name in self._header.metadata

    def number(self, name: str, default: int) -> int:
        value = self._header.scalar(self._prefix + name)
        return default if value is None else int(value)

    def highest(self, name: str, default: int) -> int:
        """The highest value of any layer."""
        entry = self._header.metadata.get(self._prefix + name)
        if entry is not None and entry.is_array:
            values = self._header.numbers(entry.key)
            assert values is not None
            return int(values.max())
        return self.number(name, default)
