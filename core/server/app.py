"""The HTTP application: which path is answered by what."""
from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..config import Config
from ..errors import RequestError
from . import admin, native, sessions
from .chat import chat_completions
from .completions import completions
from .context import Server
from .dashboard import dashboard
from .errors import error_response
from .middleware import Gate, split_keys
from .text_service import TextService

Handler = Callable[[Server, Request], Awaitable[Response]]

CLIENT_GONE = 499  # what proxies log for a client that hung up; nobody reads it

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", admin.models),
    ("GET", "/v1/models/{id:path}", admin.model),
    ("POST", "/v1/sessions/{id:path}/pin", sessions.pin),
    ("DELETE", "/v1/sessions/{id:path}/pin", sessions.unpin),
    ("POST", "/generate", native.generate),
    ("POST", "/tokenize", native.tokenize),
    ("POST", "/v1/tokenize", native.tokenize),
    ("POST", "/detokenize", native.detokenize),
    ("POST", "/v1/detokenize", native.detokenize),
    ("POST", "/abort_request", native.abort_request),
    ("GET POST", "/flush_cache", admin.flush_cache),
    ("GET", "/health", admin.health),
    ("GET", "/ready", admin.ready),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/server_info", admin.server_info),
    ("GET", "/get_server_info", admin.server_info),
    ("GET", "/dashboard", dashboard),
    ("GET", "/version", admin.show_version),
    ("GET", "/", admin.root),
)


def guarded(server: Server, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a handler: whatever it raises becomes an answer."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(server, request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:  # an error in one request is that request's
            return error_response(error, request.scope)

    return endpoint


async def no_route(request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's form."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"[:200]
    known = RequestError(f"there is no {what}; GET / lists what there is", status=error.status_code)
    return error_response(known, request.scope, error.headers)


def create_app(client: Any, text: TextService, config: Config) -> Starlette:
    """The application over a started (or starting) `EngineClient`. The caller starts and closes the client.

    Source of the API: OpenAI's OpenAPI description, with the extensions that vLLM and SGLang share.
    """
    server = Server(client, text, config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.threads.close()

    routes = [Route(path, guarded(server, handler), methods=methods.split()) for methods, path, handler in ROUTES]
    gate = Middleware(Gate, keys=split_keys(config.server.api_key), on_status=server.metrics.count_status)
    app = Starlette(routes=routes, middleware=[gate], lifespan=lifespan, exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    app.state.server = server
    return app
