"""The metadata of a slice: the model's, with everything that counts or names layers made right for the slice's own.

The rule this file keeps: the family's row says what becomes of a setting; that it lists them all was checked before.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshswarm.artifacts.gguf.check import check_hyperparameters
from meshswarm.artifacts.gguf.container import Entry, GgufHeader, ValueType
from meshswarm.artifacts.gguf.header_writer import HeaderWriter
from meshswarm.artifacts.gguf.hyperparameters import MAX_CONTEXT
from meshswarm.span import Span
from meshswarm.stage.families.cuts import ORIGINAL_CONTEXT, IllegalCutError, pattern_values, small_context
from meshswarm.stage.families.family import DROPPED_KEYS, Family

_KEPT_GENERAL_KEYS = frozenset(
    {"general.architecture", "general.alignment", "general.file_type", "general.quantization_version"}
)


@dataclass(frozen=True, slots=True)
class Cut:
    """What is cut out of the model of `header`. `layers`: the model's layers that the slice's stand for, in order, the
    span's own and behind them those that its zero layers are shaped like. `n_vocab`: rows of the slice's vocabulary."""

    header: GgufHeader
    family: Family
    span: Span
    layers: tuple[int, ...]
    n_layers: int
    n_vocab: int

    @property
    def is_first(self) -> bool:
        return self.span.start == 0

    @property
    def is_last(self) -> bool:
        return self.span.stop == self.n_layers


def write_metadata(writer: HeaderWriter, cut: Cut) -> None:
    """All entries of the slice."""
    header, family = cut.header, cut.family
    prefix = family.architecture + "."
    replaced = {"block_count": len(cut.layers), "vocab_size": cut.n_vocab}
    if small_context(header, family) is not None:
        replaced[ORIGINAL_CONTEXT] = MAX_CONTEXT
    patterned = {key for pattern in family.patterns for key in (pattern.key, pattern.period_key)}
    for key, entry in header.metadata.items():
        name = key.removeprefix(prefix)
        if key in _KEPT_GENERAL_KEYS:
            writer.copy(header, entry)
        elif key.startswith(prefix) and name not in replaced and name not in patterned | DROPPED_KEYS:
            _write_setting(writer, cut, name, entry)
    for name, guess in family.guessed_numbers.items():
        if prefix + name not in header.metadata:
            writer.u32(prefix + name, guess(check_hyperparameters(header)))
    for name, value in replaced.items():
        writer.u32(prefix + name, value)
    for pattern in family.patterns:
        values = pattern_values(header, family, pattern, cut.n_layers)
        if values is not None:
            writer.array(prefix + pattern.key, ValueType.BOOL, [values[layer] for layer in cut.layers])
    writer.text("tokenizer.ggml.model", "no_vocab")


def _write_setting(writer: HeaderWriter, cut: Cut, name: str, entry: Entry) -> None:
    header, family = cut.header, cut.family
    if name in family.count_keys:
        writer.u32(entry.key, _leading(cut, entry))
    elif name in family.first_keys:
        if cut.is_first:
            writer.copy(header, entry)
    elif entry.is_array and name in family.layer_keys | family.uniform_keys:
        writer.pick_items(header, entry, cut.layers)
    else:
        writer.copy(header, entry)


def _leading(cut: Cut, entry: Entry) -> int:
    """How many of the slice's layers, from its first on, are among the model's first ones that `entry` counts."""
    n_in_model = cut.header.scalar(entry.key)
    if not isinstance(n_in_model, int):
        raise cut.header.fault(entry.key, "is not an integer")
    are_counted = [layer < n_in_model for layer in cut.layers]
    n_leading = next((at for at, is_counted in enumerate(are_counted) if not is_counted), len(are_counted))
    if any(are_counted[n_leading:]):
        raise IllegalCutError(f"the layers {cut.span} cannot be served alone: {entry.key} counts layers from the first")
    return n_leading
