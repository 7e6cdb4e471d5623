"""Text to token ids and back, by llama.cpp's own tokenizer, on a head that need not hold the model.

The rule this file keeps: nothing a user can write ends the process. Text is checked before llama.cpp sees it, ids are
checked before they are looked up, and tokenising runs on a stack that is deep enough for it: many pre-tokenizers use
`std::regex`, which recurses once per character (measured with gcc 12: under 350 bytes of stack each, so that 50,000
letters without a space overflow a thread's usual 8 MiB).

Everything here may be called from any thread. `encode` takes about 1 ms per 2,000 characters and lets other threads
run meanwhile; call it in a thread when the text may be long.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llama_cpp import llama_cpp as llama

from meshswarm.artifacts.gguf.check import GgufHeader
from meshswarm.errors import ArtifactError, RequestError
from meshswarm.head.vocabulary_file import vocabulary_file
from meshswarm.stage.engine.llama import model_params, start_llama

MAX_TEXT_BYTES = 4 << 20
_SHALLOW_TEXT_BYTES = 1024
_STACK_BYTES_PER_TEXT_BYTE = 512
_STACK_BASE_BYTES = 1 << 20
_STACK_STEP_BYTES = 1 << 16  # a multiple of every platform's page
_TEMPLATE_KEY = "tokenizer.chat_template"
_stack_size_guard = threading.Lock()


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that llama.cpp looks for in a text as a whole, before it splits the text into words.

    `control`: only where special tokens are asked for; otherwise it is user-defined and always found. `strips_left` and
    `strips_right`: white space on that side is dropped.
    """

    id: int
    text: str
    control: bool
    strips_left: bool
    strips_right: bool


