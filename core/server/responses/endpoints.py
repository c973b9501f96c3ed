"""The paths under `/v1/responses`."""
from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError, shown
from ..answer import respond
from ..chat_call import encode_prompt
from ..context import Server
from ..naming import renamed
from ..protocol import read as read_body
from ..stream import RESPONSES, EventStream, json_response
from ..tools import read_toolset
from ..validate import invalid
from .answer import chat_request, read_turns, start
from .body import ResponsesRequest, check
from .history import Kept, history, missing
from .items import Item
from .store import Row

PAGE, MAX_PAGE = 20, 100  # items of a list


async def create(server: Server, request: Request) -> Response:
    """`POST /v1/responses`: answer a conversation, whole, as a stream or in the background."""
    return await respond(server, request, partial(start, server.responses.kept(request)), in_thread=True)


async def count(server: Server, request: Request) -> Response:
    """`POST /v1/responses/input_tokens`: how many tokens the same body has as a prompt."""
    server.require_ready()
    kept = server.responses.kept(request)
    return await server.read(request, partial(_count, server, kept), always=True, text=True)


def _count(server: Server, kept: Kept, body: bytes) -> Response:
    asked = read_body(ResponsesRequest, body)
    check(asked)
    server.require_model(asked.model)
    turns = read_turns(kept, asked, "resp_", server.bodies.most)
    with renamed(turns.names):
        chat = chat_request(asked, turns.messages)
        ids = encode_prompt(server, chat, read_toolset(chat))
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})


async def retrieve(server: Server, request: Request) -> Response:
    """`GET /v1/responses/{id}`: as it is now; with `stream`, the events of one in the background from the beginning, or
    those after number `starting_after`."""
    id, kept = request.path_params["id"], server.responses.kept(request)
    run = server.responses.background.find(kept.owner, id)
    streamed = request.query_params.get("stream", "false").lower() == "true"
    after = _number(request, "starting_after", -1, -1, 2**63) if streamed else -1
    if run is not None:
        if streamed:
            return EventStream(run.follow(after), server.config.server.sse_ping, {}, RESPONSES)
        return json_response(run.answer.response)
    row = await _row(kept, id)
    if not streamed:
        return Response(row.response, media_type="application/json")
    if row.events is None:
        raise invalid("stream", "is true, but only events of responses with background and stream are kept, and no "
                      "more than some MiB of them")
    return EventStream(_again(row.events, after), server.config.server.sse_ping, {}, RESPONSES)


async def _again(events: bytes, after: int) -> AsyncIterator[bytes]:
    parts = events.split(b"\n\n")[after + 1:-1]
    if parts:
        yield b"\n\n".join(parts) + b"\n\n"


async def delete(server: Server, request: Request) -> Response:
    """`DELETE /v1/responses/{id}`: forget it, and end it if it runs."""
    id, kept = request.path_params["id"], server.responses.kept(request)
    run = server.responses.background.find(kept.owner, id)
    if run is not None:
        await server.responses.background.end(run)
    store = kept.store
    if store is None or not await store.run(lambda: store.delete(kept.owner, id)):
        raise missing(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def cancel(server: Server, request: Request) -> Response:
    """`POST /v1/responses/{id}/cancel`: end one in the background; one that has ended stays as it is."""
    id, kept = request.path_params["id"], server.responses.kept(request)
    run = server.responses.background.find(kept.owner, id)
    if run is not None:
        await server.responses.background.end(run)
        return json_response(run.answer.response)
    row = await _row(kept, id)
    if not json.loads(row.response)["background"]:
        raise RequestError(f"the response {id} was not created with background; only such a one can be cancelled",
                           code="invalid_request")
    return Response(row.response, media_type="application/json")


async def list_items(server: Server, request: Request) -> Response:
    """`GET /v1/responses/{id}/input_items`: what the model was given, with all before it, the newest first unless
    `order` is asc."""
    id, kept = request.path_params["id"], server.responses.kept(request)
    row = await _row(kept, id)
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be asc or desc; got {shown(order)}")
    limit = _number(request, "limit", PAGE, 1, MAX_PAGE)
    items = await kept.store.run(partial(_given, kept, row, server.bodies.most))
    items = items if order == "asc" else items[::-1]
    after = request.query_params.get("after")
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid("after", f"names the item {shown(after)}, which is not in the list")
        items = items[places[0] + 1:]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return json_response({"object": "list", "data": page, "has_more": len(items) > limit, "first_id": first,
                          "last_id": last})


def _given(kept: Kept, row: Row, most: int) -> list[Item]:
    try:
        before = history(kept, row.previous, most) if row.previous else []
    except RequestError:  # what is left of it
        before = []
    return before + json.loads(row.input)


async def _row(kept: Kept, id: str) -> Row:
    row = await kept.store.run(lambda: kept.get(id)) if kept.store is not None else None
    if row is None:
        raise missing(id)
    return row


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """A whole number among the query's parameters."""
    text: Any = request.query_params.get(name)
    if text is None:
        return default
    if not text.removeprefix("-").isdecimal() or len(text) > 19 or not least <= int(text) <= most:
        raise invalid(name, f"must be a whole number of {least} to {most}; got {shown(text)}")
    return int(text)


ROUTES = (
    ("POST", "/v1/responses", create),
    ("POST", "/v1/responses/input_tokens", count),
    ("GET", "/v1/responses/{id}", retrieve),
    ("DELETE", "/v1/responses/{id}", delete),
    ("POST", "/v1/responses/{id}/cancel", cancel),
    ("GET", "/v1/responses/{id}/input_items", list_items),
)
