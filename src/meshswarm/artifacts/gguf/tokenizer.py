"""The tokenizer in a header, checked against what makes llama.cpp abort or read out of bounds.

The rule this file keeps: tokens are looked at the way llama.cpp looks at them (a C string ends at its first NUL, an
empty token gets a made-up name), since what is unique to us and not to it aborts the process. This walks the whole
vocabulary, about 0.1 s for 50,000 tokens: callers do it once per file.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np

from meshswarm.artifacts.gguf.container import GgufHeader, ValueType
from meshswarm.artifacts.gguf.hyperparameters import TOKENS_KEY

MODEL_KEY = "tokenizer.ggml.model"
TOKENIZER_MODELS = frozenset({"gpt2", "llama", "no_vocab", "none"})
"""Byte-level BPE, SentencePiece BPE, and none at all."""
NO_VOCABULARY = frozenset({"no_vocab", "none"})
_MAX_TOKEN_TYPE = 6


def token_list_mark(header: GgufHeader) -> bytes:
    """SHA-256 of the vocabulary's tokens in their order: where it is the same, an id means the same text. Raises
    ArtifactError when there is no vocabulary."""
    entry = header.metadata.get(TOKENS_KEY)
    if entry is None:
        raise header.fault(TOKENS_KEY, "is missing")
    return hashlib.sha256(memoryview(header.raw)[entry.value_start : entry.end]).digest()


def check_tokenizer(header: GgufHeader) -> None:
    """Raises ArtifactError naming the first field of the tokenizer that cannot be."""
    model = header.text(MODEL_KEY)
    if model is None:
        raise header.fault(MODEL_KEY, "is missing")
    if model not in TOKENIZER_MODELS:
        known = ", ".join(sorted(TOKENIZER_MODELS - NO_VOCABULARY))
        raise header.fault(MODEL_KEY, f"is {model[:40]!r}; the tokenizers supported are: {known}")
    if model in NO_VOCABULARY:
        return
    n_tokens = _check_tokens(header)
    _check_array(header, "tokenizer.ggml.token_type", ValueType.INT32, n_tokens, 0, _MAX_TOKEN_TYPE)
    _check_array(header, "tokenizer.ggml.scores", ValueType.FLOAT32, n_tokens, -1e9, 1e9)
    if model == "llama":
        if "tokenizer.ggml.scores" not in header.metadata:
            raise header.fault("tokenizer.ggml.scores", "is missing, and this kind of tokenizer needs it")
        _check_byte_tokens(header)
    if "tokenizer.ggml.merges" in header.metadata:
        _check_merges(header)
    elif model == "gpt2":
        raise header.fault("tokenizer.ggml.merges", "is missing, and this kind of tokenizer needs it")
    _check_special_ids(header, n_tokens)


def _check_tokens(header: GgufHeader) -> int:
    """Number of tokens, all different in llama.cpp's eyes and valid UTF-8."""
    tokens = list(header.strings(TOKENS_KEY))
    as_c_strings = [
        token.partition(b"\0")[0] or f"[EMPTY_{index}]".encode() if not token or 0 in token else token
        for index, token in enumerate(tokens)
    ]
    if len(set(as_c_strings)) != len(tokens):
        seen: set[bytes] = set()
        for index, token in enumerate(as_c_strings):
            if token in seen:
                raise header.fault(TOKENS_KEY, f"has a duplicate: token {index}, {token[:40]!r}, was there before")
            seen.add(token)
    _check_utf8(header, TOKENS_KEY, tokens)
    return len(tokens)


def _check_byte_tokens(header: GgufHeader) -> None:
    """Every byte has its token: a text with one that has none would abort the process that tokenizes it."""
    missing = {b"<0x%02X>" % byte for byte in range(256)}.difference(header.strings(TOKENS_KEY))
    if missing:
        raise header.fault(TOKENS_KEY, f"has no token for {len(missing)} of the 256 bytes, {min(missing)!r} for one")


def _check_utf8(header: GgufHeader, key: str, strings: list[bytes]) -> None:
    """No sequence can span an ASCII separator, so the join is valid exactly when every string is."""
    try:
        b"\n".join(strings).decode()
    except UnicodeDecodeError:
        raise header.fault(key, "has a string that is not valid UTF-8") from None


def _check_array(header: GgufHeader, key: str, kind: ValueType, count: int, low: float, high: float) -> None:
    """llama.cpp takes these arrays' lengths on trust."""
    entry = header.metadata.get(key)
    if entry is None:
        return
    if not entry.is_array or entry.item_type is not kind:
        raise header.fault(key, f"is not an array of {kind.name.lower()}")
    if entry.n_items != count:
        raise header.fault(key, f"has {entry.n_items} items for {count} tokens")
    values = header.numbers(key)
    assert values is not None
    as_floats = values.astype(np.float64)
    if not ((as_floats >= low) & (as_floats <= high)).all():
        raise header.fault(key, f"has a value outside {low} to {high}")


def _check_merges(header: GgufHeader) -> None:
    """Each merge is two non-empty parts with a space between."""
    key = "tokenizer.ggml.merges"
    merges = list(header.strings(key))
    for index, merge in enumerate(merges):
        if not 0 < merge.find(b" ", 1) < len(merge) - 1:
            raise header.fault(key, f"has an entry that is not two parts: number {index}, {merge[:40]!r}")
    _check_utf8(header, key, merges)


def _check_special_ids(header: GgufHeader, n_tokens: int) -> None:
    for key, entry in header.metadata.items():
        if not re.fullmatch(r"tokenizer\.ggml\.\w+_token_ids?", key):
            continue
        if entry.item_type not in (ValueType.UINT32, ValueType.INT32) or entry.is_array != key.endswith("s"):
            raise header.fault(key, "is not a token id")
        value = header.scalar(key) if not entry.is_array else None
        values = header.numbers(key) if value is None else np.asarray([value])
        assert values is not None
        for token in values.tolist():
            if not 0 <= token < n_tokens:
                raise header.fault(key, f"is {token}, outside the {n_tokens} tokens")
