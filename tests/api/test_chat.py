"""Messages: which roles and contents are read, and which are refused by their place."""

from __future__ import annotations

import pytest

from meshswarm.api.chat import read_chat
from meshswarm.errors import RequestError
from meshswarm.head.request import Message


def messages(*items):
    return read_chat({"messages": list(items)}).messages


def refused(value) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_chat({"messages": value})
    return caught.value


def test_roles():
    assert messages(
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c", "name": "kim"},
        {"role": "assistant", "content": ""},
    ) == (
        Message("system", "a"),
        Message("system", "b"),
        Message("user", "c", "kim"),
        Message("assistant", ""),
    )


def test_text_parts_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "no"}]
    assert messages({"role": "assistant", "content": parts}) == (Message("assistant", "a\nb\nno"),)
    assert messages({"role": "user", "content": []}) == (Message("user", ""),)


def test_an_answer_can_be_sent_back_as_it_came():
    """What OpenAI's client dumps from a message: every field, null or empty where unused."""
    dumped = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "thought",
    }
    assert messages(dumped) == (Message("assistant", "hello"),)


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        (None, "messages", "missing_required_parameter"),
        ("hi", "messages", "invalid_type"),
        ([], "messages", "invalid_value"),
        ([{"role": "user", "content": ""}] * 10_001, "messages", "invalid_value"),
        (["hi"], "messages[0]", "invalid_type"),
        ([{}], "messages[0].role", "invalid_type"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "invalid_value"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "invalid_type"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].role", "unsupported_parameter"),
        ([{"role": "function", "content": "x"}], "messages[0].role", "unsupported_parameter"),
        ([{"role": "user"}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": None}], "messages[0].content", "invalid_type"),
        ([{"role": "user", "content": "\ud83d"}], "messages[0].content", "invalid_value"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "invalid_type"),
        ([{"role": "user", "content": "x", "prefix": True}], "messages[0].prefix", "unknown_parameter"),
        ([{"role": "user", "content": "x"}, 5], "messages[1]", "invalid_type"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "invalid_type"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type", "invalid_type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
            "messages[0].content[0]",
            "unsupported_content",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(value, param, code):
    error = refused(value)
    assert (error.param, error.code) == (param, code)
    assert param in str(error)
