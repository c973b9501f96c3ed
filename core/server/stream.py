"""Server-sent events, and the watch for clients that hang up."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import as_request_error, encode_error, error_response, leave

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
           (b"x-accel-buffering", b"no")]

encode_json = msgspec.json.Encoder().encode


class JsonList:
    """A JSON array that grows, each entry encoded once."""

    def __init__(self) -> None:
        self._data = bytearray(b"[")

    def extend(self, values: list[Any]) -> None:
        """Add entries at the end."""
        if values:
            self._data += b"," if len(self._data) > 1 else b""
            self._data += encode_json(values)[1:-1]

    def value(self) -> msgspec.Raw:
        """All of it, for the encoder."""
        return msgspec.Raw(b"%b]" % self._data)


def event(value: Any) -> bytes:
    """One `data:` event with a JSON value."""
    return b"data: " + encode_json(value) + b"\n\n"


def json_response(value: Any, status: int = 200) -> Response:
    """A JSON answer from anything that msgspec encodes."""
    return Response(encode_json(value), status, media_type="application/json")


async def hung_up(receive: Receive) -> None:
    """Returns when the client is gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless_hung_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and `ClientDisconnect` raised as soon as the client is gone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _stop(task, gone)


class EventStream(Response):
    """Sends `events` (complete SSE events as bytes), then `[DONE]`; the client hanging up closes the iterator at once.

    The status line waits for the first event or, in a long prefill, for the first keep-alive comment, so that an error
    known by then has its own status. A later error becomes a last event with the envelope. `ping`: seconds of silence
    before a keep-alive comment, 0 = never. `headers`: more than every stream has.
    """

    def __init__(self, events: AsyncIterator[bytes], ping: float, headers: Mapping[str, str]):
        self.events, self.ping = events, ping
        self._head = [*HEADERS, *((name.encode(), value.encode("latin-1")) for name, value in headers.items())]
        self.status_code, self.background = 200, None
        self._started = self._ended = False
        self._last = time.monotonic()
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(self._write(scope, receive, send)), asyncio.ensure_future(hung_up(receive))]
        pings = [asyncio.ensure_future(self._keep_alive(send))] if self.ping > 0 else []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            await _stop(*tasks, *pings)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self.events) as events:
                async for data in events:
                    await self._emit(send, data)
            await self._emit(send, DONE)
        except Exception as error:  # whatever it is, the client gets an envelope
            known = as_request_error(error)
            leave(scope, known)
            async with self._lock:
                self._ended = True
                if not self._started:
                    await error_response(known, scope)(scope, receive, send)
                    return
            await self._emit(send, b"data: " + encode_error(known) + b"\n\n")
        self._ended = True
        async with self._lock:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _emit(self, send: Send, data: bytes) -> None:
        async with self._lock:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self._head})
            self._last = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while not self._ended:
            silence = time.monotonic() - self._last
            if silence < self.ping:
                await asyncio.sleep(self.ping - silence)
            else:
                await self._emit(send, PING)
