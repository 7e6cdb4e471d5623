"""The numbers a model is built from, and the ranges in which they are sane.

The rule this file keeps: a value that makes llama.cpp abort the process (a block count of 0 or a million, more
experts than it has room for), overflow, or compute nonsense (a NaN epsilon) is refused here, by name. Unknown keys of
the architecture are held to general bounds: integers in 32 bits, floats finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from meshswarm.artifacts.gguf.container import F32, FLOAT_TYPES, I32, INTEGER_TYPES, GgufHeader, ValueType
from meshswarm.artifacts.gguf.split import COUNT_KEY, says_it_is_a_part
from meshswarm.span import MAX_LAYERS

MAX_CONTEXT = 1 << 24
MAX_EMBEDDING = 1 << 17
MAX_HEADS = 1024
MAX_HEAD_SIZE = 4096
MAX_FEED_FORWARD = 1 << 21
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_VOCABULARY = 1 << 22
MAX_EPSILON = 0.1
MAX_MAGNITUDE = 1e15
MAX_KERNEL = 64
MAX_STREAMS = 16
TOKENS_KEY = "tokenizer.ggml.tokens"
_INTEGER_TABLE = ".ffn_gate_tid2eid.weight"
"""Which experts a token goes to in layers that choose them by a table."""
_RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "attention.indexer.head_count": (1, MAX_HEADS),
        "attention.indexer.key_length": (1, MAX_HEAD_SIZE),
        "attention.indexer.top_k": (1, MAX_CONTEXT),
        "attention.key_length_mla": (1, MAX_HEAD_SIZE),
        "attention.key_length_swa": (1, MAX_HEAD_SIZE),
        "attention.kv_lora_rank": (1, MAX_EMBEDDING),
        "attention.output_group_count": (1, MAX_HEADS),
        "attention.output_lora_rank": (1, MAX_EMBEDDING),
        "attention.q_lora_rank": (0, MAX_EMBEDDING),
        "attention.sliding_window": (0, MAX_CONTEXT),
        "attention.temperature_length": (0, MAX_CONTEXT),
        "attention.value_length_mla": (1, MAX_HEAD_SIZE),
        "attention.value_length_swa": (1, MAX_HEAD_SIZE),
        "expert_gating_func": (1, 4),
        "expert_shared_count": (0, MAX_EXPERTS),
        "expert_shared_feed_forward_length": (0, MAX_FEED_FORWARD),
        "full_attention_interval": (1, MAX_LAYERS),
        "hash_layer_count": (0, MAX_LAYERS),
        "hyper_connection.count": (1, MAX_STREAMS),
        "hyper_connection.sinkhorn_iterations": (0, 1000),
        "interleave_moe_layer_step": (0, MAX_LAYERS),
        "leading_dense_block_count": (0, MAX_LAYERS),
        "rope.dimension_count_swa": (0, MAX_HEAD_SIZE),
        "rope.scaling.original_context_length": (1, MAX_CONTEXT),
        "shortconv.l_cache": (2, MAX_KERNEL),
        "ssm.conv_kernel": (2, MAX_KERNEL),
        "ssm.group_count": (1, MAX_HEADS),
        "ssm.inner_size": (1, MAX_EMBEDDING),
        "ssm.state_size": (1, MAX_HEAD_SIZE),
        "ssm.time_step_rank": (1, MAX_EMBEDDING),
    }
)
"""Numbers that some architectures have, with the least and the greatest that make sense."""
_FLAGS = ("attention.indexer.types", "attention.recurrent_layers", "attention.sliding_window_pattern")
"""One 0 or 1 for each layer; or a number for all of them: the period of a pattern."""
_NUMBER_LISTS = ("attention.compress_ratios", "rope.dimension_sections")


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the rest of the program needs to know about a model's shape. Lengths count layers, rows and tokens."""

    architecture: str
    n_layers: int  # that compute: blocks which predict further tokens come behind them in the file, and are not used
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    tied_embeddings: bool  # no output matrix of its own: the token embedding serves as one


