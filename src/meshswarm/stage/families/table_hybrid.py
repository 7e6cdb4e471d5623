"""Rows of the architectures whose layers are of more than one kind: recurrent, convolution or compressed attention.

The rule of their cuts: llama.cpp keeps one memory for each kind of layers, and a span without a layer of a kind ends
the process in a zero-sized memory. So a span that lacks a kind gets a zero layer of it.
"""

from __future__ import annotations

from types import MappingProxyType

from meshswarm.stage.families.family import Facts, Family, LayerKind, Pattern, Rollback

_SHAPE = frozenset({"block_count", "context_length", "embedding_length", "vocab_size"})
_ATTENTION = frozenset({"attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon"})
_ROPE = frozenset({"rope.dimension_count", "rope.freq_base"}) | {
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
}
_ROPE_TYPES = MappingProxyType({"rope.scaling.type": frozenset({"none", "linear", "yarn"})})
_EXPERTS = frozenset({"expert_count", "expert_gating_func", "expert_shared_count", "expert_weights_norm"}) | {
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_feed_forward_length",
    "expert_weights_scale",
}
_EXPERT_LAYERS = frozenset({"expert_feed_forward_length", "expert_used_count"})
_SSM = frozenset({"ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"})
_INDEXER = frozenset({"attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k"})
_MLA = frozenset({"attention.q_lora_rank", "attention.kv_lora_rank"}) | {
    "attention.key_length_mla",
    "attention.value_length_mla",
}
# llama.cpp takes the number of heads from layer 0 alone where it sizes a head: an array with 0 there breaks a slice.
_HEADS = frozenset({"attention.head_count"})
_YARN_LOG = "rope.scaling.yarn_log_multiplier"
_KV_HEADS = "attention.head_count_kv"
_RECURRENT = "attention.recurrent_layers"
_RATIOS = "attention.compress_ratios"
_INDEXER_TYPES = "attention.indexer.types"
_GLM_5_2_TYPES = (1, 1, *(1, 0, 0, 0) * 19)
"""What llama.cpp gives a model of its context length whose file does not say it."""


def _has_kv_heads(facts: Facts) -> bool:
    return facts[_KV_HEADS] > 0


def _has_no_kv_heads(facts: Facts) -> bool:
    return facts[_KV_HEADS] == 0


def _is_mamba(facts: Facts) -> bool:
    return facts[_KV_HEADS] == 0 and facts["feed_forward_length"] == 0


def _is_recurrent(facts: Facts) -> bool:
    return facts[_RECURRENT] == 1


def _is_full_attention(facts: Facts) -> bool:
    return facts[_RECURRENT] == 0


def _is_compressed_by_4(facts: Facts) -> bool:
    return facts[_RATIOS] == 4


def _has_indexer(facts: Facts) -> bool:
    return facts[_INDEXER_TYPES] == 1


_BY_KV_HEADS = (LayerKind("attention", _has_kv_heads), LayerKind("recurrent", _has_no_kv_heads))
_BY_FLAG = (LayerKind("attention", _is_full_attention), LayerKind("recurrent", _is_recurrent))
_DELTA_NET_KEYS = _SHAPE | _ATTENTION | _ROPE | _SSM
_DELTA_NET_PATTERN = Pattern(_RECURRENT, period_key="full_attention_interval", default_period=4)

_DELTA_NETS = (
    Family(
        architecture="qwen35",
        proved_texts=_ROPE_TYPES,
        inject_node="model.input_embed",
        rollback=Rollback.STATE,
        common_keys=_DELTA_NET_KEYS | {"rope.dimension_sections"},
        uniform_keys=_HEADS | {_KV_HEADS, "feed_forward_length"},
        patterns=(_DELTA_NET_PATTERN,),
        needed_kinds=_BY_FLAG,
    ),
    Family(
        architecture="qwen35moe",
        proved_texts=_ROPE_TYPES,
        inject_node="model.input_embed",
        rollback=Rollback.STATE,
        common_keys=_DELTA_NET_KEYS | _EXPERTS | {"rope.dimension_sections"},
        uniform_keys=_HEADS | {_KV_HEADS, "feed_forward_length"},
        layer_keys=_EXPERT_LAYERS,
        patterns=(_DELTA_NET_PATTERN,),
        needed_kinds=_BY_FLAG,
    ),
    Family(
        architecture="qwen3next",
        proved_texts=_ROPE_TYPES,
        inject_node="model.embed_tokens",
        rollback=Rollback.STATE,
        common_keys=_DELTA_NET_KEYS | _EXPERTS,
        uniform_keys=_HEADS | {_KV_HEADS, "feed_forward_length"},
        layer_keys=_EXPERT_LAYERS,
        patterns=(_DELTA_NET_PATTERN,),
        needed_kinds=_BY_FLAG,
    ),
)

