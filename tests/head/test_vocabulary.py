"""The vocabulary without the model says what the whole model says, and survives what users write."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.head.conftest import CONTROL, NORMAL, USER_DEFINED, MakeHeader

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.errors import ArtifactError, RequestError
from meshswarm.head import vocabulary as module
from meshswarm.head import vocabulary_file as file_module
from meshswarm.head.vocabulary import MAX_TEXT_BYTES, Vocabulary

TEXTS = [
    "",
    "Hello",
    " Hello  world\n\n\tfoo",
    "naïve café — “quoted” 😀 你好 \u200d\u0301",
    "a\0b\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|",
    "1234567890 3.14e-5",
    "def f(x):\n    return x ** 2\n",
    "\ufffd\ud7ff\ue000\U0010ffff",
]


@pytest.fixture(scope="module")
def whole_model(smollm2: Path) -> Any:
    """llama-cpp-python's own view of the unsplit file."""
    return llama_cpp.Llama(str(smollm2), vocab_only=True, verbose=False)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_it_tokenises_as_the_whole_model_does(
    vocabulary: Vocabulary, whole_model: Any, text: str, special: bool
) -> None:
    expected = whole_model.tokenize(text.encode(), add_bos=False, special=special)
    assert vocabulary.encode(text, parse_special=special) == expected


def test_it_knows_what_the_whole_model_knows(vocabulary: Vocabulary, whole_model: Any) -> None:
    assert vocabulary.n_vocab == whole_model.n_vocab() == 49152
    assert (vocabulary.bos, vocabulary.eos) == (whole_model.token_bos(), whole_model.token_eos()) == (1, 2)
    assert not vocabulary.add_bos
    assert {token for token in range(vocabulary.n_vocab) if vocabulary.is_end_of_generation(token)} == {0, 2, 4}
    assert vocabulary.chat_template == whole_model.metadata["tokenizer.chat_template"]
    assert vocabulary.token_text(2) == "<|im_end|>"
    assert vocabulary.token_text(None) == ""
    assert vocabulary.suppressed == ()


@pytest.fixture(scope="module")
def bytes_with_a_token(vocabulary: Vocabulary) -> set[int]:
    return {piece[0] for piece in map(vocabulary.token_bytes, range(vocabulary.n_vocab)) if len(piece) == 1}


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
@example("\0")
@example("<|im_end|>")
def test_bytes_of_tokens_are_the_texts_bytes(vocabulary: Vocabulary, bytes_with_a_token: set[int], text: str) -> None:
    """All but a few bytes, rare ones, that have no token here; llama.cpp leaves them out."""
    tokens = vocabulary.encode(text)
    kept = bytes(byte for byte in text.encode() if byte in bytes_with_a_token)
    assert b"".join(vocabulary.token_bytes(token) for token in tokens) == kept
    assert not {special.id for special in vocabulary.special_tokens} & set(tokens)


def test_control_tokens_print_only_when_asked(vocabulary: Vocabulary) -> None:
    assert vocabulary.token_bytes(2) == b""
    assert vocabulary.token_bytes(2, special=True) == b"<|im_end|>"
    for token in (-1, vocabulary.n_vocab, 2**40):
        with pytest.raises(ValueError, match="no token"):
            vocabulary.token_bytes(token)
        with pytest.raises(ValueError, match="no token"):
            vocabulary.is_end_of_generation(token)


