"""`/v1/completions`: its request and its bodies. A prompt goes to the model as it is, without a template."""

from __future__ import annotations

from typing import Any

from meshswarm.api import fields, parameters
from meshswarm.api.shape import Shape
from meshswarm.errors import RequestError
from meshswarm.head.request import GenerationRequest

OWN_PARAMETERS = frozenset({"prompt"})
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def read_completion(body: dict[str, Any]) -> GenerationRequest:
    """The request in `body`. Raises RequestError naming the parameter that cannot be obeyed."""
    parameters.check_names(body, OWN_PARAMETERS)
    return GenerationRequest(
        model=parameters.model(body),
        messages=None,
        prompt=_prompt(body.get("prompt")),
        sampling=parameters.sampling(body),
        max_tokens=parameters.max_tokens(body, default=DEFAULT_MAX_TOKENS),
        stop=parameters.stop_strings(body),
        profile=parameters.profile(body),
        ignore_eos=parameters.ignore_eos(body),
        speculation=parameters.speculation(body),
    )


def _prompt(value: object) -> str | tuple[int, ...]:
    """A text, an array of token ids, or an array that holds one of either."""
    if value is None:
        raise RequestError("prompt is missing", param="prompt", code="missing_required_parameter")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return fields.text(value, "prompt")
    items = fields.array(value, "prompt")
    if not items:
        raise fields.wrong_value("prompt", "is empty")
    if isinstance(items[0], str | list):
        raise RequestError(
            f"prompt holds {len(items)} prompts; one a request is what is built",
            param="prompt",
            code="unsupported_parameter",
        )
    return fields.token_ids(items, "prompt")


class CompletionShape(Shape):
    """`text_completion`, which is the name of a chunk too."""

    chunk_object = "text_completion"
    whole_object = "text_completion"
    id_prefix = "cmpl"

    def delta_choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def whole_choice(self, text: str, finish_reason: str) -> dict[str, Any]:
        return self.delta_choice(text, finish_reason)
