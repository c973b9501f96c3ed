"""What is served and how it is doing: models, health, readiness, metrics, cache, version."""
from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import EngineDead, IsthmusError, RequestError
from ..version import isthmus_version
from . import adapters
from .anthropic.models import model_info, model_list
from .chat_page import files, wants_page
from .context import Server
from .errors import speaks_anthropic
from .figures import pages_by_owner, step_seconds
from .stream import json_response

# Of what the engine says about itself: what every client may know.
PUBLIC = ("served_name", "platform", "max_model_len", "max_running", "vocab_size", "page_size", "pages",
          "sampling_defaults")


def root_of(server: Server) -> str:
    """Where the model came from; with an admin key, which tells others of the machine's owner, only its name."""
    return server.model if server.access.admin_keys else server.info.get("model") or server.model


def model_card(server: Server) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    card = {"id": server.model, "object": "model", "created": server.created, "owned_by": "isthmus",
            "root": root_of(server), "parent": None}
    if "max_model_len" in server.info:
        card["max_model_len"] = server.info["max_model_len"]
    return card


async def models(server: Server, request: Request) -> Response:
    """The models and adapters that requests may name."""
    base = model_card(server)
    cards = [base, *adapters.cards(server, base)]
    return json_response(model_list(cards) if speaks_anthropic(request.scope) else {"object": "list", "data": cards})


async def model(server: Server, request: Request) -> Response:
    """One of them."""
    name = request.path_params["id"]
    if not name:
        raise RequestError("a model needs a name; GET /v1/models lists what there is", status=404)
    server.require_model(name)
    base = model_card(server)
    card = next((card for card in adapters.cards(server, base) if card["id"] == name), base)
    return json_response(model_info(card) if speaks_anthropic(request.scope) else card)


async def health(server: Server, request: Request) -> Response:
    """Is the engine alive? Stays 200 while it drains. A model that was unloaded is "idle", and "loading" when a request
    has come for it: who asks is served all the same."""
    client = server.client
    ok, reason = client.health()
    if not ok:
        return json_response({"status": "unavailable", "reason": reason}, 503)
    stage, done, total = client.progress or ("", 0, 0)
    told = {"progress": {"stage": stage, "done": done, "total": total}} if stage else {}
    return json_response({"status": client.status, **told})


async def ready(server: Server, request: Request) -> Response:
    """Would a request be taken now?"""
    reason = server.why_not_ready()
    return json_response({"status": "ready"} if not reason else {"status": "unavailable", "reason": reason},
                         503 if reason else 200)


async def metrics(server: Server, request: Request) -> Response:
    """Numbers for Prometheus."""
    stats, at = await server.client.figures()
    age = {"stats_age": time.monotonic() - at} if stats else {}
    data = server.metrics.export(server.model, server.info, {
        **stats, **age, "step_age": server.client.step_age, "restarts": server.client.restarts})
    return Response(data, media_type="text/plain; version=0.0.4; charset=utf-8")


async def server_info(server: Server, request: Request) -> Response:
    """The engine's description of itself and its numbers; no setting that could be a secret. Where there is an admin
    key, only its holder is told where models lie and how they were loaded.

    time: when the numbers were true, in seconds by the server's clock, so that who asks twice can compute rates.
    started: seconds since 1970. parsers: what reads tool calls and reasoning, and why. stats_age: seconds since the
    engine, which answers between two steps, gave the numbers.
    """
    stats, at = await server.client.figures()
    ok, reason = server.client.health()
    open_to_all = not server.access.admin_keys or server.access.is_admin(request.scope["headers"])
    info = server.info if open_to_all else {key: server.info[key] for key in PUBLIC if key in server.info}
    return json_response({
        "version": isthmus_version(), "served_model_name": server.model, "time": at, "started": server.created,
        "health": {"ok": ok, "reason": reason}, "info": info, "stats": stats,
        "parsers": {"tools": server.parsers.calls._asdict(), "reasoning": server.parsers.thinking._asdict()},
        "stats_age": time.monotonic() - at, "pages": pages_by_owner(stats), "step_seconds": step_seconds(stats),
        "running": len(server.running)})


async def show_version(server: Server, request: Request) -> Response:
    """The server's version."""
    return json_response({"version": isthmus_version()})


async def flush_cache(server: Server, request: Request) -> Response:
    """Forget all cached prefixes that no request uses. A model at rest has none."""
    if server.client.idle:
        return json_response({"success": True, "flushed_pages": 0})
    try:
        return json_response({"success": True, **await server.client.command("flush_cache")})
    except EngineDead:
        raise
    except IsthmusError as error:
        raise RequestError(str(error), status=409, code="flush_refused") from None


async def page(server: Server, request: Request) -> Response:
    """This description for people, or a file of a page."""
    if request.url.path not in files():
        raise RequestError(f"there is no file {request.url.path[:100]!r}", status=404)
    content, headers = files()[request.url.path]
    return Response(content, headers=headers)


async def root(server: Server, request: Request) -> Response:
    """A browser gets the chat page, who else asks gets a list of what there is."""
    if wants_page(request.method, "/", request.headers.raw):
        content, headers = files()["/"]
        return Response(content, headers=headers)
    endpoints: dict[str, list[str]] = {}
    for methods, path, _ in request.app.state.routes:
        if not path.startswith("/page/"):  # files of the chat page
            endpoints.setdefault(path.replace(":path}", "}"), []).extend(methods.split())
    return json_response({"name": "Isthmus", "version": isthmus_version(), "model": server.model,
                          "endpoints": dict(sorted(endpoints.items()))})
