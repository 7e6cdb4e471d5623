"""The tokenizer: what aborts llama.cpp, or makes it read past an array, is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.gguf.check import check_tokenizer, parse_header, read_header
from meshswarm.artifacts.gguf.container import ValueType
from meshswarm.errors import ArtifactError

U32, F32, STRING, ARRAY, I32 = (
    ValueType.UINT32,
    ValueType.FLOAT32,
    ValueType.STRING,
    ValueType.ARRAY,
    ValueType.INT32,
)
LETTERS = [chr(c) for c in range(ord("!"), ord("!") + 32)]


def check(recipe: Any) -> None:
    check_tokenizer(parse_header(recipe.header(), recipe.file_length, source="crafted.gguf"))


def test_the_embedded_models_tokenizer_passes(smollm2: Path) -> None:
    check_tokenizer(read_header(smollm2))


def test_a_tiny_one_passes_and_so_does_none(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    check(recipe)
    recipe.entries["tokenizer.ggml.model"] = (STRING, "no_vocab")
    check(recipe)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([*LETTERS[:31], "!"], "has a duplicate: token 31, b'!'"),
        ([*LETTERS[:30], "a\0b", "a\0c"], "has a duplicate: token 31, b'a'"),
        ([*LETTERS[:30], "", "[EMPTY_30]"], "has a duplicate: token 31"),
        ([*LETTERS[:31], b"\xff\xfe"], "has a string that is not valid UTF-8"),
        ([*LETTERS[:30], b"\xc3", b"\xa9"], "has a string that is not valid UTF-8"),
    ],
)
def test_tokens_that_llama_cpp_cannot_tell_apart_or_read_are_refused(
    gguf_recipe: Any, tokens: list[Any], problem: str
) -> None:
    recipe = gguf_recipe()
    recipe.entries["tokenizer.ggml.tokens"] = (ARRAY, STRING, tokens)
    with pytest.raises(ArtifactError, match=rf"tokenizer\.ggml\.tokens {problem}"):
        check(recipe)


def test_one_empty_token_and_tokens_with_a_nul_are_fine(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["tokenizer.ggml.tokens"] = (ARRAY, STRING, [*LETTERS[:29], "", "\0", "a\0b"])
    check(recipe)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("tokenizer.ggml.model", (STRING, "t5"), "is 't5'; the tokenizers supported are: gpt2, llama"),
        ("tokenizer.ggml.tokens", (ARRAY, I32, [1] * 32), "is not an array of strings"),
        ("tokenizer.ggml.token_type", (ARRAY, I32, [1] * 31), "has 31 items for 32 tokens"),
        ("tokenizer.ggml.token_type", (ARRAY, I32, [7] * 32), "has a value outside 0 to 6"),
        ("tokenizer.ggml.token_type", (ARRAY, F32, [1.0] * 32), "is not an array of int32"),
        ("tokenizer.ggml.token_type", (I32, 1), "is not an array of int32"),
        ("tokenizer.ggml.scores", (ARRAY, F32, [0.0] * 3), "has 3 items for 32 tokens"),
        ("tokenizer.ggml.scores", (ARRAY, F32, [float("nan")] * 32), "has a value outside"),
        ("tokenizer.ggml.merges", (ARRAY, STRING, ["! !", "!!"]), "has an entry that is not two parts: number 1"),
        ("tokenizer.ggml.merges", (ARRAY, STRING, [" !"]), "has an entry that is not two parts"),
        ("tokenizer.ggml.merges", (ARRAY, STRING, ["! "]), "has an entry that is not two parts"),
        ("tokenizer.ggml.merges", (ARRAY, STRING, [b"\xff \xff"]), "has a string that is not valid UTF-8"),
        ("tokenizer.ggml.bos_token_id", (U32, 10**6), "is 1000000, outside the 32 tokens"),
        ("tokenizer.ggml.bos_token_id", (U32, 32), "is 32, outside the 32 tokens"),
        ("tokenizer.ggml.eos_token_id", (I32, -1), "is -1, outside the 32 tokens"),
        ("tokenizer.ggml.eos_token_id", (F32, 1.0), "is not a token id"),
        ("tokenizer.ggml.eos_token_id", (ARRAY, U32, [1]), "is not a token id"),
        ("tokenizer.ggml.eog_token_ids", (ARRAY, U32, [1, 99]), "is 99, outside the 32 tokens"),
        ("tokenizer.ggml.fim_pre_token_id", (U32, 1 << 31), "is 2147483648, outside"),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_name(
    gguf_recipe: Any, key: str, value: tuple[Any, ...], problem: str
) -> None:
    recipe = gguf_recipe()
    recipe.entries[key] = value
    with pytest.raises(ArtifactError, match=rf"crafted\.gguf is refused: {key} {problem}"):
        check(recipe)


def test_a_sentencepiece_vocabulary_has_a_token_for_every_byte(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    recipe.tensors[0] = ["token_embd.weight", (64, 257)]
    recipe.entries |= {
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, STRING, [*byte_tokens, "<unk>"]),
        "tokenizer.ggml.token_type": (ARRAY, I32, [6] * 256 + [2]),
        "tokenizer.ggml.scores": (ARRAY, F32, [0.0] * 257),
    }
    check(recipe)
    byte_tokens[9] = "tab"
    recipe.entries["tokenizer.ggml.tokens"] = (ARRAY, STRING, [*byte_tokens, "<unk>"])
    with pytest.raises(ArtifactError, match="has no token for 1 of the 256 bytes, b'<0x09>'"):
        check(recipe)


@pytest.mark.parametrize(
    ("model", "missing"),
    [("gpt2", "tokenizer.ggml.merges"), ("llama", "tokenizer.ggml.scores"), (None, "tokenizer.ggml.model")],
)
def test_what_a_kind_of_tokenizer_needs_must_be_there(gguf_recipe: Any, model: str | None, missing: str) -> None:
    recipe = gguf_recipe()
    recipe.entries["tokenizer.ggml.model"] = (STRING, model)
    recipe.entries.pop(missing, None)
    with pytest.raises(ArtifactError, match=f"{missing} is missing"):
        check(recipe)