def check_hyperparameters(header: GgufHeader) -> Hyperparameters:
    """Check every hyper-parameter of `header`. Raises ArtifactError naming the first one that cannot be."""
    architecture = header.text("general.architecture")
    if architecture is None:
        raise header.fault("general.architecture", "is missing")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,31}", architecture):
        raise header.fault("general.architecture", f"is not an architecture's name: {architecture[:40]!r}")
    _refuse_lone_part(header)
    numbers = _Numbers(header, architecture)
    n_blocks = numbers.required("block_count", 1, MAX_LAYERS)
    n_ctx_train = numbers.required("context_length", 1, MAX_CONTEXT)
    n_embd = numbers.required("embedding_length", 1, MAX_EMBEDDING)
    n_layers = n_blocks - (numbers.optional("nextn_predict_layers", 0, n_blocks - 1) or 0)
    numbers.per_layer("feed_forward_length", n_blocks, 0, MAX_FEED_FORWARD)
    _check_attention(numbers, n_blocks, n_embd)
    _check_experts(numbers, n_blocks)
    _check_ranges(numbers, n_layers)
    _check_state_space(numbers)
    _check_all_numbers(header, architecture)
    _check_layer_names(header, n_layers, n_blocks)
    _check_encodings(header)
    n_vocab = _vocabulary_size(header, numbers)
    _check_embedding(header, n_embd, n_vocab)
    return Hyperparameters(architecture, n_layers, n_embd, n_vocab, n_ctx_train, "output.weight" not in header.tensors)


