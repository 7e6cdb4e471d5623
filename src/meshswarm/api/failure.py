"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

The rule this file keeps: every failure a client can see passes through `Failure`, whatever raised it, so there is no
second shape. Statuses are those OpenAI's clients act on: 4xx is the request's fault and not retried, 503 with
`Retry-After` is retried by them on their own.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from meshswarm.errors import (
    MeshswarmError,
    NoRouteError,
    PeerUnreachableError,
    RefusedError,
    RemoteError,
    RequestError,
    UnknownModelError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
DEFAULT_RETRY_AFTER_S = 5.0
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class Failure:
    """One error as a client sees it. `retry_after_s` and `allow` become headers when the status can still be sent."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    allow: str | None = None

    def as_object(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class ApiError(MeshswarmError):
    """A failure of HTTP's own kind: a wrong key, a wrong path, a body too large."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, retry_after_s=failure.retry_after_s)
        self.failure = failure


class DrainingError(MeshswarmError):
    """This peer is stopping and starts or finishes no more answers (HTTP 503)."""


INTERNAL_FAILURE = Failure(
    500, "this peer made a mistake of its own while it answered; its log says more", SERVER_ERROR, code="internal_error"
)


def failure_of(error: Exception) -> Failure:
    """What a client sees of `error`. One that is not this package's own stays nameless: it may hold secrets."""
    message = str(error)
    match error:
        case ApiError():
            return error.failure
        case UnknownModelError():
            return Failure(404, message, param=error.param or "model", code=error.code or "model_not_found")
        case RequestError():
            return Failure(400, message, param=error.param, code=error.code or "invalid_value")
        case NoRouteError():
            return _try_again(error, "no_route")
        case RefusedError():
            return _try_again(error, "refused")
        case PeerUnreachableError():
            return _try_again(error, "peer_unreachable")
        case RemoteError():
            return _try_again(error, "peer_failed")
        case DrainingError():
            return _try_again(error, "draining")
        case MeshswarmError():
            return Failure(500, message, SERVER_ERROR, code="internal_error")
        case _:
            return INTERNAL_FAILURE


def _try_again(error: MeshswarmError, code: str) -> Failure:
    after_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return Failure(503, str(error), SERVER_ERROR, code=code, retry_after_s=after_s)


def shown(value: object) -> str:
    """`value` as JSON for a message, cut to a readable length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else text


def encode(value: object) -> bytes:
    """`value` as compact JSON in UTF-8. A lone surrogate, which only a client's own text can hold, becomes `?`."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
