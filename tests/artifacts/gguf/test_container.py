"""The container: every length, count and offset that lies is refused by name."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf as reference
import pytest

from meshswarm.artifacts.gguf.container import (
    MAX_ALIGNMENT,
    MAX_HEADER_BYTES,
    TENSOR_TYPES,
    HeaderCutShortError,
    ValueType,
    parse_container,
)
from meshswarm.errors import ArtifactError

U32, STRING, ARRAY, BOOL = ValueType.UINT32, ValueType.STRING, ValueType.ARRAY, ValueType.BOOL


def parse(recipe: Any) -> Any:
    return parse_container(recipe.header(), recipe.file_length, "crafted.gguf")


def test_the_tensor_types_are_the_reference_packages() -> None:
    for code, kind in TENSOR_TYPES.items():
        known = reference.GGMLQuantizationType(code)
        assert (kind.name, (kind.block_elements, kind.block_bytes)) == (known.name, reference.GGML_QUANT_SIZES[known])


def test_the_embedded_model_reads_as_the_reference_package_reads_it(smollm2: Path) -> None:
    data = smollm2.open("rb").read(4 << 20)
    header = parse_container(data, smollm2.stat().st_size, "smollm2")
    other = reference.GGUFReader(smollm2)
    assert header.data_offset == other.data_offset
    assert [
        (tensor.name, tensor.dims, tensor.type.code, header.data_offset + tensor.offset, tensor.n_bytes)
        for tensor in header.tensors.values()
    ] == [(t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset, t.n_bytes) for t in other.tensors]
    keys = [key for key in other.fields if not key.startswith("GGUF.")]
    assert list(header.metadata) == keys
    for key in keys:
        if not header.metadata[key].is_array:
            assert header.scalar(key) == other.fields[key].contents()
    assert list(header.strings("tokenizer.ggml.tokens"))[1000:1003] == [
        token.encode() for token in other.fields["tokenizer.ggml.tokens"].contents(slice(1000, 1003))
    ]
    types = header.numbers("tokenizer.ggml.token_type")
    assert types is not None and types.tolist()[:20] == other.fields["tokenizer.ggml.token_type"].contents()[:20]


def test_a_header_cut_anywhere_says_so(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    whole = recipe.header()
    for length in range(len(whole)):
        with pytest.raises(HeaderCutShortError, match=r"crafted\.gguf is refused: it ends in the middle of"):
            parse_container(whole[:length], recipe.file_length, "crafted.gguf")
    assert parse_container(whole, recipe.file_length, "crafted.gguf").raw == whole


def test_a_file_without_all_its_tensors_is_refused(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    last = recipe.file_length
    for length in (len(recipe.header()), last - 1):
        with pytest.raises(ArtifactError, match="the file is cut short"):
            parse_container(recipe.header(), length, "crafted.gguf")


@pytest.mark.parametrize(
    ("tweak", "message"),
    [
        ({"magic": b"GGML"}, "this is no GGUF file"),
        ({"version": 2}, "the version is 2"),
        ({"version": 3 << 24}, "big-endian"),
        ({"n_tensors": 0}, "the tensor count is 0"),
        ({"n_tensors": 1 << 63}, "the tensor count is 9223372036854775808"),
        ({"n_tensors": (1 << 64) - 1}, "the tensor count"),
        ({"n_entries": 0}, "the metadata count is 0"),
        ({"n_entries": 1 << 32}, "the metadata count is 4294967296"),
    ],
)
def test_a_wrong_start_is_refused(gguf_recipe: Any, tweak: dict[str, Any], message: str) -> None:
    recipe = gguf_recipe()
    recipe.tweak = tweak
    with pytest.raises(ArtifactError, match=message):
        parse(recipe)


@pytest.mark.parametrize("alignment", [0, 1, 8, 16, 33, 96, MAX_ALIGNMENT * 2, 1 << 20, 1 << 31])
def test_alignments_that_are_no_powers_of_two_or_out_of_bounds_are_refused(gguf_recipe: Any, alignment: int) -> None:
    recipe = gguf_recipe()
    recipe.entries["general.alignment"] = (U32, alignment)
    with pytest.raises(ArtifactError, match=rf"general\.alignment is {alignment}, not a power of two between 32 and"):
        parse(recipe)


def test_an_alignment_of_another_type_is_refused(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["general.alignment"] = (ValueType.UINT64, 32)
    with pytest.raises(ArtifactError, match=r"general\.alignment is not a 32-bit unsigned integer"):
        parse(recipe)


def test_a_larger_alignment_is_kept_to(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["general.alignment"] = (U32, 256)
    recipe.alignment = 256
    header = parse(recipe)
    assert header.alignment == 256
    assert header.data_offset % 256 == 0
    assert all(tensor.offset % 256 == 0 for tensor in header.tensors.values())


def bend(recipe: Any, index: int, tensor: list[Any]) -> Any:
    recipe.tensors[index] = tensor
    return recipe


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (["output_norm.weight", ()], "tensor output_norm.weight has 0 dimensions"),
        (["output_norm.weight", (1,) * 5], "tensor output_norm.weight has 5 dimensions"),
        (["output_norm.weight", (0,)], "a side of tensor output_norm.weight is 0"),
        (["output_norm.weight", (1 << 31,)], "a side of tensor output_norm.weight is 2147483648"),
        (["output_norm.weight", (1 << 63, 2)], "a side of tensor output_norm.weight is 9223372036854775808"),
        (["output_norm.weight", ((1 << 31) - 1,) * 4], "tensor output_norm.weight has .* elements, more than"),
        (["output_norm.weight", (64,), 999], "tensor output_norm.weight is stored as type 999"),
        (["output_norm.weight", (64,), 15], "tensor output_norm.weight is stored as type 15"),
        (["output_norm.weight", (48,), 3], "tensor output_norm.weight has rows of 48, which Q4_1 blocks do not"),
        (["output_norm.weight", (64,), 0, 7], "tensor output_norm.weight lies at offset 7 instead of"),
        (["output_norm.weight", (64,), 0, 0], "tensor output_norm.weight lies at offset 0 instead of"),
        (["output_norm.weight", (64,), 0, 1 << 63], "tensor output_norm.weight lies at offset 9223372036854775808"),
        (["token_embd.weight", (64,)], "tensor token_embd.weight appears twice"),
        (["", (64,)], "the name length of tensor 1 is 0"),
        (["x" * 64, (64,)], "the name length of tensor 1 is 64"),
        (["blk.0.\n", (64,)], "tensor 1 has a name that is not plain text"),
        ([b"blk.\xff", (64,)], "tensor 1 has a name that is not plain text"),
    ],
)
def test_a_wrong_tensor_is_refused(gguf_recipe: Any, tensor: list[Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_container(bend(gguf_recipe(), 1, tensor).header(), 1 << 40, "crafted.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("", (U32, 1), "the name length of metadata entry 20 is 0"),
        ("k" * 257, (U32, 1), "the name length of metadata entry 20 is 257"),
        ("a key", (U32, 1), "metadata entry 20 has a name that is not plain text"),
        ("k", (BOOL, 2), "k has a truth value that is neither 0 nor 1"),
        ("k", (ARRAY, BOOL, [1, 255]), "k has a truth value"),
    ],
)
def test_a_wrong_entry_is_refused(gguf_recipe: Any, key: str, value: tuple[Any, ...], message: str) -> None:
    recipe = gguf_recipe()
    recipe.entries[key] = value
    with pytest.raises(ArtifactError, match=message):
        parse(recipe)


def crafted(entry: bytes, data: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1) + b"k" + entry + data


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (struct.pack("<I", 13), "k has the unknown value type 13"),
        (struct.pack("<I", (1 << 32) - 1), "k has the unknown value type"),
        (struct.pack("<IIQ", ARRAY, ARRAY, 1), "k is an array of arrays"),
        (struct.pack("<IIQ", ARRAY, 77, 1), "k has the unknown value type 77"),
        (struct.pack("<IIQ", ARRAY, U32, (1 << 64) - 1), "the item count of k is 18446744073709551615"),
        (struct.pack("<IIQ", ARRAY, STRING, (1 << 22) + 1), "the item count of k is 4194305"),
        (struct.pack("<IQ", STRING, (1 << 64) - 1), "k has a string of 18446744073709551615 bytes"),
        (struct.pack("<IIQQ", ARRAY, STRING, 2, 1 << 62), "k has a string of 4611686018427387904 bytes"),
    ],
)
def test_a_count_that_lies_is_refused_before_it_is_believed(entry: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        parse_container(crafted(entry, bytes(64)), 1 << 40, "crafted.gguf")


def test_an_array_longer_than_the_file_asks_for_more_and_allocates_nothing() -> None:
    with pytest.raises(HeaderCutShortError):
        parse_container(crafted(struct.pack("<IIQ", ARRAY, ValueType.FLOAT64, 1 << 22)), 1 << 40, "crafted.gguf")


def test_a_key_twice_is_refused(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    header = recipe.header().replace(b"general.name", b"llama.rope.d").replace(b"llama.rope.d", b"general.name", 1)
    twice = header.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id")
    with pytest.raises(ArtifactError, match=r"tokenizer\.ggml\.eos_token_id appears twice"):
        parse_container(twice, recipe.file_length, "crafted.gguf")


def test_a_header_beyond_the_cap_is_refused_not_read_on() -> None:
    strings = struct.pack("<IIQ", ARRAY, STRING, 1 << 22)
    item = struct.pack("<Q", 1 << 20) + bytes(1 << 20)
    data = crafted(strings, item * 64)
    assert len(data) > MAX_HEADER_BYTES
    with pytest.raises(ArtifactError, match="the header is longer than 64 MiB") as caught:
        parse_container(data, 1 << 40, "crafted.gguf")
    assert not isinstance(caught.value, HeaderCutShortError)


def test_asking_for_a_value_as_something_else_is_an_error(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["general.name"] = (STRING, b"\xff\xfe")
    header = parse(recipe)
    for ask, key, problem in (
        (header.scalar, "tokenizer.ggml.tokens", "is an array"),
        (header.text, "llama.block_count", "is not a string"),
        (header.text, "general.name", "is not valid UTF-8"),
        (header.numbers, "tokenizer.ggml.tokens", "is not an array of numbers"),
        (header.numbers, "llama.block_count", "is not an array of numbers"),
        (header.strings, "tokenizer.ggml.token_type", "is not an array of strings"),
        (header.strings, "nothing", "is not an array of strings"),
    ):
        with pytest.raises(ArtifactError, match=f"{key} {problem}"):
            ask(key)
    assert header.scalar("nothing") is header.text("nothing") is header.numbers("nothing") is None
