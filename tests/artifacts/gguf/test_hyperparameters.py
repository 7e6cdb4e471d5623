"""Hyper-parameters: each value that would abort llama.cpp, overflow or compute nonsense is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.gguf.check import parse_header, read_header
from meshswarm.artifacts.gguf.container import TENSOR_TYPES, ValueType
from meshswarm.artifacts.gguf.hyperparameters import Hyperparameters, check_hyperparameters
from meshswarm.errors import ArtifactError

BOOL, U16, U32, U64, F32, STRING, ARRAY, I32 = (
    ValueType.BOOL,
    ValueType.UINT16,
    ValueType.UINT32,
    ValueType.UINT64,
    ValueType.FLOAT32,
    ValueType.STRING,
    ValueType.ARRAY,
    ValueType.INT32,
)
NAN, INFINITY = float("nan"), float("inf")


def parse(recipe: Any) -> Any:
    return parse_header(recipe.header(), recipe.file_length, source="crafted.gguf")


def test_the_embedded_model(smollm2: Path) -> None:
    assert check_hyperparameters(read_header(smollm2)) == Hyperparameters(
        architecture="llama",
        n_layers=30,
        n_embd=576,
        n_vocab=49152,
        n_ctx_train=8192,
        tied_embeddings=True,
    )


def test_a_tiny_model(gguf_recipe: Any) -> None:
    assert check_hyperparameters(parse(gguf_recipe(tied=False))) == Hyperparameters("llama", 4, 64, 32, 128, False)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("llama.block_count", (U32, 0), "is 0, outside 1 to 512"),
        ("llama.block_count", (U32, 10**6), "is 1000000, outside 1 to 512"),
        ("llama.block_count", (U32, 513), "is 513, outside"),
        ("llama.block_count", (U64, 4), "is not a 32-bit unsigned integer"),
        ("llama.block_count", (I32, -4), "is not a 32-bit unsigned integer"),
        ("llama.block_count", (ARRAY, U32, [4]), "is an array"),
        ("llama.context_length", (U32, (1 << 32) - 1), "is 4294967295, outside"),
        ("llama.context_length", (U32, 0), "is 0, outside"),
        ("llama.embedding_length", (U32, 0), "is 0, outside"),
        ("llama.embedding_length", (U32, 1 << 31), "is 2147483648, outside"),
        ("llama.feed_forward_length", (U32, (1 << 32) - 1), "is 4294967295, outside"),
        ("llama.attention.head_count", (U32, 3), "is 3, which does not divide the width 64"),
        ("llama.attention.head_count", (U32, 1 << 20), "is 1048576, outside"),
        ("llama.attention.head_count", (ARRAY, U32, [2, 2, 2]), "is not an array of 4 32-bit integers"),
        ("llama.attention.head_count", (ARRAY, F32, [2.0] * 4), "is not an array of 4 32-bit integers"),
        ("llama.attention.head_count_kv", (U32, 3), "is 3, which does not divide the 2 heads"),
        ("llama.attention.head_count_kv", (ARRAY, U32, [1, 1, 4, 1]), "is 4, which does not divide"),
        ("llama.attention.head_count_kv", (ARRAY, I32, [1, 1, -1, 1]), "is -1, outside"),
        ("llama.attention.key_length", (U32, 0), "is 0, outside"),
        ("llama.attention.key_length", (U32, 1 << 30), "is 1073741824, outside"),
        ("llama.attention.layer_norm_rms_epsilon", (F32, NAN), "is nan, not a sane number"),
        ("llama.attention.layer_norm_rms_epsilon", (F32, INFINITY), "is inf, not a sane number"),
        ("llama.attention.layer_norm_rms_epsilon", (F32, -1e-5), "outside 0 to"),
        ("llama.attention.layer_norm_rms_epsilon", (F32, 0.0), "outside 0 to"),
        ("llama.attention.layer_norm_rms_epsilon", (F32, 1.0), "outside 0 to"),
        ("llama.rope.dimension_count", (U32, 34), "is 34: it must be even and at most 32"),
        ("llama.rope.dimension_count", (U32, 31), "is 31: it must be even"),
        ("llama.rope.freq_base", (F32, 0.0), "must be above 0"),
        ("llama.rope.freq_base", (F32, -INFINITY), "not a sane number"),
        ("llama.rope.scaling.factor", (F32, NAN), "is nan, not a sane number"),
        ("llama.some.future_floats", (ARRAY, F32, [0.0, NAN]), "is nan, not a sane number"),
        ("llama.some.future_number", (U32, (1 << 32) - 1), "outside the range of 32-bit"),
        ("llama.some.future_numbers", (ARRAY, U64, [1, 1 << 40]), "outside the range of 32-bit"),
        ("llama.attention.head_count", (U32, 0), "is 0, and there are tensors of attention"),
        ("llama.rope.dimension_count", (U32, 0), "is 0, and there are tensors of attention"),
        ("llama.rope.dimension_sections", (ARRAY, I32, [16, 16, 1, 0]), "has 33 in all, more than 32 rotary numbers"),
        ("llama.expert_gating_func", (U32, 0), "is 0, outside 1 to 4"),
        ("llama.expert_gating_func", (U32, 7), "is 7, outside 1 to 4"),
        ("llama.expert_count", (U32, 1025), "is 1025, outside 0 to 1024"),
        ("llama.expert_used_count", (U32, 2), "is 2, which does not fit 0 experts"),
        ("llama.expert_group_count", (U32, 3), "is 3, which does not fit 0 experts"),
        ("llama.nextn_predict_layers", (U32, 4), "is 4, outside 0 to 3"),
        ("llama.attention.sliding_window", (U32, 1 << 25), "is 33554432, outside"),
        ("llama.attention.sliding_window_pattern", (U32, 513), "is 513, outside 0 to 512"),
        ("llama.attention.sliding_window_pattern", (ARRAY, BOOL, [1, 0, 1]), "is not an array of 4 flags"),
        ("llama.attention.sliding_window_pattern", (ARRAY, U32, [1, 0, 1, 2]), "is 2, outside 0 to 1"),
        ("llama.attention.sliding_window_pattern", (ARRAY, U32, [0] * 513), "is not an array of 4 flags"),
        ("llama.attention.recurrent_layers", (ARRAY, F32, [0.0] * 4), "is not an array of 4 flags"),
        ("llama.attention.indexer.types", (ARRAY, I32, [-1, 0, 0, 0]), "is -1, outside 0 to 1"),
        ("llama.attention.indexer.top_k", (U32, 0), "is 0, outside 1 to"),
        ("llama.attention.kv_lora_rank", (U32, 0), "is 0, outside 1 to"),
        ("llama.attention.key_length_mla", (U32, 1 << 20), "is 1048576, outside"),
        ("llama.attention.q_lora_rank", (I32, -1), "is not a 32-bit unsigned integer"),
        ("llama.attention.compress_ratios", (ARRAY, I32, [0, 4, 128, -4]), "is not an array of numbers from 0"),
        ("llama.attention.compress_ratios", (ARRAY, I32, []), "is not an array of numbers from 0"),
        ("llama.rope.dimension_sections", (ARRAY, I32, [8, 1 << 20, 8, 0]), "is not an array of numbers from 0"),
        ("llama.hash_layer_count", (U32, 1 << 20), "is 1048576, outside"),
        ("llama.hyper_connection.count", (U32, 0), "is 0, outside 1 to 16"),
        ("llama.leading_dense_block_count", (U32, 513), "is 513, outside"),
        ("llama.interleave_moe_layer_step", (U32, 1 << 31), "is 2147483648, outside"),
        ("llama.full_attention_interval", (U32, 0), "is 0, outside 1 to"),
        ("llama.shortconv.l_cache", (U32, 1), "is 1, outside 2 to 64"),
        ("llama.ssm.conv_kernel", (U32, 1 << 20), "is 1048576, outside"),
        ("llama.ssm.state_size", (U32, 0), "is 0, outside 1 to"),
        ("llama.ssm.inner_size", (U64, 64), "is not a 32-bit unsigned integer"),
        ("llama.expert_feed_forward_length", (ARRAY, U32, [64] * 3), "is not an array of 4 32-bit integers"),
        ("llama.expert_feed_forward_length", (U32, 1 << 30), "is 1073741824, outside"),
        ("llama.expert_used_count", (ARRAY, U32, [2, 2, 2, 1 << 20]), "is 1048576, outside"),
        ("general.architecture", (STRING, ""), "is not an architecture's name"),
        ("general.architecture", (STRING, "../llama"), "is not an architecture's name"),
        ("general.architecture", (U32, 1), "is not a string"),
        ("split.count", (U16, 2), "says this is one of 2 parts"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(
    gguf_recipe: Any, key: str, value: tuple[Any, ...], problem: str
) -> None:
    recipe = gguf_recipe()
    recipe.entries[key] = value
    with pytest.raises(ArtifactError, match=rf"crafted\.gguf is refused: {key} .*{problem}"):
        parse(recipe)


def test_more_used_experts_than_there_are_is_refused(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries |= {"llama.expert_count": (U32, 8), "llama.expert_used_count": (U32, 9)}
    with pytest.raises(ArtifactError, match=r"llama\.expert_used_count is 9, which does not fit 8 experts"):
        parse(recipe)
    del recipe.entries["llama.expert_used_count"]
    with pytest.raises(ArtifactError, match=r"llama\.expert_used_count is 0"):
        parse(recipe)


@pytest.mark.parametrize(
    ("groups", "used", "problem"),
    [
        (3, 1, "expert_group_count is 3, which does not fit 8 experts"),
        (8, 1, "expert_group_count is 8, which does not fit 8 experts"),
        (4, 4, "expert_group_used_count is 4, which does not fit 4 groups"),
        (4, 0, "expert_group_used_count is 0, which does not fit 4 groups"),
    ],
)
def test_expert_groups_that_do_not_fit_are_refused(gguf_recipe: Any, groups: int, used: int, problem: str) -> None:
    recipe = gguf_recipe()
    recipe.entries |= {"llama.expert_count": (U32, 8), "llama.expert_used_count": (U32, 2)}
    recipe.entries |= {"llama.expert_group_count": (U32, groups), "llama.expert_group_used_count": (U32, used)}
    with pytest.raises(ArtifactError, match=problem):
        parse(recipe)


@pytest.mark.parametrize(
    "key", ["general.architecture", "llama.block_count", "llama.context_length", "llama.embedding_length"]
)
def test_a_missing_value_is_named(gguf_recipe: Any, key: str) -> None:
    recipe = gguf_recipe()
    del recipe.entries[key]
    with pytest.raises(ArtifactError, match=f"{key} is missing"):
        parse(recipe)


def test_the_vocabulary_has_a_size(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["tokenizer.ggml.tokens"] = (ARRAY, STRING, [])
    with pytest.raises(ArtifactError, match=r"tokenizer\.ggml\.tokens is empty"):
        parse(recipe)
    del recipe.entries["tokenizer.ggml.tokens"]
    assert check_hyperparameters(parse(recipe)).n_vocab == 32
    recipe.entries["llama.vocab_size"] = (U32, 1 << 23)
    with pytest.raises(ArtifactError, match=r"llama\.vocab_size is 8388608, outside"):
        parse(recipe)
    del recipe.entries["llama.vocab_size"]
    with pytest.raises(ArtifactError, match=r"llama\.vocab_size is missing"):
        parse(recipe)


@pytest.mark.parametrize(
    ("index", "tensor", "problem"),
    [
        (0, ["token_embd.weight", (64, 31)], r"token_embd.weight has sides \(64, 31\) instead of \(64, 32\)"),
        (0, ["token_embd.weight", (128, 32)], "token_embd.weight has sides"),
        (5, ["blk.4.attn_norm.weight", (64,)], "blk.4.attn_norm.weight belongs to no layer: the model has 4"),
        (5, ["blk.-1.attn_norm.weight", (64,)], "blk.-1.attn_norm.weight belongs to no layer"),
        (5, ["blk.01.attn_norm.weight", (64,)], "blk.01.attn_norm.weight belongs to no layer"),
        (5, ["blk.99999.attn_norm.weight", (64,)], "blk.99999.attn_norm.weight belongs to no layer"),
    ],
)
def test_tensors_that_do_not_fit_the_numbers_are_refused(
    gguf_recipe: Any, index: int, tensor: list[Any], problem: str
) -> None:
    recipe = gguf_recipe()
    recipe.tensors[index] = tensor
    with pytest.raises(ArtifactError, match=problem):
        parse(recipe)


def test_a_layer_without_tensors_is_refused(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.tensors = [tensor for tensor in recipe.tensors if not tensor[0].startswith("blk.2.")]
    with pytest.raises(ArtifactError, match="has tensors for 3 of the 4 layers"):
        parse(recipe)


def test_sizes_per_layer_may_be_arrays(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["llama.attention.head_count"] = (ARRAY, U32, [2, 2, 0, 2])
    recipe.entries["llama.attention.head_count_kv"] = (ARRAY, I32, [1, 2, 0, 1])
    parse(recipe)
    recipe.entries["llama.attention.head_count_kv"] = (ARRAY, I32, [1, 1, 0, 1])
    recipe.entries["llama.attention.value_length"] = (U32, 32)
    parse(recipe)
    recipe.entries["llama.attention.value_length"] = (U32, 16)
    with pytest.raises(
        ArtifactError, match=r"value_length is 16, which does not fit blk\.0\.attn_v\.weight \(64, 32\)"
    ):
        parse(recipe)


LATENT = {"kv_lora_rank": 48, "key_length": 64, "value_length": 48, "key_length_mla": 24, "value_length_mla": 16}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("key_length", 63, "is not 64, as a latent row of 48 and 16 rotary numbers need"),
        ("value_length", 64, "is not 48, as a latent row"),
        ("key_length_mla", 16, "is 16, which leaves nothing beside 16 rotary numbers"),
        ("head_count_kv", 2, "is not 1, as latent attention needs"),
    ],
)
def test_what_is_kept_of_latent_attention_fits(gguf_recipe: Any, key: str, value: int, problem: str) -> None:
    recipe = gguf_recipe()
    recipe.tensors = [tensor for tensor in recipe.tensors if "attn_v" not in tensor[0]]
    recipe.entries["llama.rope.dimension_count"] = (U32, 16)
    recipe.entries |= {f"llama.attention.{name}": (U32, size) for name, size in LATENT.items()}
    parse(recipe)
    recipe.entries[f"llama.attention.{key}"] = (U32, value)
    with pytest.raises(ArtifactError, match=rf"llama\.attention\.{key} {problem}"):
        parse(recipe)


@pytest.mark.parametrize(
    ("name", "dims", "code", "problem"),
    [
        ("output_norm.weight", (64,), 1, "is a vector stored as F16"),
        ("output_norm.weight", (64,), 20, "is a vector stored as IQ4_NL"),
        ("output_norm.weight", (64,), 26, "is stored as I32, which no weights are"),
        ("blk.0.attn_q.weight", (64, 64), 26, "is stored as I32, which no weights are"),
        ("token_embd.weight", (64, 32), 26, "is stored as I32, which no weights are"),
    ],
)
def test_encodings_that_llama_cpp_cannot_compute_with_are_refused(
    gguf_recipe: Any, name: str, dims: tuple[int, ...], code: int, problem: str
) -> None:
    """They load, and end the process at the first token."""
    header = parse(gguf_recipe())
    tensor = header.tensors[name]._replace(dims=dims, type=TENSOR_TYPES[code])
    with pytest.raises(ArtifactError, match=f"tensor {name} {problem}"):
        check_hyperparameters(replace(header, tensors={**header.tensors, name: tensor}))


def test_heads_of_recurrent_layers_share_evenly(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries |= {"llama.ssm.inner_size": (U32, 96), "llama.ssm.time_step_rank": (U32, 8)}
    recipe.entries["llama.ssm.group_count"] = (U32, 3)
    with pytest.raises(ArtifactError, match=r"llama\.ssm\.group_count is 3, which does not divide 8"):
        parse(recipe)
    recipe.entries["llama.ssm.time_step_rank"] = (U32, 7)
    with pytest.raises(ArtifactError, match=r"llama\.ssm\.time_step_rank is 7, which does not divide 96"):
        parse(recipe)


def test_blocks_that_guess_further_tokens_are_no_layers(gguf_recipe: Any) -> None:
    recipe = gguf_recipe(n_layers=5)
    recipe.entries["llama.nextn_predict_layers"] = (U32, 1)
    recipe.entries["llama.attention.head_count_kv"] = (ARRAY, U32, [1] * 5)
    recipe.entries["llama.attention.indexer.types"] = (ARRAY, BOOL, [1, 0, 0, 1])
    assert check_hyperparameters(parse(recipe)).n_layers == 4
    recipe.tensors = [tensor for tensor in recipe.tensors if not tensor[0].startswith("blk.4.")]
    assert check_hyperparameters(parse(recipe)).n_layers == 4
    recipe.tensors = [tensor for tensor in recipe.tensors if not tensor[0].startswith("blk.3.")]
    with pytest.raises(ArtifactError, match="has tensors for 3 of the 4 layers"):
        parse(recipe)
