"""Rows of the architectures whose layers are all attention and feed-forward layers, with or without experts.

Sliding windows are a pattern over them, and latent attention another shape of them; memory is of one kind per pattern.
"""

from __future__ import annotations

from types import MappingProxyType

from meshswarm.artifacts.gguf.check import Hyperparameters
from meshswarm.stage.families.family import Facts, Family, LayerKind, Pattern

_MODEL = frozenset({"block_count", "context_length", "embedding_length", "vocab_size"}) | {
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
}
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
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
    }
)
_ROPE_TYPES = MappingProxyType({"rope.scaling.type": frozenset({"none", "linear", "yarn"})})
"""Not "longrope": it takes other factors in a large context than in a small one, and each peer chooses its own."""
_EXPERTS = frozenset(
    {
        "expert_count",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
        "expert_weights_norm",
        "expert_weights_scale",
    }
)
_LATENT_ATTENTION = frozenset(
    {"attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla"}
)
_SWA = frozenset({"attention.sliding_window", "rope.freq_base_swa"})
_SWA_PATTERN = "attention.sliding_window_pattern"
# llama.cpp builds every layer of these architectures with the first one's.
_UNIFORM = frozenset({"attention.head_count", "attention.head_count_kv", "feed_forward_length"})
_UNIFORM_EXPERTS = _UNIFORM | {"expert_feed_forward_length", "expert_used_count"}
_NORM_AND_FACTORS = frozenset({"output_norm.weight", "rope_freqs.weight"})


def _has_window(facts: Facts) -> bool:
    return facts[_SWA_PATTERN] == 1


_WINDOWED = (LayerKind("sliding-window", _has_window),)


def _windows(period: int, *, needs_key: str | None = None) -> tuple[Pattern, ...]:
    """All layers but the last of each period see a window only."""
    return (Pattern(_SWA_PATTERN, default_period=period, needs_key=needs_key),)


def _no_query_rank(_shape: Hyperparameters) -> int:
    """A model that has no rank for its queries does not compress them."""
    return 0


def _gating(shape: Hyperparameters) -> int:
    """What llama.cpp takes in a file without this setting: sigmoid (2) in GLM-4.7-Flash, softmax (1) in others."""
    return 2 if shape.n_layers in (47, 48) and shape.n_vocab == 154880 else 1


_LLAMAS = (
    Family(
        architecture="llama",
        common_keys=_MODEL | _ROPE | {"expert_count"},
        uniform_keys=_UNIFORM | {"expert_used_count"},
        proved_texts=_ROPE_TYPES,
        shared_tensors=_NORM_AND_FACTORS,
    ),
    Family(
        architecture="llama4",
        # Not "attention.sliding_window": where it is 0, llama.cpp leaves positions out of the last layer it sees.
        common_keys=_MODEL | _ROPE | _EXPERTS | {"interleave_moe_layer_step"},
        uniform_keys=_UNIFORM_EXPERTS,
        patterns=_windows(4),
        default_window=8192,
        proved_texts=_ROPE_TYPES,
        shared_tensors=_NORM_AND_FACTORS,
        start_multiple=4,  # every fourth layer has no positions
        start_multiple_keys=frozenset({"interleave_moe_layer_step"}),
        needed_kinds=_WINDOWED,
    ),
    Family(
        architecture="mistral3",
        common_keys=_MODEL | _ROPE | _EXPERTS | {"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"},
        uniform_keys=_UNIFORM_EXPERTS,
        proved_texts=_ROPE_TYPES,
        shared_tensors=_NORM_AND_FACTORS,
    ),
    Family(
        architecture="smollm3",
        common_keys=_MODEL | _ROPE,
        uniform_keys=_UNIFORM,
        proved_texts=_ROPE_TYPES,
        start_multiple=4,  # every fourth layer has no positions
    ),
    Family(
        architecture="granite",
        common_keys=_MODEL | _ROPE | {"attention.scale", "logit_scale", "residual_scale"},
        uniform_keys=_UNIFORM,
        # Where rows enter it would change no bit: they take the place of what was scaled already.
        first_keys=frozenset({"embedding_scale"}),
        proved_texts=_ROPE_TYPES,
        shared_tensors=_NORM_AND_FACTORS,
    ),
)