_CONVOLUTIONS = (
    Family(
        architecture="lfm2",
        proved_texts=_ROPE_TYPES,
        inject_node="model.embed_tokens",
        rollback=Rollback.STATE,
        # Not "attention.sliding_window": a third kind of memory, unproved.
        common_keys=_SHAPE | _ATTENTION | _ROPE | {"shortconv.l_cache"},
        uniform_keys=_HEADS | {"feed_forward_length"},
        layer_keys=frozenset({_KV_HEADS}),
        shared_tensors=frozenset({"token_embd_norm.weight"}),
        needed_kinds=_BY_KV_HEADS,
    ),
    Family(
        architecture="lfm2moe",
        proved_texts=_ROPE_TYPES,
        inject_node="model.embed_tokens",
        rollback=Rollback.STATE,
        common_keys=_SHAPE | _ATTENTION | _ROPE | _EXPERTS | {"shortconv.l_cache"},
        uniform_keys=_HEADS | {"feed_forward_length"},
        layer_keys=_EXPERT_LAYERS | {_KV_HEADS},
        count_keys=frozenset({"leading_dense_block_count"}),
        shared_tensors=frozenset({"token_embd_norm.weight"}),
        needed_kinds=_BY_KV_HEADS,
    ),
)

_MAMBAS = (
    Family(
        architecture="granitehybrid",
        proved_texts=_ROPE_TYPES,
        rollback=Rollback.STATE,
        common_keys=_SHAPE
        | _ATTENTION
        | _ROPE
        | _SSM
        | _EXPERTS
        # Here it switches rotary positions off and on.
        | {"attention.scale", "logit_scale", "residual_scale", "rope.scaling.finetuned"},
        uniform_keys=_HEADS | {"feed_forward_length"},
        layer_keys=_EXPERT_LAYERS | {_KV_HEADS},
        # Where rows enter it would change no bit: they take the place of what was scaled already.
        first_keys=frozenset({"embedding_scale"}),
        needed_kinds=_BY_KV_HEADS,
    ),
    *(
        Family(
            architecture=architecture,
            proved_texts=_ROPE_TYPES,
            # Its "l_out" stands before the residual is added, and in feed-forward layers only.
            capture_node="nemotron_h_block_out-{layer}",
            rollback=Rollback.STATE,
            common_keys=_SHAPE
            | _ATTENTION
            | _ROPE
            | _SSM
            | _EXPERTS
            | {"attention.layer_norm_epsilon"}
            # How wide an expert's input is.
            | {"moe_latent_size"},
            uniform_keys=_HEADS,
            layer_keys=_EXPERT_LAYERS | {_KV_HEADS, "feed_forward_length"},
            needed_kinds=(LayerKind("attention", _has_kv_heads), LayerKind("recurrent", _is_mamba)),
        )
        for architecture in ("nemotron_h", "nemotron_h_moe")
    ),
)

_SPARSE_ATTENTION = (
    Family(
        architecture="deepseek32",
        proved_texts=_ROPE_TYPES,
        common_keys=_SHAPE | _ATTENTION | _ROPE | _MLA | _EXPERTS | _INDEXER | {_YARN_LOG},
        uniform_keys=_HEADS | {_KV_HEADS, "feed_forward_length"},
        layer_keys=_EXPERT_LAYERS,
        count_keys=frozenset({"leading_dense_block_count"}),
    ),
    Family(
        architecture="glm-dsa",
        proved_texts=_ROPE_TYPES,
        common_keys=_SHAPE | _ATTENTION | _ROPE | _MLA | _EXPERTS | _INDEXER | {_YARN_LOG},
        uniform_keys=_HEADS | {_KV_HEADS, "feed_forward_length"},
        layer_keys=_EXPERT_LAYERS,
        # A layer without an indexer works with the positions that the last one with an indexer picked.
        patterns=(Pattern(_INDEXER_TYPES, long_context=1 << 20, long_values=_GLM_5_2_TYPES),),
        count_keys=frozenset({"leading_dense_block_count"}),
        start_kind=LayerKind("with an indexer of its own", _has_indexer),
    ),
    Family(
        architecture="deepseek4",
        needs_flash_attention=True,
        proved_texts=_ROPE_TYPES,
        # Four residual streams a position. The first layers choose experts by token.
        capture_node="l_last-{layer}",
        inject_node="hc_init",
        default_window=0,
        row_streams=4,
        needs_tokens=True,
        rollback=Rollback.STATE,
        copies_checkpoints=False,
        common_keys=_SHAPE
        | _ATTENTION
        | _ROPE
        | _EXPERTS
        | _INDEXER
        | {
            "attention.compress_rope_freq_base",
            "attention.output_group_count",
            "attention.output_lora_rank",
            "attention.q_lora_rank",
            "attention.sliding_window",
            "embedding_length_out",
            "hyper_connection.count",
            "hyper_connection.epsilon",
            "hyper_connection.sinkhorn_iterations",
        },
        uniform_keys=_HEADS | {_KV_HEADS, "feed_forward_length", "swiglu_clamp_exp", "swiglu_clamp_shexp"},
        layer_keys=_EXPERT_LAYERS | {_RATIOS},
        count_keys=frozenset({"hash_layer_count"}),
        shared_tensors=frozenset(
            {"output_norm.weight", "output_hc_base.weight", "output_hc_fn.weight", "output_hc_scale.weight"}
        ),
        needs_output=True,
        needed_kinds=(LayerKind("attention compressed by 4", _is_compressed_by_4),),
        # It mixes the streams even where it adds nothing to them.
        zero_layers_compute_nothing=False,
    ),
)

HYBRIDS: tuple[Family, ...] = _DELTA_NETS + _CONVOLUTIONS + _MAMBAS + _SPARSE_ATTENTION
