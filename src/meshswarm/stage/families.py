"""Which architectures may be split between layers, and where hidden states leave and enter their graphs.

The rule this file keeps: an architecture stands here only when a parity test proved its cuts, since several wrong
cuts load fine and answer silently wrong. All others are served whole. One row per architecture, as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshswarm.errors import ConfigError
from meshswarm.span import Span


class IllegalCutError(ConfigError):
    """This model cannot be cut there, or not at all; the message says why and what can be served instead."""


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one architecture are cut. Node names are llama.cpp's, of its computation graph."""

    architecture: str
    capture_node: str  # the residual after layer {layer}, before the final norm: float32 [n_rows, n_embd]
    inject_node: str  # carries the token embeddings into layer 0: overwritten with received rows
    uniform_keys: frozenset[str]  # metadata (without the architecture's prefix) that may be an array, all values equal
    common_keys: frozenset[str]  # metadata that means the same in every span; a model with any other is not split
    proved_texts: Mapping[str, frozenset[str]]  # of the common keys that are text: the only values proved
    shared_tensors: frozenset[str]  # tensors outside the layers that every span keeps whole

    def capture_name(self, layer: int) -> str:
        """Name of the graph node to read after `layer`, counted from 0 within the slice."""
        return self.capture_node.format(layer=layer)


_ROWS = (
    Family(
        architecture="llama",
        capture_node="l_out-{layer}",
        inject_node="embd",
        # One value for all layers: llama.cpp builds every layer of this architecture with the first one's.
        uniform_keys=frozenset({"attention.head_count", "attention.head_count_kv", "feed_forward_length"}),
        common_keys=frozenset(
            {
                "block_count",
                "context_length",
                "embedding_length",
                "vocab_size",
                "attention.key_length",
                "attention.value_length",
                "attention.layer_norm_rms_epsilon",
                "expert_count",
                "expert_used_count",
                "rope.dimension_count",
                "rope.freq_base",
                "rope.scale_linear",
                "rope.scaling.attn_factor",
                "rope.scaling.factor",
                "rope.scaling.finetuned",
                "rope.scaling.original_context_length",
                "rope.scaling.type",
            }
        ),
        # Not "longrope": it takes other factors in a large context than in a small one, and each peer chooses its own.
        proved_texts=MappingProxyType({"rope.scaling.type": frozenset({"none", "linear", "yarn"})}),
        shared_tensors=frozenset({"output_norm.weight", "rope_freqs.weight"}),
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _ROWS})


def check_cut(architecture: str, n_layers: int, span: Span) -> Family | None:
    """The row to cut `span` by; None when the span is the whole model and nothing is cut.

    Raises IllegalCutError for a span outside the model, or a cut of an architecture whose cuts are not proved.
    """
    if span.stop > n_layers:
        raise IllegalCutError(f"the layers {span} are outside the model, which has the layers 0:{n_layers}")
    family = FAMILIES.get(architecture)
    if family is None and span != Span(0, n_layers):
        provable = ", ".join(sorted(FAMILIES))
        raise IllegalCutError(
            f"models of the architecture {architecture!r} are served whole (layers 0:{n_layers}), not as {span}: no "
            f"test has proved yet that they can be split exactly (proved: {provable})"
        )
    return family if span != Span(0, n_layers) else None