class _Numbers:
    """Integer hyper-parameters of one architecture, by their key without its prefix."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header = header
        self._prefix = architecture

    def key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def optional(self, name: str, low: int, high: int) -> int | None:
        key = self.key(name)
        entry = self.header.metadata.get(key)
        if entry is None:
            return None
        value = self.header.scalar(key)
        if entry.type is not ValueType.UINT32:
            raise self.header.fault(key, "is not a 32-bit unsigned integer")
        assert isinstance(value, int)
        self._in_range(key, value, low, high)
        return value

    def required(self, name: str, low: int, high: int) -> int:
        value = self.optional(name, low, high)
        if value is None:
            raise self.header.fault(self.key(name), "is missing")
        return value

    def per_layer(self, name: str, n_layers: int, low: int, high: int) -> tuple[int, ...] | None:
        """One value per layer, from an array of that length or one value for all. None when the key is missing."""
        key = self.key(name)
        entry = self.header.metadata.get(key)
        if entry is None or not entry.is_array:
            value = self.optional(name, low, high)
            return None if value is None else (value,) * n_layers
        if entry.item_type not in (ValueType.UINT32, ValueType.INT32) or entry.n_items != n_layers:
            raise self.header.fault(key, f"is not an array of {n_layers} 32-bit integers, one per layer")
        values = self.header.numbers(key)
        assert values is not None
        for value in values.tolist():
            self._in_range(key, value, low, high)
        return tuple(values.tolist())

    def flags(self, name: str, n_layers: int) -> None:
        """Check one 0 or 1 per layer, where there is such an array; there may be more than layers."""
        key = self.key(name)
        entry = self.header.metadata.get(key)
        if entry is None or not entry.is_array:
            self.optional(name, 0, MAX_LAYERS)
            return
        kinds = (ValueType.BOOL, ValueType.UINT32, ValueType.INT32)
        if entry.item_type not in kinds or not n_layers <= entry.n_items <= MAX_LAYERS:
            raise self.header.fault(key, f"is not an array of {n_layers} flags, one per layer")
        values = self.header.numbers(key)
        assert values is not None
        for value in values.tolist():
            self._in_range(key, value, 0, 1)

    def _in_range(self, key: str, value: int, low: int, high: int) -> None:
        if not low <= value <= high:
            raise self.header.fault(key, f"is {value}, outside {low} to {high}")


def _refuse_lone_part(header: GgufHeader) -> None:
    if says_it_is_a_part(header) and not header.parts:
        raise header.fault(
            COUNT_KEY,
            f"says this is one of {header.scalar(COUNT_KEY)} parts of a model: they must lie side by side, named "
            "NAME-00001-of-0000N.gguf",
        )


def _check_attention(numbers: _Numbers, n_layers: int, n_embd: int) -> None:
    """Heads, their sizes and the rotary part fit each other."""
    heads = numbers.per_layer("attention.head_count", n_layers, 0, MAX_HEADS)
    kv_heads = numbers.per_layer("attention.head_count_kv", n_layers, 0, MAX_HEADS) or heads
    key_size = numbers.optional("attention.key_length", 1, MAX_HEAD_SIZE)
    value_size = numbers.optional("attention.value_length", 1, MAX_HEAD_SIZE)
    rotary = numbers.optional("rope.dimension_count", 0, MAX_HEAD_SIZE)
    if heads is None or kv_heads is None:
        return
    has_attention = any(re.fullmatch(r"blk\.\d+\.attn_(q|qkv|q_b)\.weight", name) for name in numbers.header.tensors)
    if has_attention and not any(heads):
        raise numbers.header.fault(numbers.key("attention.head_count"), "is 0, and there are tensors of attention")
    if has_attention and rotary == 0:
        raise numbers.header.fault(numbers.key("rope.dimension_count"), "is 0, and there are tensors of attention")
    _check_latent_attention(numbers, kv_heads, rotary)
    if value_size is not None and numbers.optional("attention.value_length_swa", 1, MAX_HEAD_SIZE) is None:
        _check_values(numbers, kv_heads, value_size)
    for n_heads, n_kv in zip(heads, kv_heads, strict=True):
        if n_heads == 0:
            continue
        if n_kv > n_heads or (n_kv and n_heads % n_kv):
            raise numbers.header.fault(
                numbers.key("attention.head_count_kv"), f"is {n_kv}, which does not divide the {n_heads} heads"
            )
        if key_size is None and n_embd % n_heads:
            raise numbers.header.fault(
                numbers.key("attention.head_count"), f"is {n_heads}, which does not divide the width {n_embd}"
            )
        head_size = key_size or n_embd // n_heads
        if rotary is not None and (rotary > head_size or rotary % 2):
            raise numbers.header.fault(
                numbers.key("rope.dimension_count"), f"is {rotary}: it must be even and at most {head_size}"
            )


def _check_values(numbers: _Numbers, kv_heads: tuple[int, ...], value_size: int) -> None:
    """The values of each layer have the size that is said of them: some architectures take it on trust."""
    for layer, n_kv in enumerate(kv_heads):
        tensor = numbers.header.tensors.get(f"blk.{layer}.attn_v.weight")
        if n_kv and tensor is not None and (len(tensor.dims) != 2 or tensor.dims[1] != n_kv * value_size):
            raise numbers.header.fault(
                numbers.key("attention.value_length"),
                f"is {value_size}, which does not fit {tensor.name} {tensor.dims}",
            )


def _check_latent_attention(numbers: _Numbers, kv_heads: tuple[int, ...], rotary: int | None) -> None:
    """What is kept of a position is the latent row and the rotary part: llama.cpp asserts it while it computes."""
    key_size = numbers.optional("attention.key_length_mla", 1, MAX_HEAD_SIZE)
    rank = numbers.optional("attention.kv_lora_rank", 1, MAX_EMBEDDING)
    if key_size is None or rank is None or rotary is None:
        return
    expected = {"attention.key_length": rank + rotary, "attention.value_length": rank}
    for name, size in expected.items():
        if numbers.optional(name, 1, MAX_HEAD_SIZE) not in (None, size):
            raise numbers.header.fault(
                numbers.key(name), f"is not {size}, as a latent row of {rank} and {rotary} rotary numbers need"
            )
    if key_size <= rotary:
        raise numbers.header.fault(
            numbers.key("attention.key_length_mla"),
            f"is {key_size}, which leaves nothing beside {rotary} rotary numbers",
        )
    if set(kv_heads) != {1}:
        raise numbers.header.fault(numbers.key("attention.head_count_kv"), "is not 1, as latent attention needs")


def _check_experts(numbers: _Numbers, n_blocks: int) -> None:
    """Experts, those used of them, and their groups fit each other: llama.cpp asserts each of these."""
    n_experts = numbers.optional("expert_count", 0, MAX_EXPERTS) or 0
    n_used = max(numbers.per_layer("expert_used_count", n_blocks, 0, MAX_EXPERTS) or (0,))
    numbers.per_layer("expert_feed_forward_length", n_blocks, 0, MAX_FEED_FORWARD)
    n_groups = numbers.optional("expert_group_count", 0, MAX_EXPERTS) or 0
    n_groups_used = numbers.optional("expert_group_used_count", 0, MAX_EXPERTS) or 0
    if n_used > n_experts or (n_experts and not n_used):
        raise numbers.header.fault(
            numbers.key("expert_used_count"), f"is {n_used}, which does not fit {n_experts} experts"
        )
    if n_groups and (not n_experts or n_experts % n_groups or (n_groups > 1 and n_groups == n_experts)):
        raise numbers.header.fault(
            numbers.key("expert_group_count"), f"is {n_groups}, which does not fit {n_experts} experts"
        )
    if n_groups > 1 and not 0 < n_groups_used < n_groups:
        raise numbers.header.fault(
            numbers.key("expert_group_used_count"), f"is {n_groups_used}, which does not fit {n_groups} groups"
        )


def _check_ranges(numbers: _Numbers, n_layers: int) -> None:
    """What has a range of its own, whatever else a model has."""
    for name, (low, high) in _RANGES.items():
        numbers.optional(name, low, high)
    for name in _FLAGS:
        numbers.flags(name, n_layers)
    for name in _NUMBER_LISTS:
        key = numbers.key(name)
        values = numbers.header.numbers(key)
        if values is not None and (not len(values) or values.min() < 0 or values.max() > MAX_HEAD_SIZE):
            raise numbers.header.fault(key, f"is not an array of numbers from 0 to {MAX_HEAD_SIZE}")
    sections = numbers.header.numbers(numbers.key("rope.dimension_sections"))
    rotary = numbers.optional("rope.dimension_count", 0, MAX_HEAD_SIZE)
    if sections is not None and rotary is not None and int(sections.sum()) > rotary:
        raise numbers.header.fault(
            numbers.key("rope.dimension_sections"),
            f"has {int(sections.sum())} in all, more than {rotary} rotary numbers",
        )


def _check_state_space(numbers: _Numbers) -> None:
    """The heads of recurrent layers share their width evenly, and their groups the heads: llama.cpp asserts it."""
    inner, heads, groups = (
        numbers.optional(f"ssm.{name}", 1, MAX_EMBEDDING) for name in ("inner_size", "time_step_rank", "group_count")
    )
    for name, whole, part in (("ssm.time_step_rank", inner, heads), ("ssm.group_count", heads, groups)):
        if whole and part and whole % part:
            raise numbers.header.fault(numbers.key(name), f"is {part}, which does not divide {whole}")


def _check_all_numbers(header: GgufHeader, architecture: str) -> None:
    """General bounds for every number under the architecture's prefix, known or not."""
    for key, entry in header.metadata.items():
        if not key.startswith(architecture + ".") or entry.item_type is ValueType.STRING or not entry.n_items:
            continue
        values = header.numbers(key) if entry.is_array else np.asarray(header.scalar(key))
        assert values is not None
        if entry.item_type in FLOAT_TYPES:
            low, high = float(values.min()), float(values.max())
            if not (math.isfinite(low) and math.isfinite(high) and low > -MAX_MAGNITUDE and high < MAX_MAGNITUDE):
                raise header.fault(key, f"is {low if not math.isfinite(low) else high}, not a sane number")
            if key.endswith("epsilon") and not (low > 0 and high <= MAX_EPSILON):
                raise header.fault(key, f"is {low}, outside 0 to {MAX_EPSILON}")
            if key.endswith("rope.freq_base") and low <= 0:
                raise header.fault(key, f"is {low}: it must be above 0")
        elif entry.item_type in INTEGER_TYPES and (int(values.min()) < -(1 << 31) or int(values.max()) >= 1 << 31):
            raise header.fault(key, "is outside the range of 32-bit integers")


