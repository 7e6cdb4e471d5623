"""Who may talk to this endpoint: checks of Host, Origin and API key, before a path is looked at or a body is read.

The rule this file keeps: a web page that a user happens to visit can never use the user's endpoint. A page reaches
loopback in two ways. It can make its own host name resolve to 127.0.0.1 (DNS rebinding): such a request names that
host, and only IP addresses, `localhost` and names this peer was told are answered. Or it can post across origins: such
a request carries the page's `Origin`, and only our own is answered. No CORS header is ever sent.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from meshswarm.api.failure import Failure, encode, shown

OPEN_PATHS = frozenset({"/health"})  # says only whether a model can be run; what watches over services has no key


class Guard:
    """ASGI middleware. `allowed_hosts` are host names without a port; `api_key` None leaves the door open."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, allowed_hosts: Collection[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._hosts = frozenset({"localhost", *(name.lower() for name in allowed_hosts)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (failure := self.check(Headers(scope=scope), scope["path"])) is not None:
            await failure_response(failure)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def check(self, headers: Headers, path: str) -> Failure | None:
        """Why a request with these headers is turned away, or None."""
        host = headers.get("host", "")
        name = host_name(host)
        if name is None:
            return Failure(400, f"the Host header {shown(host)} is not a host", code="invalid_host")
        if not _is_ip_address(name) and name not in self._hosts:
            return Failure(
                403,
                f"this endpoint does not answer to the host name {shown(name)}; use its IP address or localhost",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not _may_ask(origin, host):
            return Failure(
                403,
                f"web pages of {shown(origin)} may not use this endpoint; call it from a program instead",
                code="origin_not_allowed",
            )
        if self._api_key is not None and path not in OPEN_PATHS:
            return self._check_key(headers.get("authorization"), self._api_key)
        return None

    def _check_key(self, authorization: str | None, api_key: str) -> Failure | None:
        if authorization is None:
            return Failure(
                401, "an API key is required; send it as `Authorization: Bearer KEY`", code="missing_api_key"
            )
        scheme, _, key = authorization.partition(" ")
        matches = hmac.compare_digest(key.strip().encode(), api_key.encode())
        if scheme.lower() == "bearer" and matches:
            return None
        return Failure(401, "the API key is wrong", code="invalid_api_key")


def host_name(host: str) -> str | None:
    """The host of a Host header in lower case, without port and brackets; None when it is malformed."""
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not colon:
        name = host
    elif not (port.isascii() and port.isdigit()):
        return None
    if name.startswith("[") and name.endswith("]"):
        return name[1:-1].lower()
    name = name.lower().removesuffix(".")
    return name if name and ":" not in name else None


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _may_ask(origin: str, host: str) -> bool:
    """Web pages come as http, https or "null" and must be our own; installed apps and extensions have other schemes."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme in ("http", "https"):
        return parts.netloc.lower() == host.lower()
    return parts.scheme != ""


def failure_response(failure: Failure) -> Response:
    return Response(encode(failure.as_object()), failure.status, failure.headers(), "application/json")