def test_texts_that_are_none_are_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        vocabulary.encode("ok \ud83d")
    with pytest.raises(RequestError, match="at most"):
        vocabulary.encode("é" * (MAX_TEXT_BYTES // 2 + 1))
    with pytest.raises(RequestError, match="token 49152"):
        vocabulary.check([0, 49152])
    with pytest.raises(RequestError, match="token -1"):
        vocabulary.check([-1])
    vocabulary.check([0, 49151])


@pytest.mark.parametrize("character", ["a", " ", "!", "\n", "7", "é"])
def test_a_long_word_does_not_overflow_the_stack(
    smollm2_header: GgufHeader, vocabulary_cache: Path, character: str
) -> None:
    """llama.cpp splits with std::regex for this pre-tokenizer: 200,000 letters need some 64 MiB of stack."""
    raw = smollm2_header.raw.replace(b"\x06\0\0\0\0\0\0\0smollm", b"\x06\0\0\0\0\0\0\0tekken")
    assert raw != smollm2_header.raw
    deep = Vocabulary.load(replace(smollm2_header, raw=raw), vocabulary_cache)
    text = character * 200_000
    tokens = deep.encode(text)
    assert b"".join(map(deep.token_bytes, tokens)) == text.encode()


def test_where_no_stack_can_be_had_the_text_is_refused(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STACK_BYTES_PER_TEXT_BYTE", 1 << 40)
    with pytest.raises(RequestError, match="too long to tokenise"):
        vocabulary.encode("a" * 5000)


def test_many_threads_at_once(vocabulary: Vocabulary) -> None:
    texts = [f"{number} " * 500 + "The quick brown fox." for number in range(16)]
    expected = [vocabulary.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(vocabulary.encode, texts * 4)) == expected * 4


def test_it_is_freed_with_the_last_reference(
    smollm2_header: GgufHeader, vocabulary_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = []
    free = module.llama.llama_model_free
    monkeypatch.setattr(module.llama, "llama_model_free", lambda model: (freed.append(model), free(model)))
    loaded = Vocabulary.load(smollm2_header, vocabulary_cache)
    assert not freed
    del loaded
    gc.collect()
    assert len(freed) == 1


# -- the file


def test_the_file_has_no_tensors_no_template_and_is_tried_once(
    smollm2_header: GgufHeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    probe = file_module.probe
    monkeypatch.setattr(file_module, "probe", lambda path, **options: (tried.append(options), probe(path, **options)))
    path = file_module.vocabulary_file(smollm2_header, tmp_path)
    assert file_module.vocabulary_file(smollm2_header, tmp_path) == path
    assert tried == [{"vocab_only": True}]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    content = path.read_bytes()
    assert len(content) < smollm2_header.data_offset
    assert int.from_bytes(content[8:16], "little") == 0
    assert b"chat_template" not in content
    assert b"llama.block_count" not in content
    path.write_bytes(content[:-1] + b"\1")
    assert file_module.vocabulary_file(smollm2_header, tmp_path) == path
    assert path.read_bytes() == content
    assert len(tried) == 2


def test_an_unknown_pre_tokenizer_is_refused_by_the_child(smollm2_header: GgufHeader, tmp_path: Path) -> None:
    raw = smollm2_header.raw.replace(b"\x06\0\0\0\0\0\0\0smollm", b"\x06\0\0\0\0\0\0\0nosuch")
    with pytest.raises(ArtifactError, match="nosuch"):
        Vocabulary.load(replace(smollm2_header, raw=raw), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_vocabulary_is_refused(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    header = sentencepiece(entries={"tokenizer.ggml.model": (8, "no_vocab")})
    with pytest.raises(ArtifactError, match="no vocabulary"):
        Vocabulary.load(header, tmp_path / "cache")


def test_a_vocabulary_that_would_end_the_process_is_refused(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no token for 10 of the 256 bytes"):
        Vocabulary.load(sentencepiece(("▁a", NORMAL), bytes_from=10), tmp_path / "cache")
    with pytest.raises(ArtifactError, match="duplicate"):
        Vocabulary.load(sentencepiece(("▁a", NORMAL), ("▁a", NORMAL)), tmp_path / "cache")


def test_a_vocabulary_with_a_first_token_but_no_id_for_it_does_not_load(
    sentencepiece: MakeHeader, tmp_path: Path
) -> None:
    header = sentencepiece(entries={"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None})
    assert Vocabulary.load(header, tmp_path / "cache").bos == 1  # llama.cpp's default for this kind


# -- SentencePiece


def test_sentencepiece_spaces_and_first_token(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    header = sentencepiece(("▁Hi", NORMAL), ("▁", NORMAL), ("H", NORMAL), ("i", NORMAL), ("▁H", NORMAL))
    small = Vocabulary.load(header, tmp_path / "cache")
    assert small.add_bos
    assert [small.token_bytes(token) for token in small.encode("Hi Hi")] == [b" Hi", b" Hi"]
    assert [small.token_bytes(token) for token in small.encode("é")] == [b" ", b"\xc3", b"\xa9"]
    assert small.encode_prompt("Hi") == [1, *small.encode("Hi")]
    assert small.encode_prompt("<s>Hi") == [1, *small.encode("Hi")]
    assert small.begin([]) == [1]
    assert small.spell("Hé") == [small.encode("H")[-1], 3 + 0xC3, 3 + 0xA9] or small.spell("H") == [261]


def test_special_tokens_longest_first(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    header = sentencepiece(("<|a|>", CONTROL), ("<mark-of-users>", USER_DEFINED))
    small = Vocabulary.load(header, tmp_path / "cache")
    assert [(token.text, token.control) for token in small.special_tokens] == [
        ("<mark-of-users>", False),
        ("<unk>", True),
        ("<|a|>", True),
        ("</s>", True),
        ("<s>", True),
    ]


def test_phi3s_tokens_swallow_the_space_behind_them(sentencepiece: MakeHeader, tmp_path: Path) -> None:
    header = sentencepiece(
        ("<|endoftext|>", CONTROL), ("<|user|>", CONTROL), entries={"general.name": (8, "Phi-3 tiny")}
    )
    small = Vocabulary.load(header, tmp_path / "cache")
    assert {token.text: token.strips_right for token in small.special_tokens}["<|user|>"]
