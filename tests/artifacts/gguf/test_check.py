"""The door as a whole: reading from disk, and thousands of damaged headers that are refused or read, never worse."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshswarm.artifacts.gguf.check import GgufHeader, check_tokenizer, parse_header, read_header
from meshswarm.errors import ArtifactError


def examine(data: bytes, file_length: int) -> bool:
    """True when the damaged header passed, False when it was refused; anything else is a failure of the parser."""
    try:
        header = parse_header(data, file_length, source="damaged.gguf")
        check_tokenizer(header)
    except ArtifactError as error:
        assert str(error).startswith("damaged.gguf is refused: ")
        return False
    assert isinstance(header, GgufHeader)
    return True


def damage(data: bytearray, numbers: random.Random, reach: int) -> None:
    """One to four random changes in the first `reach` bytes: flipped bits, extreme integers, moved bytes."""
    for _ in range(numbers.randint(1, 4)):
        at = numbers.randrange(reach)
        kind = numbers.randrange(4)
        if kind == 0:
            data[at] ^= 1 << numbers.randrange(8)
        elif kind == 1:
            data[at] = numbers.randrange(256)
        elif kind == 2:
            extreme = numbers.choice([0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1])
            data[at : at + 8] = extreme.to_bytes(8, "little")
        else:
            length, source = numbers.randrange(1, 32), numbers.randrange(reach)
            data[at : at + length] = data[source : source + length]


def test_thousands_of_damaged_tiny_headers(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    whole, file_length = recipe.header(), recipe.file_length
    passed = 0
    for seed in range(4000):
        data = bytearray(whole)
        damage(data, random.Random(seed), len(whole))
        passed += examine(bytes(data), file_length)
    assert 0 < passed < 2000, "a damaged name or weight may pass; most damage must not"


def test_damaged_real_headers(smollm2: Path) -> None:
    """Damage in the metadata before the tokens, and in the tensor table after the merges."""
    whole = read_header(smollm2).raw
    file_length = smollm2.stat().st_size
    tokens = whole.index(b"tokenizer.ggml.tokens")
    table = whole.index(b"token_embd.weight")
    for seed in range(120):
        numbers = random.Random(seed)
        data = bytearray(whole)
        if seed % 2:
            part = data[table:]
            damage(part, numbers, len(part))
            data[table:] = part
        else:
            damage(data, numbers, tokens)
        examine(bytes(data), file_length)


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_noise_is_refused(noise: bytes) -> None:
    assert not examine(noise, 1 << 30)
    assert not examine(b"GGUF\3\0\0\0" + noise, 1 << 30)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_replaced_stretch_is_refused_or_read(gguf_recipe: Any, data: st.DataObject) -> None:
    recipe = gguf_recipe()
    whole = recipe.header()
    start = data.draw(st.integers(0, len(whole) - 1))
    stretch = data.draw(st.binary(min_size=1, max_size=64))
    examine(whole[:start] + stretch + whole[start + len(stretch) :], recipe.file_length)


def test_a_file_is_read_no_further_than_its_header(tmp_path: Path, gguf_recipe: Any) -> None:
    path = gguf_recipe().write(tmp_path / "tiny.gguf")
    header = read_header(path)
    assert header.file_length == path.stat().st_size
    assert header.raw == path.read_bytes()[: header.data_offset]


def test_a_header_longer_than_one_read_is_read_whole(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    for index in range(11):
        recipe.entries[f"general.filler.{index}"] = (8, "x" * ((1 << 20) - 1))
    header = read_header(recipe.write(tmp_path / "long.gguf"))
    assert header.data_offset > 11 << 20
    assert "general.filler.10" in header.metadata


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_file_cut_short_is_named(tmp_path: Path, gguf_recipe: Any, share: float) -> None:
    path = gguf_recipe().write(tmp_path / "short.gguf")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(ArtifactError, match=r"short\.gguf is refused"):
        read_header(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nowhere\.gguf cannot be read: No such file"):
        read_header(tmp_path / "nowhere.gguf")
    with pytest.raises(ArtifactError, match="cannot be read: Is a directory"):
        read_header(tmp_path)