_QWENS = (
    Family(
        architecture="qwen2",
        common_keys=_MODEL | _ROPE,
        uniform_keys=_UNIFORM,
        proved_texts=_ROPE_TYPES,
        last_tensors=frozenset({"output.bias"}),
    ),
    Family(
        architecture="qwen2moe",
        common_keys=_MODEL | _ROPE | _EXPERTS,
        uniform_keys=_UNIFORM_EXPERTS,
        proved_texts=_ROPE_TYPES,
        needs_output=True,
    ),
    Family(architecture="qwen3", common_keys=_MODEL | _ROPE, uniform_keys=_UNIFORM, proved_texts=_ROPE_TYPES),
    Family(
        architecture="qwen3moe",
        common_keys=_MODEL | _ROPE | _EXPERTS,
        uniform_keys=_UNIFORM_EXPERTS,
        proved_texts=_ROPE_TYPES,
    ),
)

_WINDOWS = (
    Family(
        architecture="gemma2",
        inject_node="inp_scaled",
        common_keys=_MODEL | _ROPE | _SWA | {"attn_logit_softcapping", "final_logit_softcapping"},
        uniform_keys=_UNIFORM,
        patterns=_windows(2),
        default_window=4096,
        proved_texts=_ROPE_TYPES,
        needed_kinds=_WINDOWED,
        matched_counts=frozenset({46}),  # the 27B model, whose attention scale is another
    ),
    Family(
        architecture="gemma3",
        inject_node="inp_scaled",
        common_keys=_MODEL | _ROPE | _SWA | {"final_logit_softcapping"},
        uniform_keys=_UNIFORM,
        patterns=_windows(6, needs_key="attention.sliding_window"),
        default_window=0,
        proved_texts=_ROPE_TYPES,
        needed_kinds=_WINDOWED,
        matched_counts=frozenset({62}),  # as above
    ),
    Family(
        architecture="cohere2",
        common_keys=_MODEL | _ROPE | _SWA | {"attention.layer_norm_epsilon", "logit_scale"},
        uniform_keys=_UNIFORM,
        patterns=_windows(4),
        default_window=0,
        proved_texts=_ROPE_TYPES,
        needed_kinds=_WINDOWED,
    ),
    Family(
        architecture="gpt-oss",
        common_keys=_MODEL | _ROPE | _SWA | _EXPERTS,
        uniform_keys=_UNIFORM_EXPERTS,
        patterns=_windows(2),
        default_window=0,
        proved_texts=_ROPE_TYPES,
        needs_output=True,
        needed_kinds=_WINDOWED,
    ),
    Family(
        architecture="olmo2",
        common_keys=_MODEL | _ROPE | _SWA,
        uniform_keys=_UNIFORM,
        patterns=_windows(4, needs_key="attention.sliding_window"),
        default_window=0,
        proved_texts=_ROPE_TYPES,
        needs_output=True,
        needed_kinds=_WINDOWED,
    ),
    Family(
        architecture="phi3",
        # llama.cpp computes its windows as full attention.
        common_keys=_MODEL | _ROPE | {"attention.sliding_window"},
        uniform_keys=_UNIFORM,
        proved_texts=_ROPE_TYPES,
        factors_by_context=frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
    ),
)

_LEADING_DENSE = (
    Family(
        architecture="glm4",
        common_keys=_MODEL | _ROPE,
        uniform_keys=_UNIFORM,
        proved_texts=_ROPE_TYPES,
    ),
    Family(
        architecture="glm4moe",
        common_keys=_MODEL | _ROPE | _EXPERTS,
        uniform_keys=_UNIFORM_EXPERTS,
        count_keys=frozenset({"leading_dense_block_count"}),
        proved_texts=_ROPE_TYPES,
    ),
    Family(
        architecture="minimax-m2",
        common_keys=_MODEL | _ROPE | _EXPERTS,
        uniform_keys=_UNIFORM_EXPERTS,
        proved_texts=_ROPE_TYPES,
        needs_output=True,
    ),
    Family(
        architecture="deepseek2",
        common_keys=_MODEL
        | _ROPE
        | _EXPERTS
        | _LATENT_ATTENTION
        | {
            "attention.temperature_length",
            "attention.temperature_scale",
            "rope.scaling.yarn_log_multiplier",
        },
        uniform_keys=_UNIFORM_EXPERTS,
        count_keys=frozenset({"leading_dense_block_count"}),
        guessed_numbers=MappingProxyType({"attention.q_lora_rank": _no_query_rank, "expert_gating_func": _gating}),
        proved_texts=_ROPE_TYPES,
        avoided_counts=frozenset({26, 27, 48}),  # taken for models without a rank for their queries
    ),
)

TRANSFORMERS = _LLAMAS + _QWENS + _WINDOWS + _LEADING_DENSE
