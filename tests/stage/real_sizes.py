"""Models of the size people aim at, as headers: every tensor's name, shape and encoding, and no weights.

Only what their publishers say stands under `published`. All else under `assumed` was chosen here so that the parts fit
together and add up to the published number of parameters; it is not known of the real models. Tensors are those that
llama.cpp 0.3.36 asks for, which `test_real_sizes` checks by loading each file without its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Encoding
from gguf import GGUFWriter
from gguf.quants import quant_shape_to_byte_shape
from tests.stage.gguf_writing import add

Shape = tuple[int, ...]
"""Sides as a GGUF file has them: the first runs fastest."""


@dataclass(frozen=True)
class RealSize:
    """`published` and `assumed`: metadata without the architecture's prefix. `n_parameters`: published."""

    architecture: str
    n_parameters: float
    published: Mapping[str, Any]
    assumed: Mapping[str, Any]
    expert_encoding: Encoding  # assumed, as `encoding` is
    encoding: Encoding = Encoding.Q8_0

    @property
    def keys(self) -> dict[str, Any]:
        return dict(self.published) | dict(self.assumed)

    def tensors(self) -> dict[str, Shape]:
        """Every tensor's shape, by name."""
        keys = self.keys
        shapes = dict(_TENSORS[self.architecture](keys))
        return _outer(keys) | shapes

    def encoding_of(self, name: str, shape: Shape) -> Encoding:
        if name.endswith("tid2eid.weight"):
            return Encoding.I32
        if len(shape) == 1 or any(part in name for part in _KEPT_F32):
            return Encoding.F32
        return self.expert_encoding if "_exps." in name else self.encoding

    def write(self, path: Path) -> Path:
        """Write the header to `path`, and behind it a hole as long as the weights."""
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            add(writer, f"{self.architecture}.{key}", value)
        writer.add_tokenizer_model("no_vocab")
        weight_bytes = 0
        for name, shape in self.tensors().items():
            encoding = self.encoding_of(name, shape)
            rows_first = quant_shape_to_byte_shape(shape[::-1], encoding)
            n_bytes = math.prod(rows_first)
            writer.add_tensor_info(name, rows_first, np.dtype(np.uint8), n_bytes, raw_dtype=encoding)
            weight_bytes += -(-n_bytes // writer.data_alignment) * writer.data_alignment
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + writer.data_alignment + weight_bytes)
        return path


_KEPT_F32 = ("norm", "ffn_gate_inp", "hc_", "conv1d", "exp_probs", "_ape", "ssm_alpha", "ssm_beta")


def _outer(keys: Mapping[str, Any]) -> dict[str, Shape]:
    n_embd, n_vocab = keys["embedding_length"], keys["vocab_size"]
    return {
        "token_embd.weight": (n_embd, n_vocab),
        "output_norm.weight": (n_embd,),
        "output.weight": (n_embd, n_vocab),
    }


def _experts(keys: Mapping[str, Any], at: str) -> Iterator[tuple[str, Shape]]:
    n_embd, n_ff, n_experts = (keys[key] for key in ("embedding_length", "expert_feed_forward_length", "expert_count"))
    yield f"{at}.ffn_gate_inp.weight", (n_embd, n_experts)
    yield f"{at}.ffn_gate_exps.weight", (n_embd, n_ff, n_experts)
    yield f"{at}.ffn_up_exps.weight", (n_embd, n_ff, n_experts)
    yield f"{at}.ffn_down_exps.weight", (n_ff, n_embd, n_experts)


def _feed_forward(n_embd: int, n_ff: int, at: str, end: str = "") -> Iterator[tuple[str, Shape]]:
    yield f"{at}.ffn_gate{end}.weight", (n_embd, n_ff)
    yield f"{at}.ffn_up{end}.weight", (n_embd, n_ff)
    yield f"{at}.ffn_down{end}.weight", (n_ff, n_embd)


