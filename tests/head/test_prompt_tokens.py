"""Control tokens come from the template and from nowhere else; everything else is as llama.cpp would have it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.head.conftest import CONTROL, NORMAL, USER_DEFINED, MakeHeader
from tests.head.templates import CHATML, PHI

from meshswarm.head.marked_text import joined, own_text
from meshswarm.head.prompt_tokens import prompt_tokens, structural_tokens
from meshswarm.head.request import Message
from meshswarm.head.template import ChatTemplate
from meshswarm.head.vocabulary import Vocabulary

HEAD = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def chat(*contents: str) -> list[Message]:
    return [Message(("user", "assistant")[index % 2], content) for index, content in enumerate(contents)]


@pytest.fixture(scope="module")
def template(vocabulary: Vocabulary) -> ChatTemplate:
    return ChatTemplate(vocabulary.chat_template)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_benign_chats_are_the_whole_string_tokenised(
    vocabulary: Vocabulary, template: ChatTemplate, contents: list[str]
) -> None:
    text = template.render(chat(*contents), bos="", eos="")
    assert template.tokens(chat(*contents), vocabulary) == vocabulary.encode(text, parse_special=True)


@pytest.mark.parametrize(
    "content", ["\n\nhi", "\nhi", "  a", "\n\n1", " hi", "hi\n", "hi \n", "\n", "", "  ", "\u2003hi\n\n\n"]
)
def test_borders_between_template_and_user_do_not_cut_tokens(
    vocabulary: Vocabulary, template: ChatTemplate, content: str
) -> None:
    """The template's line end before `content` and the user's own may be one token together."""
    text = HEAD + f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    assert template.tokens(chat(content), vocabulary) == vocabulary.encode(text, parse_special=True)


def test_cutting_at_those_borders_would_have_given_other_tokens(vocabulary: Vocabulary) -> None:
    for content in ("\n", "  a", "\n\n1"):
        assert vocabulary.encode("user\n") + vocabulary.encode(content) != vocabulary.encode("user\n" + content)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["<|im_end|>", "<|im_start|>", "system\n", "<|im_", "end|>", "<|endoftext|>", "a", "\n", "<file_sep>"]
        ),
        max_size=8,
    ).map("".join)
)
def test_no_message_makes_a_control_token(vocabulary: Vocabulary, template: ChatTemplate, content: str) -> None:
    control = {token.id for token in vocabulary.special_tokens}
    tokens = template.tokens(chat(content), vocabulary)
    assert [token for token in tokens if token in control] == [1, 2, 1, 2, 1]
    assert content.encode() in b"".join(vocabulary.token_bytes(token) for token in tokens)


def test_a_message_cannot_complete_what_the_template_began(vocabulary: Vocabulary) -> None:
    template = ChatTemplate("<|im_{{ messages[0].content }}<|im_end|>")
    tokens = template.tokens(chat("start|>"), vocabulary)
    assert 1 not in tokens
    assert tokens[-1] == 2


def test_an_unknown_role_stays_text(vocabulary: Vocabulary) -> None:
    template = ChatTemplate(CHATML.replace("<|im_start|>' + message['role'] + '", "<|' + message['role'] + '|>"))
    known = template.tokens([Message("system", "x")], vocabulary)
    hostile = template.tokens([Message("system", "y"), Message("im_start", "x")], vocabulary)
    assert 1 in known
    assert hostile.count(1) == known.count(1)


def test_the_first_token_is_there_once(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    small = Vocabulary.load(sentencepiece(("▁a", NORMAL), ("▁", NORMAL), ("a", NORMAL)), tmp_path / "cache")
    (a,) = small.encode("a")
    assert ChatTemplate("{{ bos_token + messages[0].content }}").tokens(chat("a"), small) == [1, a]
    assert ChatTemplate("{{ messages[0].content }}").tokens(chat("a"), small) == [1, a]
    literal = ChatTemplate("<s>{{ messages[0].content }}{{ eos_token }}").tokens(chat("a"), small)
    assert literal == [1, a, 2] == small.encode("<s>a</s>", parse_special=True)
    users = ChatTemplate("{{ messages[0].content }}").tokens(chat("<s>"), small)
    assert users[0] == 1
    assert 1 not in users[1:]


@settings(max_examples=100, deadline=None)
@given(content=st.text("ab <|user>end", max_size=12))
def test_sentencepiece_chats_are_the_whole_string_tokenised(phi: Vocabulary, content: str) -> None:
    """With its space before every text that follows a control token, and Phi-3's swallowed spaces."""
    template = ChatTemplate(PHI)
    text = template.render(chat(content, "a"), bos="<s>", eos="</s>")
    tokens = template.tokens(chat(content, "a"), phi)
    if not any(token.text in content for token in phi.special_tokens):
        assert tokens == [1, *phi.encode(text, parse_special=True)]
    control = [token for token in tokens if token in {special.id for special in phi.special_tokens}]
    assert [phi.token_text(token) for token in control] == (
        ["<s>", "<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>", "<|assistant|>"]
    )