class Vocabulary:
    """A loaded vocabulary; its memory is given back when the last reference to it goes.

    `bos`, `eos`: token ids, None where there is none. `add_bos`: a prompt starts with `bos`. `chat_template`: the
    template's source as the model's file has it. `special_tokens`: the longest (in UTF-8) first. `suppressed`: ids that
    the model's makers want never to be sampled.
    """

    def __init__(self, path: Path, chat_template: str | None) -> None:
        """`path`: a file that `vocabulary_file` made. Raises ArtifactError when it does not load."""
        start_llama()
        params = model_params()
        params.vocab_only = True
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if model is None:
            raise ArtifactError(f"llama.cpp cannot load the vocabulary {path}")
        # At exit the process's memory goes anyway, and a thread may still be tokenising.
        weakref.finalize(self, llama.llama_model_free, model).atexit = False
        self._native = llama.llama_model_get_vocab(model)
        self.chat_template = chat_template
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._native)
        self.bos = self._id_or_none(llama.llama_vocab_bos(self._native))
        self.eos = self._id_or_none(llama.llama_vocab_eos(self._native))
        self.add_bos: bool = bool(llama.llama_vocab_get_add_bos(self._native)) and self.bos is not None
        self.special_tokens = self._find_special_tokens()
        self.suppressed = self._find_suppressed()
        self._unprinted = frozenset(token.id for token in self.special_tokens if token.control)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, header: GgufHeader, cache_dir: Path) -> Vocabulary:
        """The vocabulary of a checked header. Blocking: about 0.1 s, and 1 s more the first time (see
        `vocabulary_file`).

        Raises ArtifactError when the header has no vocabulary, or one that llama.cpp cannot be trusted with.
        """
        return cls(vocabulary_file(header, cache_dir), header.text(_TEMPLATE_KEY))

    # -- text to tokens

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The tokens of `text`; nothing is put before or after them.

        With `parse_special`, the text of a control token becomes that token. Raises RequestError for a text that is
        not Unicode (lone surrogates) or is too long.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has half a character (a lone surrogate) at position {error.start}", param="messages"
            ) from None
        if len(data) > MAX_TEXT_BYTES:
            raise RequestError(
                f"the text has {len(data)} bytes; at most {MAX_TEXT_BYTES} can be tokenised", param="messages"
            )
        if len(data) <= _SHALLOW_TEXT_BYTES:
            return self._tokenize(data, parse_special)
        return self._tokenize_deep(data, parse_special)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a raw prompt, whose author may write control tokens: those are found, and the model's first
        token is put before where it has one and the text does not start with it. Raises as `encode`."""
        return self.begin(self.encode(text, parse_special=True))

    def begin(self, tokens: list[int]) -> list[int]:
        """`tokens` with the model's first token before them, where it has one and it is not there yet."""
        if self.add_bos and self.bos is not None and tokens[:1] != [self.bos]:
            return [self.bos, *tokens]
        return tokens

    def spell(self, text: str) -> list[int]:
        """The tokens of `text` byte by byte, never a special one; bytes that have no token of their own are left out,
        as llama.cpp leaves them out."""
        return [self._byte_tokens[byte] for byte in text.encode() if byte in self._byte_tokens]

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        special = {token.id for token in self.special_tokens}
        found: dict[int, int] = {}
        for token in range(self.n_vocab):
            piece = self.token_bytes(token)
            if len(piece) == 1 and token not in special:
                ordinary = llama.llama_vocab_get_attr(self._native, token) & llama.LLAMA_TOKEN_ATTR_NORMAL
                if ordinary or piece[0] not in found:
                    found[piece[0]] = token
        return found

    def check(self, tokens: Sequence[int]) -> None:
        """Raises RequestError when one of `tokens`, a client's own, is no token of this vocabulary."""
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise RequestError(
                    f"the prompt has token {token}; the model has 0 to {self.n_vocab - 1}", param="prompt"
                )

    def _tokenize(self, data: bytes, parse_special: bool) -> list[int]:
        room = len(data) + 8
        while True:
            tokens = (llama.llama_token * room)()
            count = llama.llama_tokenize(self._native, data, len(data), tokens, room, False, parse_special)
            if count >= 0:
                return tokens[:count]
            room = -count

    def _tokenize_deep(self, data: bytes, parse_special: bool) -> list[int]:
        """In a thread of its own, with a stack that fits the text."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(self._tokenize(data, parse_special)), name="tokenizer")
        try:
            with _stack_size_guard:
                usual = threading.stack_size(_stack_bytes(len(data)))
                try:
                    thread.start()
                finally:
                    threading.stack_size(usual)
        except (RuntimeError, ValueError):
            raise RequestError(
                f"the text has {len(data)} bytes, which is too long to tokenise with this machine's memory",
                param="messages",
            ) from None
        thread.join()
        return found

    # -- tokens to text

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """What `token` adds to the text, perhaps a part of a character; nothing for control tokens unless `special`.

        Raises ValueError for an id that is no token.
        """
        if not special and token in self._unprinted:
            return b""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def token_text(self, token: int | None) -> str:
        """The text that stands for `token` in a template; empty for None."""
        return "" if token is None else self.token_bytes(token, special=True).decode("utf-8", "replace")

    def is_end_of_generation(self, token: int) -> bool:
        """Whether an answer ends with `token`. Raises ValueError for an id that is no token."""
        return bool(llama.llama_vocab_is_eog(self._native, self._checked(token)))

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"{token} is no token: the vocabulary has 0 to {self.n_vocab - 1}")
        return token

    def _read_piece(self, token: int) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = llama.llama_token_to_piece(self._native, self._checked(token), buffer, room, 0, True)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    # -- what loading finds out

    @staticmethod
    def _id_or_none(token: int) -> int | None:
        return None if token < 0 else token

    def _find_special_tokens(self) -> tuple[SpecialToken, ...]:
        control = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
        found = []
        for token in range(self.n_vocab):
            traits = llama.llama_vocab_get_attr(self._native, token)
            if traits & (control | llama.LLAMA_TOKEN_ATTR_USER_DEFINED):
                text = llama.llama_vocab_get_text(self._native, token)
                found.append(
                    SpecialToken(
                        token,
                        text.decode("utf-8", "replace"),
                        bool(traits & control),
                        bool(traits & llama.LLAMA_TOKEN_ATTR_LSTRIP),
                        bool(traits & llama.LLAMA_TOKEN_ATTR_RSTRIP),
                    )
                )
        return tuple(sorted(found, key=lambda token: -len(token.text.encode())))

    def _find_suppressed(self) -> tuple[int, ...]:
        count = ctypes.c_int32()
        tokens = llama.llama_vocab_get_suppress_tokens(self._native, ctypes.byref(count))
        return tuple(tokens[index] for index in range(count.value))


def _stack_bytes(text_bytes: int) -> int:
    needed = _STACK_BASE_BYTES + _STACK_BYTES_PER_TEXT_BYTE * text_bytes
    return -(-needed // _STACK_STEP_BYTES) * _STACK_STEP_BYTES
