"""Rows of the architectures whose layers are all attention and feed-forward layers, with or without experts."""

from __future__ import annotations

from types import MappingProxyType

from meshswarm.stage.families.family import Family

_SHAPE = frozenset({"block_count", "context_length", "embedding_length", "vocab_size"})
_ROPE = frozenset(
    {
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
    }
)
_HEAD_SIZES = frozenset({"attention.key_length", "attention.value_length"})
_RMS_NORM = frozenset({"attention.layer_norm_rms_epsilon"})
_ROPE_TYPES = MappingProxyType({"rope.scaling.type": frozenset({"none", "linear", "yarn"})})
"""Not "longrope": it takes other factors in a large context than in a small one, and each peer chooses its own."""

TRANSFORMERS = (
    Family(
        architecture="llama",
        # One value for all layers: llama.cpp builds every layer of this architecture with the first one's.
        uniform_keys=frozenset({"attention.head_count", "attention.head_count_kv", "feed_forward_length"}),
        common_keys=_SHAPE | _ROPE | _HEAD_SIZES | _RMS_NORM | {"expert_count", "expert_used_count"},
        proved_texts=_ROPE_TYPES,
        shared_tensors=frozenset({"output_norm.weight", "rope_freqs.weight"}),
    ),
)
