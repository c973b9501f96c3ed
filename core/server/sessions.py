"""`/v1/sessions/{id}/pin`: keep what a session left in the cache for a while, as during a long tool call."""
from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..errors import EngineDead, IsthmusError, RequestError
from .context import Server
from .limits import MAX_SESSION
from .protocol import PinRequest, read
from .stream import json_response
from .terms import session_name
from .validate import invalid


async def pin(server: Server, request: Request) -> Response:
    """Pin, or pin anew: {"ttl": seconds}."""
    server.require_ready()
    asked = await server.read(request, lambda body: read(PinRequest, body))
    return json_response(await _command(server, request, "pin", ttl=asked.ttl))


async def unpin(server: Server, request: Request) -> Response:
    """End a pin; that there is none is no error."""
    server.require_ready()
    return json_response(await _command(server, request, "unpin"))


async def _command(server: Server, request: Request, name: str, **arguments: float) -> dict[str, object]:
    session = request.path_params["id"]
    if len(session) > MAX_SESSION:
        raise invalid("session_id", f"has {len(session)} characters, at most {MAX_SESSION} are allowed")
    try:
        answer = await server.client.command(name, session=session_name(session, server.caller(request).tenant),
                                             **arguments)
    except (EngineDead, RequestError):
        raise
    except IsthmusError as error:
        raise RequestError(str(error), status=409) from None
    return {"session_id": session, **answer}
