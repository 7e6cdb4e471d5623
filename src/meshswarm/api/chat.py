"""`/v1/chat/completions`: its request and its bodies."""

from __future__ import annotations

from typing import Any

from meshswarm.api import fields, parameters
from meshswarm.api.failure import shown
from meshswarm.api.shape import Shape
from meshswarm.errors import RequestError
from meshswarm.head.request import GenerationRequest, Message, Started

OWN_PARAMETERS = frozenset({"messages"})
MAX_MESSAGES = 10_000  # reading more would hold up the event loop

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES = frozenset({"tool", "function"})
_TOOL_FIELDS = frozenset({"tool_calls", "function_call", "tool_call_id", "audio"})
# What answers of this and other servers carry and clients send back; no template that is served reads it.
_FIELDS_WITHOUT_EFFECT = frozenset({"refusal", "annotations", "reasoning_content", "reasoning", "id", "cache_control"})
_FIELDS = frozenset({"role", "content", "name"})


def read_chat(body: dict[str, Any]) -> GenerationRequest:
    """The request in `body`. Raises RequestError naming the parameter that cannot be obeyed."""
    parameters.check_names(body, OWN_PARAMETERS)
    return GenerationRequest(
        model=parameters.model(body),
        messages=_messages(body.get("messages")),
        prompt=None,
        sampling=parameters.sampling(body),
        max_tokens=parameters.max_tokens(body, default=None),
        stop=parameters.stop_strings(body),
        profile=parameters.profile(body),
        ignore_eos=parameters.ignore_eos(body),
        speculation=parameters.speculation(body),
    )


def _messages(value: object) -> tuple[Message, ...]:
    if value is None:
        raise RequestError("messages is missing", param="messages", code="missing_required_parameter")
    items = fields.array(value, "messages")
    if not items:
        raise fields.wrong_value("messages", "is empty; send at least one")
    if len(items) > MAX_MESSAGES:
        raise fields.wrong_value("messages", f"holds {len(items)}; {MAX_MESSAGES} are the most")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(items))


def _message(value: object, path: str) -> Message:
    message = fields.json_object(value, path)
    role = _role(message.get("role"), f"{path}.role")
    for key, field in message.items():
        _check_message_field(f"{path}.{key[:80]}", key, field)
    name = message.get("name")
    return Message(
        role=role,
        content=_content(message.get("content"), f"{path}.content"),
        name=None if name is None else fields.text(name, f"{path}.name"),
    )


def _role(value: object, path: str) -> str:
    role = fields.text(value, path)
    if role in _TOOL_ROLES:
        raise RequestError(f"{path}: tools are not built yet", param=path, code="unsupported_parameter")
    if role not in _ROLES:
        raise fields.wrong_value(path, f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    return _ROLES[role]


def _check_message_field(path: str, name: str, value: object) -> None:
    if value is None or value == [] or name in _FIELDS or name in _FIELDS_WITHOUT_EFFECT:
        return
    if name in _TOOL_FIELDS:
        raise RequestError(f"{path} is not built yet", param=path, code="unsupported_parameter")
    raise RequestError(f"unknown parameter: {path}", param=path, code="unknown_parameter")


def _content(value: object, path: str) -> str:
    """A string, or text parts joined by line breaks as llama-server joins them."""
    if isinstance(value, str):
        return fields.text(value, path)
    if not isinstance(value, list):
        raise fields.wrong_type(path, "a string or an array of text parts", value)
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(value))


def _part(value: object, path: str) -> str:
    part = fields.json_object(value, path)
    kind = fields.text(part.get("type"), f"{path}.type")
    if kind in ("text", "refusal"):
        return fields.text(part.get(kind), f"{path}.{kind}")
    raise RequestError(
        f"{path}: a part of type {shown(kind)} cannot be read; only text can",
        param=path,
        code="unsupported_content",
    )


class ChatShape(Shape):
    """`chat.completion` and its chunks."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    id_prefix = "chatcmpl"

    def opening(self, started: Started) -> list[dict[str, Any]]:
        return [self._chunk(started, [_choice({"role": "assistant", "content": ""}, None)])]

    def delta_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return _choice({"content": text} if finish_reason is None else {}, finish_reason)

    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}


def _choice(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
