"""The forms a prompt comes in."""

from __future__ import annotations

import pytest

from meshswarm.api.completions import read_completion
from meshswarm.errors import RequestError


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", "Once"),
        ("", ""),
        (["Once"], "Once"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
        ([7], (7,)),
    ],
)
def test_a_prompt_is_text_or_tokens(prompt, expected):
    request = read_completion({"prompt": prompt})
    assert request.prompt == expected
    assert request.messages is None


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (None, "missing_required_parameter"),
        ([], "invalid_value"),
        ([[]], "invalid_value"),
        (["a", "b"], "unsupported_parameter"),
        ([[1], [2]], "unsupported_parameter"),
        ([1, "a"], "invalid_type"),
        ([1, None], "invalid_type"),
        ([-1], "invalid_value"),
        ([2**31], "invalid_value"),
        ([True], "invalid_type"),
        ([1.5], "invalid_type"),
        (5, "invalid_type"),
        ({"text": "x"}, "invalid_type"),
        ("\udfff", "invalid_value"),
        ([[["x"]]], "unsupported_parameter"),
    ],
)
def test_other_prompts_are_refused(prompt, code):
    with pytest.raises(RequestError) as caught:
        read_completion({"prompt": prompt})
    assert caught.value.param.startswith("prompt")
    assert caught.value.code == code