@pytest.fixture(scope="module")
def phi(sentencepiece: MakeHeader, vocabulary_cache: Path) -> Vocabulary:
    marks = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    header = sentencepiece(
        *((mark, CONTROL) for mark in marks),
        *((text, NORMAL) for text in ("▁", "a", "▁a", "ab", "▁ab", "b", "<", "|", ">", "<|", "|>", "<|end")),
        entries={"general.name": (8, "Phi-3 tiny")},
    )
    return Vocabulary.load(header, vocabulary_cache)


def test_marks_that_a_vocabulary_calls_user_defined_stay_the_templates(
    sentencepiece: MakeHeader, tmp_path: Path
) -> None:
    """As in gpt-oss, where llama.cpp finds `<|start|>` in any text."""
    header = sentencepiece(
        ("<|start|>", USER_DEFINED), ("<think>", USER_DEFINED), ("  ", USER_DEFINED), ("a", NORMAL), ("▁", NORMAL)
    )
    small = Vocabulary.load(header, tmp_path / "cache")
    ids = {token.text: token.id for token in small.special_tokens}
    source = "<|start|>{{ messages[0].content }}"
    assert ids["<|start|>"] in small.encode("a<|start|>a")
    tokens = ChatTemplate(source).tokens(chat("a<|start|>a  a<think>"), small)
    assert tokens.count(ids["<|start|>"]) == 1
    assert tokens.count(ids["  "]) == 1
    assert tokens.count(ids["<think>"]) == 1
    assert [token.text for token in structural_tokens(small, source)] == ["<|start|>"]
    strict = ChatTemplate(source + "<think>").tokens(chat("a<think>a"), small)
    assert strict.count(ids["<think>"]) == 1
    assert strict[-1] == ids["<think>"]


def test_merges_that_lead_to_a_control_token_are_undone(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    header = sentencepiece(("<x>", CONTROL), ("<x", NORMAL), ("<", NORMAL), ("x", NORMAL), (">", NORMAL), ("▁", NORMAL))
    small = Vocabulary.load(header, tmp_path / "cache")
    (mark,) = [token.id for token in small.special_tokens if token.text == "<x>"]
    assert mark in small.encode("a<x>")  # llama.cpp does not look for it, and merges into it all the same
    tokens = ChatTemplate("{{ messages[0].content }}<x>").tokens(chat("a<x>"), small)
    assert tokens.count(mark) == 1
    assert b"".join(map(small.token_bytes, tokens)) == b" a<x>"


def test_pieces_of_text_with_no_marks_at_all(vocabulary: Vocabulary) -> None:
    assert prompt_tokens(joined(["<|im_end|>"]), vocabulary, ()) == vocabulary.encode("<|im_end|>")
    assert prompt_tokens(joined([]), vocabulary, ()) == []
    assert prompt_tokens(own_text("<|im_end|><|im_end|>"), vocabulary, ()) == [2, 2]
