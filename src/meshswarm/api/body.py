"""Reads a request's body into a JSON object, within limits.

The rule this file keeps: whatever bytes arrive, the outcome is a dict or an error that says what is wrong with them;
size and time are bounded before anything is parsed.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from meshswarm.api.failure import ApiError, Failure
from meshswarm.errors import RequestError

MAX_BODY_BYTES = 8 * 1024 * 1024  # a million tokens of text; parsing it holds the event loop for some 50 ms
BODY_TIMEOUT_S = 30.0


async def read_body(request: Request) -> bytes:
    """The body's bytes. Raises ApiError (413, 408), or starlette's ClientDisconnect when the client goes away."""
    if _declared_length(request) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise ApiError(
            Failure(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", code="request_timeout")
        ) from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises RequestError (code `invalid_json`) for anything else."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8: byte {error.start} cannot be read") from None
    except RecursionError:
        raise _invalid("the body's JSON is nested too deeply") from None
    except ValueError as error:
        raise _invalid(f"the body is not valid JSON: {error}" if body else "the body is empty") from None
    if not isinstance(value, dict):
        raise _invalid('the body must be a JSON object, for example {"model": ..., "messages": [...]}')
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")


def _declared_length(request: Request) -> int:
    try:
        return int(request.headers.get("content-length", "0"))
    except ValueError:
        return 0


def _too_large() -> ApiError:
    return ApiError(Failure(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"))
