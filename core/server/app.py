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
from ..suggest import suggest
from . import adapters, admin, embeddings, native, openapi, rerank, sessions
from .anthropic import answer as anthropic
from .chat import chat_completions
from .completions import completions
from .context import Server
from .dashboard import dashboard
from .errors import error_response
from .middleware import Gate
from .ollama import models as ollama
from .responses import endpoints as responses
from .text_service import TextService

Handler = Callable[[Server, Request], Awaitable[Response]]

MAX_SHOWN = 160  # characters of a path that does not exist
LIKENESS = 0.8   # of a path to one that there is
CLIENT_GONE = 499  # what proxies log for a client that hung up; nobody reads it

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    *responses.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *embeddings.ROUTES,
    *rerank.ROUTES,
    ("GET", "/v1/models", admin.models),
    ("GET", "/v1/models/{id:path}", admin.model),
    ("POST", "/v1/sessions/{id:path}/pin", sessions.pin),
    ("DELETE", "/v1/sessions/{id:path}/pin", sessions.unpin),
    ("POST", "/generate", native.generate),
    ("POST", "/tokenize", native.tokenize),
    ("POST", "/v1/tokenize", native.tokenize),
    ("POST", "/detokenize", native.detokenize),
    ("POST", "/v1/detokenize", native.detokenize),
    ("GET", "/tokenizer_info", native.tokenizer_info),
    ("POST", "/abort_request", native.abort_request),
    ("GET POST", "/flush_cache", admin.flush_cache),
    ("POST", "/v1/load_lora_adapter", adapters.load_adapter),
    ("POST", "/v1/unload_lora_adapter", adapters.unload_adapter),
    ("POST", "/load_lora_adapter", adapters.load_adapter),
    ("POST", "/unload_lora_adapter", adapters.unload_adapter),
    ("GET", "/health", admin.health),
    ("GET", "/ready", admin.ready),
    ("GET", "/metrics", admin.metrics),
    ("GET", "/server_info", admin.server_info),
    ("GET", "/get_server_info", admin.server_info),
    ("GET", "/dashboard", dashboard),
    ("GET", "/version", admin.show_version),
    ("GET", "/page/{name}", admin.page),
    ("GET", "/docs", admin.page),
    ("GET", "/openapi.json", openapi.document),
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
    """404 and 405 in the form of the API that the path belongs to."""
    assert isinstance(error, HTTPException)
    method, path = request.method[:20], request.url.path[:MAX_SHOWN]
    if error.status_code == 405:
        takes = sorted(set((error.headers or {}).get("Allow", "").split(", ")) - {"HEAD"})
        text = f"{path} takes {' and '.join(takes)}, not {method}"
    else:
        hint = suggest(path, (route for _, route, _ in ROUTES if "{" not in route), LIKENESS)
        text = f"there is no {method} {path}{hint}; GET / lists what there is"
    known = RequestError(text, status=error.status_code)
    return error_response(known, request.scope, error.headers)


def cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    """What lets pages of these origins read answers; nothing does unless one is named. Cookies mean nothing here."""
    if not origins:
        return []
    from starlette.middleware.cors import CORSMiddleware
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"],
                       allow_headers=["*"], expose_headers=["x-request-id", "x-isthmus-ignored", "retry-after"])]


def create_app(client: Any, text: TextService, config: Config) -> Starlette:
    """The application over a started (or starting) `EngineClient`. The caller starts and closes the client.

    Source of the API: OpenAI's OpenAPI description, with the extensions that vLLM and SGLang share.
    """
    server = Server(client, text, config)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await server.responses.close()
        server.close()

    routes = [Route(path, guarded(server, handler), methods=methods.split()) for methods, path, handler in ROUTES]
    gate = Middleware(Gate, access=server.access, on_status=server.metrics.count_status, on_end=server.watchers())
    app = Starlette(routes=routes, middleware=[*cross_origin(server.access.origins), gate], lifespan=lifespan,
                    exception_handlers={HTTPException: no_route})
    app.router.redirect_slashes = False
    app.state.server, app.state.routes = server, ROUTES
    return app
