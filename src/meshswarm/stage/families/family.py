"""How the models of one architecture are cut, as data.

The rule this file keeps: a row lists everything a model may have. A setting or a tensor that its row does not list was
never proved in a part of a model, so a model with it is not split. Names of settings stand without the architecture's
prefix; a setting in none of the groups is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from meshswarm.artifacts.gguf.check import Hyperparameters

Guess = Callable[[Hyperparameters], int]
Facts = Mapping[str, int]
"""What is known of one layer: the value that each per-layer setting and pattern of its row has there."""
DROPPED_KEYS = frozenset({"nextn_predict_layers"})
"""Settings that no slice has, of any architecture: those of the blocks behind the layers."""
_NO_TEXTS: Mapping[str, frozenset[str]] = MappingProxyType({})
_NO_GUESSES: Mapping[str, Guess] = MappingProxyType({})


class Rollback(Enum):
    """How a session goes back to an earlier position."""

    KV = "kv"
    """By dropping the positions after it: exact at any position."""
    STATE = "state"
    """Only to a position where its state was saved, or to the very start: its layers keep a running state."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A property of layers that llama.cpp derives from a layer's number where a model does not write it out.

    A slice always has it written out, as an array of flags under `key`, one per layer. A model has that array, or a
    period: under `period_key` (None: under `key`), or the architecture's own `default_period`. The last layer of each
    period has 0, the others 1; in a period of 0 all have 1.
    """

    key: str
    period_key: str | None = None
    default_period: int = 0
    needs_key: str | None = None
    """The pattern is there only in models that have this setting, above 0."""
    long_context: int = 0
    long_values: tuple[int, ...] = ()
    """What a model without array and period has from a context of `long_context` on, one value per layer."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A kind of layers of which a span needs one, if the model has any: llama.cpp's memory for it must not be empty."""

    name: str
    is_kind: Callable[[Facts], bool]


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table. Node names are llama.cpp's, of its computation graph."""

    architecture: str
    capture_node: str = "l_out-{layer}"
    """The residual after layer {layer}, before the final norm: float32 [n_rows, row_streams * n_embd]."""
    inject_node: str = "embd"
    """Carries the token embeddings into layer 0, of the same shape: overwritten with received rows."""
    row_streams: int = 1
    needs_tokens: bool = False
    """Every span needs the rows' token ids beside the rows."""
    rollback: Rollback = Rollback.KV
    copies_checkpoints: bool = True
    """Another session may begin at a checkpoint. Not where a saved state holds cells too: llama.cpp copies those when
    it computes next, and they would be others by then."""
    needs_flash_attention: bool = False
    """Without it the same rows come out in other bits after going back."""

    common_keys: frozenset[str] = frozenset()
    """Mean the same in every span: copied as they are."""
    uniform_keys: frozenset[str] = frozenset()
    """As common, and may be an array with one item per layer if all are equal: llama.cpp takes the first for all."""
    layer_keys: frozenset[str] = frozenset()
    """One value for all layers, or an array with one item per layer, which is cut."""
    patterns: tuple[Pattern, ...] = ()
    count_keys: frozenset[str] = frozenset()
    """How many layers, from the model's first on, are of some kind: becomes how many of the span's."""
    first_keys: frozenset[str] = frozenset()
    """Concern the token embedding alone: kept where tokens enter, dropped in other spans."""
    guessed_numbers: Mapping[str, Guess] = field(default_factory=lambda: _NO_GUESSES)
    """Unsigned integers that llama.cpp guesses from a whole model's shape: written out where a model lacks them."""
    proved_texts: Mapping[str, frozenset[str]] = field(default_factory=lambda: _NO_TEXTS)
    """Of the settings that are text: the only values proved."""

    shared_tensors: frozenset[str] = frozenset({"output_norm.weight"})
    """Tensors outside the layers that every span keeps whole."""
    factors_by_context: frozenset[str] = frozenset()
    """Tensors outside the layers of which llama.cpp takes one in a large context and another in a small one, where each
    peer chooses its own. Spans keep them all, take every context for a small one, and have none beyond."""
    last_tensors: frozenset[str] = frozenset()
    """Tensors outside the layers that only a span with the output head keeps."""
    needs_output: bool = False
    """llama.cpp loads no file of it without `output.weight`: spans without the output head hold zeros there."""

    default_window: int | None = None
    """Positions that layers with a window see in a model which does not say how many. None: no layer has a window."""

    start_multiple: int = 1
    """Spans start at multiples of this: llama.cpp has a period in its code that no setting moves."""
    start_multiple_keys: frozenset[str] = frozenset()
    """Spans start at multiples of these settings too."""
    start_kind: LayerKind | None = None
    """Spans start at layers of this kind only."""
    needed_kinds: tuple[LayerKind, ...] = ()
    zero_layers_compute_nothing: bool = True
    """Else a last span, which computes its zero layers, has to do without: it holds every needed kind itself."""
    matched_counts: frozenset[int] = frozenset()
    """Numbers of layers at which llama.cpp computes otherwise: a slice has one of these exactly if its model has it."""
    avoided_counts: frozenset[int] = frozenset()
    """Numbers of layers that no slice has: llama.cpp would take it for another model."""

    def capture_name(self, layer: int) -> str:
        """Name of the graph node to read after `layer`, counted from 0 within the slice."""
        return self.capture_node.format(layer=layer)

    def row_width(self, n_embd: int) -> int:
        """Floats of one position between two spans."""
        return self.row_streams * n_embd
