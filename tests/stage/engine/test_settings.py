"""A model's settings: integers for all layers or for each, and errors that name what is neither."""

from typing import Any

import pytest

from meshswarm.artifacts.gguf.check import parse_header
from meshswarm.artifacts.gguf.container import ValueType
from meshswarm.errors import ArtifactError
from meshswarm.stage.engine.settings import Settings

U32, TEXT, ARRAY = ValueType.UINT32, ValueType.STRING, ValueType.ARRAY


def settings_of(recipe: Any) -> Settings:
    return Settings(parse_header(recipe.header(), recipe.file_length, source="crafted.gguf"))


def test_one_value_for_all_layers_or_one_for_each(gguf_recipe: Any) -> None:
    recipe = gguf_recipe(n_layers=4)
    recipe.entries |= {"llama.ours": (U32, 7), "llama.theirs": (ARRAY, U32, [4, 3, 9, 1, 5])}
    settings = settings_of(recipe)
    assert settings.per_layer("ours", 0) == (7, 7, 7, 7)
    assert settings.per_layer("theirs", 0) == (4, 3, 9, 1)
    assert settings.per_layer("missing", 2) == (2, 2, 2, 2)
    assert settings.highest("theirs", 0) == 9
    assert settings.number("missing", 5) == 5
    assert settings.has("ours") and not settings.has("missing")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ((TEXT, b"many"), r"llama\.ours is not an integer"),
        ((ARRAY, U32, [1, 2]), r"llama\.ours has 2 items for 4 layers"),
    ],
)
def test_what_is_no_number_of_each_layer_is_named(gguf_recipe: Any, value: Any, problem: str) -> None:
    recipe = gguf_recipe(n_layers=4)
    recipe.entries["llama.ours"] = value
    with pytest.raises(ArtifactError, match=problem):
        settings_of(recipe).per_layer("ours", 0)
