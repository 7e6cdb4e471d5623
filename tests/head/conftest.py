"""Vocabularies for the tests: the real model's, and small ones made up for what it does not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.gguf.check import GgufHeader, read_header
from meshswarm.head.vocabulary import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
STRING, ARRAY, I32, F32, U32, BOOL = 8, 9, 5, 6, 4, 7
MakeHeader = Callable[..., GgufHeader]


@pytest.fixture(scope="session")
def smollm2_header(smollm2: Path) -> GgufHeader:
    return read_header(smollm2)


@pytest.fixture(scope="session")
def vocabulary_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="session")
def vocabulary(smollm2_header: GgufHeader, vocabulary_cache: Path) -> Vocabulary:
    """SmolLM2's: GPT-2 BPE, nothing put before a prompt."""
    return Vocabulary.load(smollm2_header, vocabulary_cache)


@pytest.fixture(scope="session")
def sentencepiece(gguf_recipe: Any, tmp_path_factory: pytest.TempPathFactory) -> MakeHeader:
    """Makes the header of a small SentencePiece vocabulary: <unk>, <s>, </s>, 256 bytes, then `tokens` (text, type).

    `bytes_from`: the first byte that has a token. `entries` are added, those with None left out.
    """

    def make(
        *tokens: tuple[str, int], bytes_from: int = 0, entries: dict[str, tuple[Any, ...] | None] | None = None
    ) -> GgufHeader:
        rows = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
        rows += [(f"<0x{byte:02X}>", BYTE) for byte in range(bytes_from, 256)]
        rows += tokens
        recipe = gguf_recipe(n_layers=1, n_vocab=len(rows))
        recipe.entries |= {
            "tokenizer.ggml.model": (STRING, "llama"),
            "tokenizer.ggml.tokens": (ARRAY, STRING, [text for text, _ in rows]),
            "tokenizer.ggml.token_type": (ARRAY, I32, [kind for _, kind in rows]),
            "tokenizer.ggml.scores": (ARRAY, F32, [float(-index) for index in range(len(rows))]),
        }
        for key in ("tokenizer.ggml.pre", "tokenizer.ggml.merges"):
            del recipe.entries[key]
        for key, value in (entries or {}).items():
            if value is None:
                recipe.entries.pop(key, None)
            else:
                recipe.entries[key] = value
        return read_header(recipe.write(tmp_path_factory.mktemp("sentencepiece") / "tiny.gguf"))

    return make
