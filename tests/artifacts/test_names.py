"""Names people use: made alike everywhere, matched kindly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshswarm.artifacts.names import NAME_PATTERN, clean_name, matches, model_name, split_encoding


@pytest.mark.parametrize(
    ("stem", "general_name", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "Smollm2 135M 8k Lc100K Mix1 Ep2", "smollm2-135m-instruct"),
        ("Meta-Llama-3.1-8B-Instruct-Q4_K_M", None, "meta-llama-3.1-8b-instruct"),
        ("Mixtral-8x7B-v0.1.IQ3_XXS", None, "mixtral-8x7b-v0.1"),
        ("gpt-oss-20b-mxfp4", None, "gpt-oss-20b"),
        ("tiny-BF16", None, "tiny"),
        ("model", "Tiny Llama", "tiny-llama"),
        ("ggml-model-q4_0", "Tiny Llama", "tiny-llama"),
        ("model", None, "model"),
        ("...", "", "unnamed"),
        ("日本語", "Ünï / cøde", "n-c-de"),
    ],
)
def test_names_of_models(stem: str, general_name: str | None, name: str) -> None:
    assert model_name(stem, general_name) == name


@given(st.text(max_size=200), st.none() | st.text(max_size=200))
def test_every_name_is_well_formed(stem: str, general_name: str | None) -> None:
    assert NAME_PATTERN.fullmatch(model_name(stem, general_name))


@given(st.text(max_size=150))
def test_cleaning_twice_changes_nothing(text: str) -> None:
    assert clean_name(clean_name(text)) == clean_name(text)


def test_encodings_are_split_off() -> None:
    assert split_encoding("SmolLM2-135M-Instruct.Q4_1") == ("SmolLM2-135M-Instruct", "q4_1")
    assert split_encoding("no-encoding-at-all") == ("no-encoding-at-all", "")


@pytest.mark.parametrize(
    "ref",
    [
        "smollm2-135m-instruct",
        "SmolLM2-135M-Instruct",
        "SmolLM2 135M Instruct",
        "smollm2-135m-instruct-q4_1",
        "SmolLM2-135M-Instruct.Q4_1",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ],
)
def test_a_model_answers_to(ref: str) -> None:
    assert matches(ref, "smollm2-135m-instruct", "q4_1")


@pytest.mark.parametrize("ref", ["", "-", "smollm2", "smollm2-135m-instruct-q8_0", "smollm2-135m"])
def test_a_model_does_not_answer_to(ref: str) -> None:
    assert not matches(ref, "smollm2-135m-instruct", "q4_1")
