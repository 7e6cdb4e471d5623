"""Tiny random llama models of every kind the family table lets through, as files that stock llama.cpp loads.

A tensor's numbers depend on its name alone: two models that differ in one feature share all other weights, so a slice
of one in place of the other's is a negative control for that feature and no more.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Encoding
from gguf import GGUFWriter
from numpy.typing import NDArray
from tests.stage.gguf_writing import add, add_vocabulary
from tests.stage.tiny_weights import encoded

N_LAYERS = 4
N_VOCAB = 160
N_EMBD = 256
"""One super-block of the K-quants."""
HEADS, KV_HEADS = 4, 2


@dataclass(frozen=True)
class TinyLlama:
    """What a model has. `keys`: metadata without the "llama." prefix, an int, float, bool, text or list of ints, that
    replaces the usual; `mixed`: encodings of tensors whose names end so, where they are not `encoding`."""

    encoding: Encoding = Encoding.F32
    mixed: Mapping[str, Encoding] = field(default_factory=lambda: MappingProxyType({}))
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    n_layers: int = N_LAYERS
    n_ff: int = 256
    head_size: int = N_EMBD // HEADS
    is_tied: bool = False
    has_biases: bool = False
    has_fused_qkv: bool = False
    rope_tensors: tuple[str, ...] = ()
    n_experts: int = 0
    swapped_experts: bool = False  # the first two experts of layer 2 have each other's way down

    def write(self, path: Path) -> Path:
        """Write the model to `path`."""
        writer = GGUFWriter(path, "llama")
        for key, value in (self._usual_keys() | dict(self.keys)).items():
            add(writer, f"llama.{key}", value)
        add_vocabulary(writer, N_VOCAB)
        for name, shape in self._shapes().items():
            numbers = self._numbers(name, shape)
            encoding = self._encoding(name, shape)
            writer.add_tensor(name, encoded(numbers, encoding), raw_dtype=encoding)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _usual_keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "block_count": self.n_layers,
            "context_length": 256,
            "embedding_length": N_EMBD,
            "feed_forward_length": self.n_ff,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10000.0,
            "vocab_size": N_VOCAB,
        }
        if self.n_experts:
            keys |= {"expert_count": self.n_experts, "expert_used_count": 2}
        return keys

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, rows first as numpy has it."""
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,)}
        if not self.is_tied:
            shapes["output.weight"] = (N_VOCAB, N_EMBD)
        shapes |= dict.fromkeys(self.rope_tensors, (self.head_size // 2,))
        for layer in range(self.n_layers):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        wide, narrow = HEADS * self.head_size, KV_HEADS * self.head_size
        attention = {"attn_q": (wide, N_EMBD), "attn_k": (narrow, N_EMBD), "attn_v": (narrow, N_EMBD)}
        if self.has_fused_qkv:
            attention = {"attn_qkv": (wide + 2 * narrow, N_EMBD)}
        dense = attention | {"attn_output": (N_EMBD, wide)}
        feed_forward = {"ffn_gate": (self.n_ff, N_EMBD), "ffn_up": (self.n_ff, N_EMBD), "ffn_down": (N_EMBD, self.n_ff)}
        shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (N_EMBD,), "ffn_norm.weight": (N_EMBD,)}
        if self.n_experts:
            shapes["ffn_gate_inp.weight"] = (self.n_experts, N_EMBD)
            shapes |= {f"{name}_exps.weight": (self.n_experts, *shape) for name, shape in feed_forward.items()}
        else:
            dense |= feed_forward
        for name, shape in dense.items():
            shapes[f"{name}.weight"] = shape
            if self.has_biases:
                shapes[f"{name}.bias"] = shape[:1]
        return shapes

    def _numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Weights that keep a row's size about constant, so that every layer has its say and answers vary."""
        random = np.random.default_rng(zlib.crc32(name.encode()))
        numbers = random.standard_normal(shape, np.float32)
        if name.startswith("rope_f"):
            return np.linspace(1, 8, shape[0], dtype=np.float32) * (1 + np.float32(0.1) * np.abs(numbers))
        if name.endswith("norm.weight"):
            return 1 + np.float32(0.2) * numbers
        if name.endswith(".bias"):
            return np.float32(0.3) * numbers
        if name == "token_embd.weight":
            return numbers
        if name == "blk.2.ffn_down_exps.weight" and self.swapped_experts:
            numbers[[0, 1]] = numbers[[1, 0]]
        gain = 3 if "attn_q" in name or "attn_k" in name or "ffn_gate_inp" in name else 1
        return numbers * np.float32(gain / math.sqrt(shape[-1]))

    def _encoding(self, name: str, shape: tuple[int, ...]) -> Encoding:
        if len(shape) == 1 or "ffn_gate_inp" in name:
            return Encoding.F32
        return next((encoding for end, encoding in self.mixed.items() if name.endswith(end)), self.encoding)
