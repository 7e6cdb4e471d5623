"""Tiny random-weight models of every architecture the swarm splits, as files that stock llama.cpp loads.

`TINY` has one entry a model, named after what it is like; its metadata is what llama.cpp's converter writes for the
real ones, with small numbers. `write_tiny("gemma3", path, encoding=Encoding.Q8_0)` writes it, changed as told.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gguf import GGMLQuantizationType as Encoding
from gguf import GGUFWriter
from tests.stage.gguf_writing import add, add_vocabulary
from tests.stage.tiny_weights import asked_shapes, encoded, encoding_of, random_experts, random_numbers

N_VOCAB = 160
N_EMBD = 128
N_FF = 96
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
WINDOW = 16
"""Positions a sliding-window layer sees."""
N_EXPERTS = 8
TOP_K = 8
"""Positions an indexer picks."""


_OPTIONAL = r"rope_freqs.weight|.*[._]scale|dense_2.*|exp_probs_b_vl.bias"
_BIASES = _OPTIONAL + r"|(attn_(q|k|v|output|norm)|ffn_(gate|up|down|norm)(_exps|_shexp)?|output_norm)\.bias"


@dataclass(frozen=True)
class TinyModel:
    """What a model has. `keys`: metadata without the architecture's prefix; a float is stored as one, a list of bool
    or int as an array, None leaves the key out. `without`: optional tensors the model lacks, a pattern of whole names
    without the layer's prefix. `embedding_std`: size of the token embedding's numbers."""

    architecture: str
    n_layers: int = 4
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    without: str = _BIASES
    embedding_std: float = 1.0
    has_fused_qkv: bool = False
    encoding: Encoding = Encoding.F32

    @property
    def all_keys(self) -> dict[str, Any]:
        """The metadata under the architecture's prefix."""
        usual = {
            "block_count": self.n_layers,
            "context_length": 512,
            "embedding_length": N_EMBD,
            "feed_forward_length": N_FF,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
            "vocab_size": N_VOCAB,
        }
        return {key: value for key, value in (usual | dict(self.keys)).items() if value is not None}


def write_tiny(name: str, path: Path, **changes: Any) -> Path:
    """Write the model `name` of `TINY` to `path`. `changes` replace its fields; `keys` are added to its own."""
    model = TINY[name]
    if "keys" in changes:
        changes["keys"] = dict(model.keys) | changes["keys"]
    model = replace(model, **changes)
    keys = model.all_keys
    writer = _writer(path, model.architecture, keys)
    for tensor, shape in _shapes(model, keys).items():
        if tensor.endswith("ffn_gate_tid2eid.weight"):
            writer.add_tensor(tensor, random_experts(tensor, shape, keys["expert_count"]))
            continue
        numbers = random_numbers(tensor, shape, embedding_std=model.embedding_std)
        encoding = encoding_of(tensor, shape, model.encoding)
        writer.add_tensor(tensor, encoded(numbers, encoding), raw_dtype=encoding)
    _write(writer)
    return path


def _shapes(model: TinyModel, keys: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The model's tensors: what llama.cpp asks for, but for what its real files lack or hold together."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.gguf"
        _write(_writer(metadata, model.architecture, keys))
        asked = asked_shapes(metadata)
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, shape in asked.items():
        layer, _, part = tensor.removeprefix("blk.").partition(".") if tensor.startswith("blk.") else ("", "", tensor)
        if re.fullmatch(model.without, part):
            continue
        if model.has_fused_qkv and part in ("attn_q.weight", "attn_k.weight", "attn_v.weight"):
            fused = f"blk.{layer}.attn_qkv.weight"
            shapes[fused] = (shapes.get(fused, (0,))[0] + shape[0], shape[1])
        elif part == "ffn_gate_up_exps.weight":
            halves = (shape[0], shape[1] // 2, shape[2])
            shapes |= {f"blk.{layer}.ffn_{half}_exps.weight": halves for half in ("gate", "up")}
        elif not (layer and part.startswith("indexer.") and _shares_indexer(keys, int(layer))):
            shapes[tensor] = shape
    return shapes


def _shares_indexer(keys: Mapping[str, Any], layer: int) -> bool:
    """Whether this layer works with the positions that an earlier one picked, and has no indexer of its own."""
    types = keys.get("attention.indexer.types", ())
    return layer < len(types) and not types[layer]


def _writer(path: Path, architecture: str, keys: Mapping[str, Any]) -> GGUFWriter:
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        add(writer, f"{architecture}.{key}", value)
    add_vocabulary(writer, N_VOCAB)
    return writer


def _write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_HEAD = {"attention.key_length": HEAD_SIZE, "attention.value_length": HEAD_SIZE, "rope.dimension_count": HEAD_SIZE}
_MOE = {"expert_count": N_EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 64}
_GATING = {"expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True}  # 2: sigmoid
_MLA = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 48,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.1,
}
_INDEXER = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": TOP_K,
}
_DELTA_NET = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "full_attention_interval": 4,
}
_MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 256,
}

