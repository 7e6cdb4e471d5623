"""Where layers lie: the same from a header as from a manifest, and nothing that no file could be like."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stage.real_sizes import REAL_SIZES

from meshswarm.artifacts.gguf.check import parse_header, read_header
from meshswarm.artifacts.manifests.layer_ranges import MAX_RUNS, LayerRanges, Run


@st.composite
def ranges(draw: st.DrawFn) -> LayerRanges:
    n_layers = draw(st.integers(1, 6))
    order = draw(st.permutations([*range(n_layers), *draw(st.lists(st.integers(0, n_layers), max_size=8))]))
    files: list[list[Run]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for layer in order:
        runs = files[draw(st.integers(0, len(files) - 1))]
        start = (runs[-1].stop if runs else 0) + draw(st.integers(0, 1 << 40))
        runs.append(Run(layer, start, start + draw(st.integers(1, 1 << 40))))
    return LayerRanges(n_layers, tuple(map(tuple, files)))


@given(ranges())
def test_they_arrive_as_they_were(layers: LayerRanges) -> None:
    assert LayerRanges.parse(layers.n_layers, layers.fields()) == layers
    by_layer = [layers.of_layers(layer, layer + 1) for layer in range(layers.n_layers)]
    assert [sum(len(part) for file in files for part in file) for files in by_layer] == list(layers.layer_bytes)


@given(st.integers(1, 4), st.lists(st.binary(max_size=40), max_size=3))
def test_any_bytes_are_ranges_or_refused(n_layers: int, fields: list[bytes]) -> None:
    try:
        layers = LayerRanges.parse(n_layers, fields)
    except ValueError:
        return
    assert LayerRanges.parse(n_layers, layers.fields()) == layers


def test_every_tensor_lies_in_a_run_of_its_layer(gguf_recipe: type) -> None:
    recipe = gguf_recipe(n_layers=3, tied=False)
    recipe.tensors = recipe.tensors[4:] + recipe.tensors[:4]
    header = parse_header(recipe.header(), recipe.file_length)
    layers = LayerRanges.of(header)
    for tensor in header.tensors.values():
        layer = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else 3
        (runs,) = layers.of_layers(layer, layer + 1)
        at = header.position(tensor)
        assert any(run.start <= at and at + tensor.n_bytes <= run.stop for run in runs)
    assert all(one.layer != next_.layer for one, next_ in zip(layers.files[0], layers.files[0][1:], strict=False))


@pytest.mark.parametrize(
    ("n_layers", "runs", "complaint"),
    [
        (0, [], "1 to 512 layers"),
        (1, [], "layer 0 has no bytes"),
        (1, [Run(0, 10, 10)], "cannot be where they are"),
        (1, [Run(0, 10, 20), Run(0, 19, 30)], "cannot be where they are"),
        (1, [Run(2, 0, 10)], "layer 2 of 1"),
        (1, [Run(0, at, at + 1) for at in range(MAX_RUNS + 1)], "more than"),
    ],
)
def test_impossible_places_are_refused(n_layers: int, runs: list[Run], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LayerRanges(n_layers, (tuple(runs),))


@pytest.mark.parametrize("name", REAL_SIZES)
def test_models_of_the_size_people_aim_at_take_little(name: str, tmp_path: Path) -> None:
    header = read_header(REAL_SIZES[name].write(tmp_path / "large.gguf"))
    layers = LayerRanges.of(header)
    assert sum(layers.layer_bytes) < header.file_length
    assert sum(map(len, layers.fields())) < 4096
    assert LayerRanges.parse(layers.n_layers, layers.fields()) == layers
