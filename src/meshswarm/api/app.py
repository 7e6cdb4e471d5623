"""The endpoint's paths: what is asked for, by whom it is answered, and what is not there.

The rule this file keeps: handlers translate and nothing more. Requests are read by `chat` and `completions`, run by the
`Generator`, written by `answer`; no error leaves in another shape than `failure`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Send

from meshswarm import __version__
from meshswarm.api import parameters
from meshswarm.api.answer import Answer, Running
from meshswarm.api.body import parse_object, read_body
from meshswarm.api.chat import ChatShape, read_chat
from meshswarm.api.completions import CompletionShape, read_completion
from meshswarm.api.errand import Errand, errand_handler
from meshswarm.api.failure import INTERNAL_FAILURE, Failure, encode, failure_of, shown
from meshswarm.api.guard import Guard, failure_response
from meshswarm.api.listing import health_object, known_models, model_object
from meshswarm.api.reply import Pace, Reply, StreamReply, WholeReply
from meshswarm.api.shape import Shape
from meshswarm.errors import MeshswarmError, UnknownModelError
from meshswarm.head.request import GenerationRequest, Generator

PATHS = (
    "GET /v1/models",
    "GET /v1/models/{id}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "GET /health",
)
View = Callable[[], Awaitable[Any]]
Query = Callable[[Mapping[str, str]], Awaitable[Any]]
_CLIENT_LEFT = 499  # never sent: there is nobody to read it


def create_app(
    generator: Generator,
    *,
    api_key: str | None = None,
    allowed_hosts: Collection[str] = (),
    views: Mapping[str, View] | None = None,
    queries: Mapping[str, Query] | None = None,
    errands: Mapping[str, Errand] | None = None,
    pace: Pace | None = None,
    running: Running | None = None,
) -> FastAPI:
    """The ASGI application that serves `generator`.

    `api_key` None asks for none. `allowed_hosts` are the names, beside `localhost` and IP addresses, under which
    clients may address this endpoint. `views` are further paths, each with what computes its JSON value: the peer's own
    commands read them. `queries` are like them, and take the parameters of the URL; `errands` take a POST's object and
    tell how far they are. `running` counts the answers being written.
    """
    app = FastAPI(
        title="meshswarm",
        version=__version__,
        openapi_url=None,  # FastAPI's document would not describe the bodies, and its viewer loads scripts from afar
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.add_middleware(Guard, api_key=api_key, allowed_hosts=allowed_hosts)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(MeshswarmError, _meshswarm_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _mistake)
    _add_paths(app, _Handlers(generator, pace or Pace(), running or Running()))
    for path, view in (views or {}).items():
        app.add_api_route(path, _view_handler(view), methods=["GET"])
    for path, query in (queries or {}).items():
        app.add_api_route(path, _query_handler(query), methods=["GET"])
    for path, errand in (errands or {}).items():
        app.add_api_route(path, errand_handler(errand), methods=["POST"])
    return app


def _view_handler(view: View) -> Callable[[], Awaitable[Response]]:
    async def handler() -> Response:
        return _json(200, await view())

    return handler


def _query_handler(query: Query) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        return _json(200, await query(request.query_params))

    return handler


def _add_paths(app: FastAPI, handlers: _Handlers) -> None:
    reading = ["GET", "HEAD"]
    app.add_api_route("/", handlers.front, methods=reading)
    app.add_api_route("/health", handlers.health, methods=reading)
    app.add_api_route("/v1/models", handlers.models, methods=reading)
    app.add_api_route("/v1/models/{name:path}", handlers.model, methods=reading)
    app.add_api_route("/v1/chat/completions", handlers.chat, methods=["POST"])
    app.add_api_route("/v1/completions", handlers.completion, methods=["POST"])


class _Handlers:
    def __init__(self, generator: Generator, pace: Pace, running: Running) -> None:
        self._generator = generator
        self._pace = pace
        self._running = running

    async def front(self, request: Request) -> Response:
        models = await self._generator.models(ask=False)
        base = f"{request.url.scheme}://{request.headers['host']}/v1"
        return PlainTextResponse(
            f"meshswarm {__version__}: an OpenAI-compatible endpoint.\n\n"
            f"base URL: {base}\nmodels:   {known_models(models)}\npaths:    {', '.join(PATHS)}\n"
        )

    async def health(self) -> Response:
        status, body = health_object(await self._generator.models(ask=False))  # anybody may ask, as often as he likes
        return _json(status, body)

    async def models(self) -> Response:
        models = await self._generator.models()
        return _json(200, {"object": "list", "data": [model_object(listing) for listing in models]})

    async def model(self, name: str) -> Response:
        models = await self._generator.models()
        for listing in models:
            if name in (listing.id, listing.model_id):
                return _json(200, model_object(listing))
        raise UnknownModelError(f"there is no model {shown(name)}; the models are: {known_models(models)}")

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat, ChatShape)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, read_completion, CompletionShape)

    async def _answer(
        self,
        request: Request,
        read: Callable[[dict[str, Any]], GenerationRequest],
        shape_type: type[Shape],
    ) -> Response:
        body = parse_object(await read_body(request))
        asked = read(body)
        delivery = parameters.delivery(body)
        shape = shape_type(include_usage=delivery.include_usage)

        def make_reply(send: Send) -> Reply:
            return (StreamReply if delivery.stream else WholeReply)(send, shape, self._pace)

        return Answer(lambda: self._generator.generate(asked), make_reply, self._running, self._explain)

    async def _explain(self, error: MeshswarmError) -> Failure:
        """A client that asked for an unknown model wants to know which ones there are."""
        if not isinstance(error, UnknownModelError):
            return failure_of(error)
        models = await self._generator.models()
        if models and all(listing.id in str(error) for listing in models):
            return failure_of(error)
        return failure_of(UnknownModelError(f"{error}; the models are: {known_models(models)}"))


def _json(status: int, value: object) -> Response:
    return Response(encode(value), status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    """The router's own refusals: an unknown path, or a known one with another method."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {shown(request.url.path)}"
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        message = f"{asked}: the method is not allowed; use {allow}"
        failure = Failure(405, message, code="method_not_allowed", allow=allow)
    else:
        failure = Failure(404, f"there is no {asked} here; there are: {', '.join(PATHS)}", code="unknown_url")
    return failure_response(failure)


async def _meshswarm_error(request: Request, error: Exception) -> Response:
    return failure_response(failure_of(error))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


async def _mistake(request: Request, error: Exception) -> Response:
    return failure_response(INTERNAL_FAILURE)