TINY: Mapping[str, TinyModel] = MappingProxyType(
    {
        "llama": TinyModel("llama", keys=_HEAD),
        "mixtral": TinyModel("llama", keys=_HEAD | {"expert_count": N_EXPERTS, "expert_used_count": 2}),
        "mistral3": TinyModel(
            "mistral3",
            keys=_HEAD
            | _YARN
            | {
                "rope.scaling.yarn_beta_fast": 32.0,
                "rope.scaling.yarn_beta_slow": 1.0,
                "attention.temperature_scale": 0.1,
                "rope.scaling.original_context_length": 16,
            },
        ),
        "qwen2": TinyModel("qwen2", without=_OPTIONAL + r"|attn_output.bias|ffn_.*\.bias"),
        "qwen2moe": TinyModel(
            "qwen2moe",
            keys=_MOE | {"expert_shared_feed_forward_length": 64},
            without=_OPTIONAL + r"|attn_output.bias|ffn_.*\.bias",
        ),
        "qwen3": TinyModel("qwen3", keys=_HEAD, without=_BIASES + r"|cls.*"),
        "qwen3moe": TinyModel("qwen3moe", keys=_HEAD | _MOE),
        "gemma2": TinyModel(
            "gemma2",
            keys=_HEAD
            | {
                "attention.sliding_window": WINDOW,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            embedding_std=0.03,
        ),
        "gemma3": TinyModel(
            "gemma3",
            n_layers=8,
            keys=_HEAD | {"attention.sliding_window": WINDOW, "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0},
            embedding_std=0.1,
        ),
        "phi3": TinyModel(
            "phi3",
            keys=_HEAD | {"rope.scaling.original_context_length": 64},
            without=_BIASES + r"|rope_factors_.*",
            has_fused_qkv=True,
        ),
        "glm4": TinyModel("glm4", keys={"rope.dimension_count": 16}),
        "glm4moe": TinyModel(
            "glm4moe",
            n_layers=7,
            keys=_HEAD
            | _MOE
            | _GATING
            | {
                "rope.dimension_count": 16,
                "expert_shared_count": 1,
                "leading_dense_block_count": 2,
                "nextn_predict_layers": 1,
            },
            without=_OPTIONAL + r"|attn_output.bias",
        ),
        "glm-dsa": TinyModel(
            "glm-dsa",
            n_layers=7,
            keys=_MLA
            | _MOE
            | _GATING
            | _INDEXER
            | {
                "expert_shared_count": 1,
                "leading_dense_block_count": 2,
                "nextn_predict_layers": 1,
                "attention.indexer.types": [True, False, True, True, False, True],
            },
        ),
        "deepseek2": TinyModel(
            "deepseek2",
            keys=_MLA | _YARN | _MOE | _GATING | {"expert_shared_count": 1, "leading_dense_block_count": 1},
        ),
        "deepseek32": TinyModel(
            "deepseek32",
            keys=_MLA | _YARN | _MOE | _GATING | _INDEXER | {"expert_shared_count": 1, "leading_dense_block_count": 1},
        ),
        "deepseek4": TinyModel(
            "deepseek4",
            n_layers=8,
            keys=_HEAD
            | _MOE
            | _GATING
            | _INDEXER
            | {
                "attention.head_count_kv": 1,
                "attention.q_lora_rank": 48,
                "attention.output_group_count": 4,
                "attention.output_lora_rank": 32,
                "attention.sliding_window": WINDOW,
                "attention.compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128],
                "attention.compress_rope_freq_base": 160000.0,
                "rope.dimension_count": 16,
                "hyper_connection.count": 4,
                "hyper_connection.sinkhorn_iterations": 2,
                "hyper_connection.epsilon": 1e-6,
                "hash_layer_count": 3,
                "swiglu_clamp_exp": 10.0,
                "expert_gating_func": 4,
                "expert_shared_count": 1,
            },
        ),
        "gpt-oss": TinyModel("gpt-oss", keys=_HEAD | _MOE | {"attention.sliding_window": WINDOW}, without=_OPTIONAL),
        "granite": TinyModel(
            "granite",
            keys=_HEAD
            | {
                "logit_scale": 0.5,
                "residual_scale": 0.5,
                "embedding_scale": 12.0,
                "attention.scale": 0.2,
            },
            embedding_std=0.1,
        ),
        "granitehybrid": TinyModel(
            "granitehybrid",
            n_layers=6,
            keys=_MAMBA
            | {
                "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
                "logit_scale": 0.5,
                "residual_scale": 0.5,
                "embedding_scale": 12.0,
                "attention.scale": 0.2,
            },
            embedding_std=0.1,
        ),
        "olmo2": TinyModel("olmo2"),
        "olmo3": TinyModel("olmo2", n_layers=6, keys={"attention.sliding_window": WINDOW}),
        "cohere2": TinyModel(
            "cohere2",
            n_layers=6,
            keys={
                "attention.layer_norm_rms_epsilon": None,
                "attention.layer_norm_epsilon": 1e-5,
                "attention.sliding_window": WINDOW,
                "logit_scale": 0.5,
            },
            embedding_std=0.3,
        ),
        "lfm2": TinyModel(
            "lfm2", n_layers=6, keys={"attention.head_count_kv": [0, 0, 2, 0, 2, 0], "shortconv.l_cache": 3}
        ),
        "lfm2moe": TinyModel(
            "lfm2moe",
            n_layers=6,
            keys=_MOE
            | {
                "attention.head_count_kv": [0, 0, 2, 0, 2, 0],
                "shortconv.l_cache": 3,
                "leading_dense_block_count": 2,
                "expert_gating_func": 2,
            },
        ),
        "nemotron_h": TinyModel(
            "nemotron_h",
            n_layers=7,
            keys=_HEAD
            | _MAMBA
            | {
                "attention.layer_norm_epsilon": 1e-5,
                "attention.head_count_kv": [0, 0, 2, 0, 0, 2, 0],
                "feed_forward_length": [0, N_FF, 0, 0, N_FF, 0, N_FF],
            },
        ),
        "nemotron_h_moe": TinyModel(
            "nemotron_h_moe",
            n_layers=7,
            keys=_HEAD
            | _MAMBA
            | _MOE
            | _GATING
            | {
                "attention.layer_norm_epsilon": 1e-5,
                "attention.head_count_kv": [0, 0, 2, 0, 0, 2, 0],
                "feed_forward_length": [0, N_FF, 0, 0, N_FF, 0, N_FF],
                "expert_shared_count": 1,
                "expert_shared_feed_forward_length": 64,
            },
        ),
        "minimax-m2": TinyModel(
            "minimax-m2", keys=_HEAD | _MOE | {"rope.dimension_count": 16, "expert_gating_func": 2}
        ),
        "llama4": TinyModel(
            "llama4",
            n_layers=12,
            keys=_HEAD | _MOE | {"expert_used_count": 1, "interleave_moe_layer_step": 2},
        ),
        "smollm3": TinyModel("smollm3", n_layers=12),
        "qwen35": TinyModel(
            "qwen35",
            n_layers=8,
            keys=_HEAD | _DELTA_NET | {"rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]},
        ),
        "qwen35moe": TinyModel(
            "qwen35moe",
            n_layers=8,
            keys=_HEAD
            | _DELTA_NET
            | _MOE
            | {
                "rope.dimension_count": 16,
                "rope.dimension_sections": [3, 3, 2, 0],
                "expert_shared_feed_forward_length": 64,
            },
        ),
        "qwen3next": TinyModel(
            "qwen3next",
            n_layers=8,
            keys=_HEAD | _DELTA_NET | _MOE | {"rope.dimension_count": 16, "expert_shared_feed_forward_length": 64},
            without=_BIASES + r"|ssm_in.weight",
        ),
    }
)
