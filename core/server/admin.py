"""What is served and how it is doing: models, health, readiness, metrics, cache, version."""
from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import EngineDead, IsthmusError, RequestError
from ..version import isthmus_version
from .context import Server
from .figures import pages_by_owner, step_seconds
from .stream import json_response


def model_card(server: Server) -> dict[str, Any]:
    """One entry of `/v1/models`."""
    card = {"id": server.model, "object": "model", "created": server.created, "owned_by": "isthmus",
            "root": server.info.get("model") or server.model, "parent": None}
    if "max_model_len" in server.info:
        card["max_model_len"] = server.info["max_model_len"]
    return card


async def models(server: Server, request: Request) -> Response:
    return json_response({"object": "list", "data": [model_card(server)]})


async def model(server: Server, request: Request) -> Response:
    name = request.path_params["id"]
    if not name:
        raise RequestError("a model needs a name; GET /v1/models lists what there is", status=404)
    server.require_model(name)
    return json_response(model_card(server))


async def health(server: Server, request: Request) -> Response:
    """Is the engine alive? Stays 200 while it drains."""
    ok, reason = server.client.health()
    return json_response({"status": "ok"} if ok else {"status": "unavailable", "reason": reason}, 200 if ok else 503)


async def ready(server: Server, request: Request) -> Response:
    """Would a request be taken now?"""
    reason = server.why_not_ready()
    return json_response({"status": "ready"} if not reason else {"status": "unavailable", "reason": reason},
                         503 if reason else 200)


async def metrics(server: Server, request: Request) -> Response:
    """Prometheus text."""
    stats, at = await server.client.figures()
    age = {"stats_age": time.monotonic() - at} if stats else {}
    data = server.metrics.export(server.model, server.info, {
        **stats, **age, "step_age": server.client.step_age, "restarts": server.client.restarts})
    return Response(data, media_type="text/plain; version=0.0.4; charset=utf-8")


async def server_info(server: Server, request: Request) -> Response:
    """The engine's description of itself and its numbers; no setting that could be a secret.

    time: when the numbers were true, in seconds by the server's clock, so that who asks twice can compute rates.
    started: seconds since 1970. stats_age: seconds since the engine, which answers between two steps, gave the numbers.
    """
    stats, at = await server.client.figures()
    ok, reason = server.client.health()
    return json_response({
        "version": isthmus_version(), "served_model_name": server.model, "time": at, "started": server.created,
        "health": {"ok": ok, "reason": reason}, "info": server.info, "stats": stats,
        "stats_age": time.monotonic() - at, "pages": pages_by_owner(stats), "step_seconds": step_seconds(stats),
        "running": len(server.running)})


async def show_version(server: Server, request: Request) -> Response:
    return json_response({"version": isthmus_version()})


async def flush_cache(server: Server, request: Request) -> Response:
    """Forget all cached prefixes that no request uses."""
    try:
        return json_response({"success": True, **await server.client.command("flush_cache")})
    except EngineDead:
        raise
    except IsthmusError as error:
        raise RequestError(str(error), status=409, code="flush_refused") from None


async def root(server: Server, request: Request) -> Response:
    """What this is, for a person who opens the address in a browser."""
    return json_response({"name": "Isthmus", "version": isthmus_version(), "model": server.model,
                          "endpoints": sorted(route.path.replace(":path}", "}") for route in request.app.routes)})
