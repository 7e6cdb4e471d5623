"""Chat templates: from messages to a prompt's tokens, as the model's makers meant them.

The rule this file keeps: whatever a template is, the worst it can do is fail, in bounded time and memory, with a
sentence for the client. Rendering takes milliseconds for a real template and at most `TIME_LIMIT_S` for a hostile
one, and lets nothing else run on its thread meanwhile: call it in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from meshswarm.errors import RequestError
from meshswarm.head.marked_text import MarkedText, joined, own_text
from meshswarm.head.prompt_tokens import prompt_tokens, structural_tokens
from meshswarm.head.request import Message
from meshswarm.head.template_meter import (
    BASE_WORK,
    MAX_TEXT,
    WORK_PER_CHARACTER,
    WORK_PER_MESSAGE,
    Meter,
    TemplateLimitError,
    metered,
)
from meshswarm.head.template_sandbox import TemplateEnvironment
from meshswarm.head.vocabulary import Vocabulary

TIME_LIMIT_S = 2.0
MAX_TEMPLATE_CHARACTERS = 128 << 10
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles are the client's words too, but these have their place inside control tokens (Phi's `<|user|>`)."""
_MAX_COMPLAINT = 300


class ChatTemplate:
    """A compiled template.

    `source`: the template's text, None when the model has none. `now` is the date for templates that write it into the
    prompt; `clock`, in seconds, limits how long they may take. Blocking for some milliseconds. Raises RequestError when
    there is no template, or none that works.
    """

    def __init__(
        self,
        source: str | None,
        *,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if source is None:
            raise RequestError(
                "the model has no chat template: send a prompt to /v1/completions instead of messages", param="messages"
            )
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateLimitError(
                f"the model's chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARACTERS}"
            )
        self._source = source
        self._clock = clock
        try:
            with metered(self._meter(0)):
                self._template: Any = TemplateEnvironment(now).compile_template(source)
        except Exception as error:
            raise _failed("is broken", error) from error

    def tokens(
        self, messages: Sequence[Message], vocabulary: Vocabulary, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The prompt's tokens. Raises RequestError when the template fails or refuses the messages.

        Control tokens are only those the template wrote; the model's first token is there once.
        """
        text = self.render(
            messages,
            bos=vocabulary.token_text(vocabulary.bos),
            eos=vocabulary.token_text(vocabulary.eos),
            add_generation_prompt=add_generation_prompt,
        )
        return vocabulary.begin(prompt_tokens(text, vocabulary, structural_tokens(vocabulary, self._source)))

    def render(
        self, messages: Sequence[Message], *, bos: str, eos: str, add_generation_prompt: bool = True
    ) -> MarkedText:
        """The prompt's text, with marks on what the template wrote. `bos`, `eos`: the texts of these tokens.

        Raises RequestError when the template fails or refuses the messages.
        """
        turns = [_turn(message) for message in messages]
        variables: dict[str, Any] = {
            "messages": turns,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": own_text(bos),
            "eos_token": own_text(eos),
            "tools": None,
            "documents": None,
        }
        size = sum(len(part) for turn in turns for part in turn.values())
        meter = self._meter(size * WORK_PER_CHARACTER + len(turns) * WORK_PER_MESSAGE)
        pieces: list[str] = []
        n_characters = 0
        try:
            with metered(meter):
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    n_characters += len(piece)
                    meter.charge(len(piece))
                    if n_characters > MAX_TEXT:
                        raise TemplateLimitError(f"the prompt has more than {MAX_TEXT} characters")
        except Exception as error:
            raise _failed("cannot be applied to these messages", error) from error
        return joined(pieces)

    def _meter(self, more_work: int) -> Meter:
        return Meter(BASE_WORK + more_work, self._clock() + TIME_LIMIT_S, self._clock)


def _turn(message: Message) -> dict[str, str]:
    role = own_text(message.role) if message.role in ROLES else message.role
    turn = {"role": role, "content": message.content}
    return turn if message.name is None else {**turn, "name": message.name}


def _failed(what: str, error: Exception) -> RequestError:
    """A template is a program of unknown make: it may fail in any way, and all of them are the same to a client."""
    if isinstance(error, RequestError):
        return error
    complaint = str(error) or type(error).__name__
    printable = "".join(character if character.isprintable() else " " for character in complaint[:_MAX_COMPLAINT])
    return RequestError(f"the model's chat template {what}: {printable}", param="messages")
