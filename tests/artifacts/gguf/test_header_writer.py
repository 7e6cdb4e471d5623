"""Written headers read back as they were meant, entry for entry and tensor for tensor."""

from __future__ import annotations

from typing import Any

import pytest

from meshswarm.artifacts.gguf.container import F16, F32, Q5_0, ValueType, parse_container
from meshswarm.artifacts.gguf.header_writer import HeaderWriter


@pytest.mark.parametrize("alignment", [32, 4096])
def test_what_is_written_reads_back(gguf_recipe: Any, alignment: int) -> None:
    recipe = gguf_recipe()
    source = parse_container(recipe.header(), recipe.file_length, "source")
    writer = HeaderWriter(alignment)
    writer.copy(source, source.metadata["tokenizer.ggml.tokens"])
    writer.pick_items(source, source.metadata["tokenizer.ggml.token_type"], [30, 31, 31, 0])
    writer.u32("general.alignment", alignment)
    writer.text("general.name", "Ünï")
    offsets = [writer.tensor("a", (33,), F32), writer.tensor("b", (32, 3), Q5_0), writer.tensor("c", (1, 1, 1, 2), F16)]
    data = writer.finish()
    assert len(data) % alignment == 0
    header = parse_container(data, len(data) + writer.data_bytes, "written")
    assert header.raw == data
    assert list(header.strings("tokenizer.ggml.tokens")) == list(source.strings("tokenizer.ggml.tokens"))
    types = header.numbers("tokenizer.ggml.token_type")
    assert types is not None and types.tolist() == [1, 1, 1, 1]
    assert header.metadata["tokenizer.ggml.token_type"].item_type is ValueType.INT32
    assert header.text("general.name") == "Ünï"
    assert [tensor.offset for tensor in header.tensors.values()] == offsets
    assert [tensor.dims for tensor in header.tensors.values()] == [(33,), (32, 3), (1, 1, 1, 2)]
    assert [tensor.n_bytes for tensor in header.tensors.values()] == [132, 66, 4]


def test_items_are_picked_in_any_order(gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["llama.sizes"] = (ValueType.ARRAY, ValueType.UINT16, [5, 6, 7])
    source = parse_container(recipe.header(), recipe.file_length, "source")
    writer = HeaderWriter()
    writer.pick_items(source, source.metadata["llama.sizes"], [1, 2, 2, 0])
    writer.array("llama.flags", ValueType.BOOL, [1, 0, 1])
    writer.array("llama.counts", ValueType.UINT32, [1 << 31, 2])
    writer.tensor("a", (1,), F32)
    header = parse_container(writer.finish(), 1 << 20, "written")
    sizes = header.numbers("llama.sizes")
    assert sizes is not None and sizes.tolist() == [6, 7, 7, 5]
    flags, counts = header.numbers("llama.flags"), header.numbers("llama.counts")
    assert flags is not None and flags.tolist() == [True, False, True]
    assert counts is not None and counts.tolist() == [1 << 31, 2]
