"""What the writers of test models share: settings of any kind, and a vocabulary of nothing but letters."""

from __future__ import annotations

from typing import Any

from gguf import GGUFValueType as Kind
from gguf import GGUFWriter


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """An int, float, bool, text, or a list of ints or bools."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case [bool(), *_]:
            writer.add_key_value(key, value, Kind.ARRAY, Kind.BOOL)
        case _:
            writer.add_key_value(key, value, Kind.ARRAY, Kind.INT32)


def add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    letters = [chr(code) for code in range(0x100, 0x100 + n_vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(letters)
    writer.add_token_types([1] * n_vocab)
    writer.add_token_merges([f"{letters[0]} {letters[0]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
