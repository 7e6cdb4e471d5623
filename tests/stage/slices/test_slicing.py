"""Slices: the same bytes under new names, small where nothing is needed, refused where no cut is proved."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshswarm.artifacts.gguf.check import GgufHeader, check_hyperparameters, check_tokenizer, read_header
from meshswarm.artifacts.gguf.container import ValueType
from meshswarm.artifacts.gguf.probe import probe
from meshswarm.artifacts.merkle import file_root
from meshswarm.errors import ArtifactError
from meshswarm.span import Span
from meshswarm.stage.families.cuts import IllegalCutError
from meshswarm.stage.slices import slicing
from meshswarm.stage.slices.slicing import MIDDLE_VOCABULARY, write_slice

U32, I32, ARRAY, STRING = ValueType.UINT32, ValueType.INT32, ValueType.ARRAY, ValueType.STRING


def cut(source: Path, span: str, folder: Path, pads: tuple[int, ...] | None = None) -> tuple[Path, GgufHeader]:
    target = folder / f"{span.replace(':', '-')}+{pads}.gguf"
    write_slice(source, read_header(source), Span.parse(span), target, pads=pads)
    return target, read_header(target)


def weights(path: Path, header: GgufHeader, name: str) -> bytes:
    tensor = header.tensors[name]
    with path.open("rb") as file:
        file.seek(header.data_offset + tensor.offset)
        return file.read(tensor.n_bytes)


@pytest.mark.parametrize("span", ["0:10", "10:20", "20:30", "29:30"])
def test_the_embedded_models_layers_are_copied_byte_for_byte(smollm2: Path, tmp_path: Path, span: str) -> None:
    whole, wanted = read_header(smollm2), Span.parse(span)
    path, header = cut(smollm2, span, tmp_path)
    check_tokenizer(header)
    assert check_hyperparameters(header).n_layers == len(wanted) + (wanted.start == 0)
    layers = [name for name in header.tensors if name.startswith("blk.") and int(name.split(".")[1]) < len(wanted)]
    assert len(layers) == 9 * len(wanted)
    for name in layers:
        _, layer, rest = name.split(".", 2)
        original = f"blk.{int(layer) + wanted.start}.{rest}"
        assert header.tensors[name].type == whole.tensors[original].type
        assert weights(path, header, name) == weights(smollm2, whole, original)
    assert weights(path, header, "output_norm.weight") == weights(smollm2, whole, "output_norm.weight")
    n_vocab = MIDDLE_VOCABULARY if span == "10:20" else 49152
    assert header.tensors["token_embd.weight"].dims == (576, n_vocab)
    embedding = weights(path, header, "token_embd.weight")
    assert embedding == weights(smollm2, whole, "token_embd.weight")[: len(embedding)]


def test_a_middle_slice_has_no_vocabulary_and_little_else(smollm2: Path, tmp_path: Path) -> None:
    path, header = cut(smollm2, "10:20", tmp_path)
    assert header.data_offset < 16_384
    assert header.text("tokenizer.ggml.model") == "no_vocab"
    assert [key for key in header.metadata if key.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert header.scalar("llama.vocab_size") == MIDDLE_VOCABULARY
    layers = sum(tensor.n_bytes for tensor in header.tensors.values() if tensor.name.startswith("blk."))
    assert path.stat().st_size < layers + 60_000


def test_everybody_cuts_the_same_file(smollm2: Path, tmp_path: Path) -> None:
    first, _ = cut(smollm2, "3:5", tmp_path / "a")
    second, _ = cut(smollm2, "3:5", tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert file_root(first).hex() == "381e15b7fe5053fea9ae9872a2d279014a74f8cab76712065f934c0bfcc1f07a"


@pytest.mark.parametrize(
    ("span", "name", "original"),
    [
        ("0:10", "token_embd.weight", "token_embd.weight"),
        ("10:20", "blk.0.ffn_up.weight", "blk.10.ffn_up.weight"),
        ("10:20", "blk.9.ffn_up.weight", "blk.19.ffn_up.weight"),
        ("20:30", "token_embd.weight", "token_embd.weight"),
    ],
)
def test_the_largest_stretch_lies_in_blocks_as_in_the_model(
    smollm2: Path, tmp_path: Path, span: str, name: str, original: str
) -> None:
    """Or no file system could share the blocks of both files."""
    whole, (_, header) = read_header(smollm2), cut(smollm2, span, tmp_path)
    assert (header.position(header.tensors[name]) - whole.position(whole.tensors[original])) % 4096 == 0


@pytest.mark.parametrize("tied", [True, False])
def test_every_cut_of_a_tiny_model_is_well_formed(tmp_path: Path, gguf_recipe: Any, tied: bool) -> None:
    source = gguf_recipe(tied=tied, rope_freqs=True).write(tmp_path / "tiny.gguf", seed=1)
    for start in range(4):
        for stop in range(start + 1, 5):
            if (start, stop) != (0, 4):
                _, header = cut(source, f"{start}:{stop}", tmp_path)
                assert check_hyperparameters(header).n_layers == stop - start + (start == 0)
                assert "rope_freqs.weight" in header.tensors
                assert ("output.weight" in header.tensors) == (stop == 4 and not tied)


@pytest.mark.parametrize("span", ["0:2", "1:3", "2:4"])
@pytest.mark.parametrize("pads", [(), (3,)])
def test_stock_llama_cpp_loads_and_runs_slices(
    tmp_path: Path, gguf_recipe: Any, span: str, pads: tuple[int, ...]
) -> None:
    source = gguf_recipe(tied=span != "2:4", rope_freqs=True).write(tmp_path / "tiny.gguf", seed=1)
    probe(cut(source, span, tmp_path, pads)[0])


def test_an_untied_last_slice_has_zeros_where_only_a_shape_is_needed(tmp_path: Path, gguf_recipe: Any) -> None:
    source = gguf_recipe(n_vocab=48, tied=False).write(tmp_path / "tiny.gguf", seed=1)
    path, header = cut(source, "2:4", tmp_path)
    assert weights(path, header, "output.weight") == weights(source, read_header(source), "output.weight")
    assert header.tensors["token_embd.weight"].dims == (64, 48)
    assert header.tensors["token_embd.weight"].type.name == "Q5_0"
    assert not any(weights(path, header, "token_embd.weight"))
    probe(path)


def test_a_first_slice_ends_in_zeros_shaped_like_the_next_layer_that_take_no_room(
    smollm2: Path, tmp_path: Path
) -> None:
    plain, _ = cut(smollm2, "0:2", tmp_path, pads=())
    padded, header = cut(smollm2, "0:2", tmp_path)
    assert check_hyperparameters(header).n_layers == 3
    for name, tensor in header.tensors.items():
        if name.startswith("blk.2."):
            assert tensor.dims == header.tensors[name.replace("blk.2.", "blk.1.")].dims
            assert not any(weights(padded, header, name))
    assert padded.stat().st_blocks <= plain.stat().st_blocks + 64


def test_arrays_with_one_item_per_layer_are_cut_too(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["llama.attention.head_count_kv"] = (ARRAY, I32, [1, 1, 1, 1])
    recipe.entries["llama.feed_forward_length"] = (ARRAY, U32, [64, 64, 64, 64])
    source = recipe.write(tmp_path / "tiny.gguf")
    _, header = cut(source, "1:4", tmp_path, pads=(3, 3))
    numbers = [header.numbers(f"llama.{key}") for key in ("attention.head_count_kv", "feed_forward_length")]
    assert [array.tolist() for array in numbers if array is not None] == [[1] * 5, [64] * 5]


def test_layers_that_llama_cpp_would_build_alike_must_be_alike(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["llama.attention.head_count_kv"] = (ARRAY, I32, [1, 1, 2, 2])
    with pytest.raises(IllegalCutError, match=r"its setting llama\.attention\.head_count_kv differs between layers"):
        cut(recipe.write(tmp_path / "tiny.gguf"), "2:4", tmp_path)


def test_a_larger_alignment_is_kept(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["general.alignment"] = (U32, 512)
    recipe.alignment = 512
    source = recipe.write(tmp_path / "tiny.gguf", seed=3)
    path, header = cut(source, "1:2", tmp_path)
    assert header.alignment == 512
    assert weights(path, header, "blk.0.ffn_up.weight") == weights(source, read_header(source), "blk.1.ffn_up.weight")


def test_copying_by_hand_gives_the_same_file(tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf_recipe().write(tmp_path / "tiny.gguf", seed=2)
    in_kernel, _ = cut(source, "1:3", tmp_path / "a")

    def not_between_these(*_arguments: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", not_between_these, raising=False)
    refused, _ = cut(source, "1:3", tmp_path / "b")
    monkeypatch.delattr(os, "copy_file_range")
    absent, _ = cut(source, "1:3", tmp_path / "c")
    assert in_kernel.read_bytes() == refused.read_bytes() == absent.read_bytes()


@pytest.mark.parametrize("span", ["0:5", "4:5", "3:99"])
def test_a_span_outside_the_model_is_refused_with_what_there_is(tmp_path: Path, gguf_recipe: Any, span: str) -> None:
    source = gguf_recipe().write(tmp_path / "tiny.gguf")
    with pytest.raises(IllegalCutError, match=f"the layers {span} are outside the model, which has the layers 0:4"):
        cut(source, span, tmp_path)
    with pytest.raises(IllegalCutError, match="are the whole model"):
        cut(source, "0:4", tmp_path)
    with pytest.raises(IllegalCutError, match="600 padding layers are too many"):
        cut(source, "0:2", tmp_path, pads=(3,) * 600)


def test_what_nobody_proved_is_not_cut(tmp_path: Path, gguf_recipe: Any) -> None:
    recipe = gguf_recipe()
    recipe.entries["llama.attention.sliding_window_pattern"] = (U32, 2)
    with pytest.raises(IllegalCutError, match=r"its setting llama\.attention\.sliding_window_pattern"):
        cut(recipe.write(tmp_path / "tiny.gguf"), "0:2", tmp_path)
    recipe = gguf_recipe()
    recipe.entries["llama.rope.scaling.type"] = (STRING, "longrope")
    with pytest.raises(IllegalCutError, match=r"'longrope' as its setting llama\.rope\.scaling\.type"):
        cut(recipe.write(tmp_path / "tiny.gguf"), "0:2", tmp_path)
    recipe = gguf_recipe()
    recipe.tensors.append(["mystery.weight", (64,)])
    with pytest.raises(IllegalCutError, match=r"its tensor mystery\.weight"):
        cut(recipe.write(tmp_path / "tiny.gguf"), "0:2", tmp_path)


def test_a_failed_cut_leaves_nothing(tmp_path: Path, gguf_recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf_recipe().write(tmp_path / "tiny.gguf")
    header = read_header(source)
    os.truncate(source, header.data_offset + 1000)
    target = tmp_path / "slices" / "1-2.gguf"
    with pytest.raises(ArtifactError, match=r"the layers 1:2 of .*tiny\.gguf cannot be cut .* bytes too early"):
        write_slice(source, header, Span(1, 2), target)
    assert list(target.parent.iterdir()) == []
    monkeypatch.setattr(slicing.os, "fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ArtifactError, match="No space left"):
        write_slice(gguf_recipe().write(source), header, Span(1, 2), target)
    assert list(target.parent.iterdir()) == []
