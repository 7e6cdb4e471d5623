"""`GET /meshswarm/plan`: what a request would go through now.

The rule this file keeps: a parameter is obeyed or refused by name, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from meshswarm.artifacts.merkle import model_id_text
from meshswarm.errors import RequestError
from meshswarm.head.forecast import Asked, Forecast
from meshswarm.routing.preview_json import as_json

PATH = "/meshswarm/plan"
_NUMBERS = ("context", "prompt", "streams")


def plan_query(forecast: Forecast) -> Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]:
    """What answers the path."""

    async def answer(parameters: Mapping[str, str]) -> dict[str, Any]:
        card, found = await forecast.preview(read_plan(parameters))
        return {
            "model": card.name,
            "model_id": model_id_text(card.model_id),
            "layers": card.n_layers,
            **as_json(found),
        }

    return answer


def read_plan(parameters: Mapping[str, str]) -> Asked:
    """Raises RequestError for what is not a plan's parameter or value."""
    unknown = sorted(set(parameters) - {"model", *_NUMBERS})
    if unknown:
        raise RequestError(
            f"a plan has no {', '.join(repr(name[:40]) for name in unknown)}; it has model, {', '.join(_NUMBERS)}",
            param=unknown[0][:40],
            code="unknown_parameter",
        )
    n_ctx, n_prompt, n_streams = (_number(parameters, name) for name in _NUMBERS)
    return Asked(parameters.get("model"), n_ctx, n_prompt, 1 if n_streams is None else n_streams)


def _number(parameters: Mapping[str, str], name: str) -> int | None:
    text = parameters.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise RequestError(f"{name} is a whole number, not {text[:40]!r}", param=name)
    return int(text)