def _glm_dsa(keys: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    n_embd, heads = keys["embedding_length"], keys["attention.head_count"]
    q_rank, kv_rank = keys["attention.q_lora_rank"], keys["attention.kv_lora_rank"]
    key_size, value_size = keys["attention.key_length_mla"], keys["attention.value_length_mla"]
    rope = keys["rope.dimension_count"]
    indexers, indexer_size = keys["attention.indexer.head_count"], keys["attention.indexer.key_length"]
    types = [*keys["attention.indexer.types"], *[1] * keys["nextn_predict_layers"]]
    for layer in range(keys["block_count"]):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (n_embd,)
        yield f"{at}.attn_q_a_norm.weight", (q_rank,)
        yield f"{at}.attn_kv_a_norm.weight", (kv_rank,)
        yield f"{at}.attn_q_a.weight", (n_embd, q_rank)
        yield f"{at}.attn_q_b.weight", (q_rank, heads * key_size)
        yield f"{at}.attn_kv_a_mqa.weight", (n_embd, kv_rank + rope)
        yield f"{at}.attn_k_b.weight", (key_size - rope, kv_rank, heads)
        yield f"{at}.attn_v_b.weight", (kv_rank, value_size, heads)
        yield f"{at}.attn_output.weight", (heads * value_size, n_embd)
        yield f"{at}.ffn_norm.weight", (n_embd,)
        if types[layer]:
            yield f"{at}.indexer.k_norm.weight", (indexer_size,)
            yield f"{at}.indexer.k_norm.bias", (indexer_size,)
            yield f"{at}.indexer.proj.weight", (n_embd, indexers)
            yield f"{at}.indexer.attn_k.weight", (n_embd, indexer_size)
            yield f"{at}.indexer.attn_q_b.weight", (q_rank, indexers * indexer_size)
        if layer < keys["leading_dense_block_count"]:
            yield from _feed_forward(n_embd, keys["feed_forward_length"], at)
        else:
            yield f"{at}.exp_probs_b.bias", (keys["expert_count"],)
            yield from _experts(keys, at)
            n_shared = keys["expert_feed_forward_length"] * keys["expert_shared_count"]
            yield from _feed_forward(n_embd, n_shared, at, "_shexp")
        if layer >= len(keys["attention.indexer.types"]):
            yield f"{at}.nextn.eh_proj.weight", (2 * n_embd, n_embd)
            yield f"{at}.nextn.enorm.weight", (n_embd,)
            yield f"{at}.nextn.hnorm.weight", (n_embd,)


def _deepseek4(keys: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    n_embd, heads, head = keys["embedding_length"], keys["attention.head_count"], keys["attention.key_length"]
    q_rank, o_rank = keys["attention.q_lora_rank"], keys["attention.output_lora_rank"]
    groups, streams = keys["attention.output_group_count"], keys["hyper_connection.count"]
    indexers, indexer_size = keys["attention.indexer.head_count"], keys["attention.indexer.key_length"]
    mix = (2 + streams) * streams
    yield "output_hc_fn.weight", (streams * n_embd, streams)
    yield "output_hc_base.weight", (streams,)
    yield "output_hc_scale.weight", (1,)
    for layer, ratio in enumerate(keys["attention.compress_ratios"]):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (n_embd,)
        yield f"{at}.attn_sinks.weight", (heads,)
        yield f"{at}.attn_q_a.weight", (n_embd, q_rank)
        yield f"{at}.attn_q_a_norm.weight", (q_rank,)
        yield f"{at}.attn_q_b.weight", (q_rank, heads * head)
        yield f"{at}.attn_kv.weight", (n_embd, head)
        yield f"{at}.attn_kv_a_norm.weight", (head,)
        yield f"{at}.attn_output_a.weight", (heads * head // groups, o_rank * groups)
        yield f"{at}.attn_output_b.weight", (groups * o_rank, n_embd)
        for part in ("attn", "ffn"):
            yield f"{at}.hc_{part}_fn.weight", (streams * n_embd, mix)
            yield f"{at}.hc_{part}_base.weight", (mix,)
            yield f"{at}.hc_{part}_scale.weight", (3,)
        if ratio:
            width = head * (2 if ratio == 4 else 1)
            yield f"{at}.attn_compressor_kv.weight", (n_embd, width)
            yield f"{at}.attn_compressor_gate.weight", (n_embd, width)
            yield f"{at}.attn_compressor_ape.weight", (width, ratio)
            yield f"{at}.attn_compressor_norm.weight", (head,)
        if ratio == 4:
            yield f"{at}.indexer.proj.weight", (n_embd, indexers)
            yield f"{at}.indexer.attn_q_b.weight", (q_rank, indexers * indexer_size)
            yield f"{at}.indexer_compressor_kv.weight", (n_embd, 2 * indexer_size)
            yield f"{at}.indexer_compressor_gate.weight", (n_embd, 2 * indexer_size)
            yield f"{at}.indexer_compressor_ape.weight", (2 * indexer_size, ratio)
            yield f"{at}.indexer_compressor_norm.weight", (indexer_size,)
        if layer < keys["hash_layer_count"]:
            yield f"{at}.ffn_gate_tid2eid.weight", (keys["expert_used_count"], keys["vocab_size"])
        else:
            yield f"{at}.exp_probs_b.bias", (keys["expert_count"],)
        yield f"{at}.ffn_norm.weight", (n_embd,)
        yield from _experts(keys, at)
        n_shared = keys["expert_feed_forward_length"] * keys["expert_shared_count"]
        yield from _feed_forward(n_embd, n_shared, at, "_shexp")


def _qwen35moe(keys: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    n_embd, heads, kv_heads = (keys[key] for key in ("embedding_length", "attention.head_count", _KV_HEADS))
    head, state, inner = keys["attention.key_length"], keys["ssm.state_size"], keys["ssm.inner_size"]
    conv = inner + 2 * keys["ssm.group_count"] * state
    for layer in range(keys["block_count"]):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (n_embd,)
        yield f"{at}.post_attention_norm.weight", (n_embd,)
        if (layer + 1) % keys["full_attention_interval"] == 0:
            yield f"{at}.attn_q.weight", (n_embd, 2 * heads * head)
            yield f"{at}.attn_k.weight", (n_embd, kv_heads * head)
            yield f"{at}.attn_v.weight", (n_embd, kv_heads * head)
            yield f"{at}.attn_output.weight", (heads * head, n_embd)
            yield f"{at}.attn_q_norm.weight", (head,)
            yield f"{at}.attn_k_norm.weight", (head,)
        else:
            yield f"{at}.attn_qkv.weight", (n_embd, conv)
            yield f"{at}.attn_gate.weight", (n_embd, inner)
            yield f"{at}.ssm_conv1d.weight", (keys["ssm.conv_kernel"], conv)
            yield f"{at}.ssm_dt.bias", (keys["ssm.time_step_rank"],)
            yield f"{at}.ssm_a", (keys["ssm.time_step_rank"],)
            yield f"{at}.ssm_beta.weight", (n_embd, keys["ssm.time_step_rank"])
            yield f"{at}.ssm_alpha.weight", (n_embd, keys["ssm.time_step_rank"])
            yield f"{at}.ssm_norm.weight", (state,)
            yield f"{at}.ssm_out.weight", (inner, n_embd)
        yield from _experts(keys, at)
        yield f"{at}.ffn_gate_inp_shexp.weight", (n_embd,)
        yield from _feed_forward(n_embd, keys["expert_shared_feed_forward_length"], at, "_shexp")


_KV_HEADS = "attention.head_count_kv"
_TENSORS = {"glm-dsa": _glm_dsa, "deepseek4": _deepseek4, "qwen35moe": _qwen35moe}

GLM_5_2 = RealSize(
    architecture="glm-dsa",
    n_parameters=753e9,
    published={
        "embedding_length": 6144,
        "context_length": 1 << 20,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "rope.dimension_count": 64,
    },
    assumed={
        "block_count": 79,  # the published 78, and one that predicts a further token
        "nextn_predict_layers": 1,
        "vocab_size": 154_880,
        "feed_forward_length": 12_288,
        "leading_dense_block_count": 3,
        "attention.head_count": 64,
        "attention.head_count_kv": 1,
        "attention.key_length": 576,  # latent and rotary part: what K is in llama.cpp
        "attention.value_length": 512,
        "attention.q_lora_rank": 2048,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.indexer.head_count": 32,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "attention.indexer.types": [int(layer < 3 or layer % 4 == 2) for layer in range(78)],
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 2048,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "rope.freq_base": 1e6,
    },
    expert_encoding=Encoding.Q4_K,
)
DEEPSEEK_V4_FLASH = RealSize(
    architecture="deepseek4",
    n_parameters=284e9,
    published={
        "block_count": 43,
        "embedding_length": 4096,
        "context_length": 1 << 20,
        "attention.head_count": 64,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": 1024,
        "attention.output_lora_rank": 1024,
        "attention.sliding_window": 128,
        "expert_count": 256,
        "expert_used_count": 6,
        "hyper_connection.count": 4,
        "rope.dimension_count": 64,
    },
    assumed={
        "vocab_size": 129_280,
        "feed_forward_length": 2048,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.output_group_count": 8,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512,
        "attention.compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43))],
        "attention.compress_rope_freq_base": 160_000.0,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 2048,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "hash_layer_count": 3,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "rope.freq_base": 10_000.0,
        "swiglu_clamp_exp": 10.0,
    },
    expert_encoding=Encoding.MXFP4,
)
ORNITH_1_0 = RealSize(
    architecture="qwen35moe",
    n_parameters=397e9,
    published={"block_count": 60, "full_attention_interval": 4},
    assumed={
        "embedding_length": 4096,
        "context_length": 1 << 18,
        "vocab_size": 248_320,
        "attention.head_count": 32,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": 512,
        "expert_used_count": 10,
        "expert_feed_forward_length": 1024,
        "expert_shared_feed_forward_length": 1024,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 16,
        "ssm.inner_size": 8192,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 64,
    },
    expert_encoding=Encoding.Q8_0,
)
REAL_SIZES = {"GLM-5.2": GLM_5_2, "DeepSeek-V4-Flash": DEEPSEEK_V4_FLASH, "Ornith-1.0-397B": ORNITH_1_0}