def _check_layer_names(header: GgufHeader, n_layers: int, n_blocks: int) -> None:
    """Tensors belong to blocks that exist, and every layer has some; the blocks behind them may be in another file."""
    seen = set()
    for name in header.tensors:
        match = re.match(r"blk\.([^.]*)\.", name)
        if match is None:
            continue
        if not re.fullmatch(r"0|[1-9]\d{0,3}", match[1]) or int(match[1]) >= n_blocks:
            raise header.fault(f"tensor {name}", f"belongs to no layer: the model has {n_blocks}")
        if int(match[1]) < n_layers:
            seen.add(int(match[1]))
    if len(seen) != n_layers:
        raise header.fault("the tensor table", f"has tensors for {len(seen)} of the {n_layers} layers")


def _check_encodings(header: GgufHeader) -> None:
    """Vectors are float32 and tables of integers are where they belong: elsewhere llama.cpp computes with them until an
    assertion ends the process, or reads what is none of theirs."""
    for name, tensor in header.tensors.items():
        if tensor.type is I32 and not name.endswith(_INTEGER_TABLE):
            raise header.fault(f"tensor {name}", "is stored as I32, which no weights are")
        if len(tensor.dims) == 1 and tensor.type is not F32:
            raise header.fault(f"tensor {name}", f"is a vector stored as {tensor.type.name}; vectors are F32")


def _vocabulary_size(header: GgufHeader, numbers: _Numbers) -> int:
    tokens = header.metadata.get(TOKENS_KEY)
    declared = numbers.optional("vocab_size", 1, MAX_VOCABULARY)
    if tokens is not None and tokens.is_array:
        if not tokens.n_items:
            raise header.fault(TOKENS_KEY, "is empty")
        return tokens.n_items
    if declared is None:
        raise header.fault(numbers.key("vocab_size"), "is missing, and there are no tokens to count")
    return declared


def _check_embedding(header: GgufHeader, n_embd: int, n_vocab: int) -> None:
    for name in ("token_embd.weight", "output.weight"):
        tensor = header.tensors.get(name)
        if tensor is not None and tensor.dims != (n_embd, n_vocab):
            raise header.fault(f"tensor {name}", f"has sides {tensor.dims} instead of {(n_embd, n_vocab)}")
