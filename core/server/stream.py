"""Server-sent events, and the watch for clients that hang up."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .connection import DIRECT
from .errors import as_request_error, encode_error, error_response, leave

T = TypeVar("T")

HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Framing(NamedTuple):
    """What an API's streams have around their events. ping: what breaks a silence, b"" where nothing may. done: what
    follows the last event. error: an encoded envelope -> the event that tells of it."""

    media: bytes
    ping: bytes
    done: bytes
    error: Callable[[bytes], bytes]


def _data(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def _error_event(body: bytes) -> bytes:
    return b"event: error\ndata: " + body + b"\n\n"


SSE = b"text/event-stream; charset=utf-8"
OPENAI = Framing(SSE, b": ping\n\n", b"data: [DONE]\n\n", _data)
RESPONSES = Framing(SSE, b": ping\n\n", b"", lambda body: b"")  # whose events tell of errors themselves
ANTHROPIC = Framing(SSE, b'event: ping\ndata: {"type":"ping"}\n\n', b"", _error_event)
LINES = Framing(b"application/x-ndjson", b"", b"", lambda body: body + b"\n")

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


class Mold:
    """An event of which only one text changes. blank: the event with that text empty. field: what is before the text,
    as JSON in which the quotation marks are not escaped, so that it is nowhere else."""

    def __init__(self, blank: bytes, field: bytes):
        before, found, self._tail = blank.partition(field + b'""')
        self._head = before + found[:-2]

    def __call__(self, text: str) -> bytes:
        return b"%b%b%b" % (self._head, encode_json(text), self._tail)


def event(value: Any) -> bytes:
    """One `data:` event with a JSON value."""
    return _data(encode_json(value))


def typed_event(kind: str, value: Any) -> bytes:
    """One event that has a name, with a JSON value."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(value))


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
    """Sends `events` (complete events as bytes), then the framing's end; the client hanging up closes the iterator at
    once.

    The status line waits for the first event or, in a long prefill, for the first keep-alive comment, so that an error
    known by then has its own status. A later error becomes a last event with the envelope. `ping`: seconds of silence
    before a keep-alive comment, 0 = never. `headers`: more than every stream has. Where the server has the extension
    `DIRECT`, events of a stream that has begun take that way, also past the iterator (`write`).
    """

    def __init__(self, events: AsyncIterator[bytes], ping: float, headers: Mapping[str, str],
                 framing: Framing = OPENAI):
        self.events, self.framing = events, framing
        self.ping = ping if framing.ping else 0.0
        self._head = [(b"content-type", framing.media), *HEADERS,
                      *((name.encode(), value.encode("latin-1")) for name, value in headers.items())]
        self.status_code, self.background = 200, None
        self._started = self._ended = False
        self._last = time.monotonic()
        self._lock = asyncio.Lock()
        self._direct: Any = None

    @property
    def open(self) -> bool:
        """Whether `write` may be called."""
        direct = self._direct
        return direct is not None and self._started and not self._ended and not self._lock.locked() and direct.open

    def write(self, data: bytes) -> None:
        """Send events at once. Those that the iterator gave before must have been sent: it waits for its next ones."""
        self._last = time.monotonic()
        self._direct.write(data)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct = scope.get("extensions", {}).get(DIRECT)
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
            if self.framing.done:
                await self._emit(send, self.framing.done)
        except Exception as error:  # whatever it is, the client gets an envelope
            known = as_request_error(error)
            leave(scope, known)
            async with self._lock:
                self._ended = True
                if not self._started:
                    await error_response(known, scope)(scope, receive, send)
                    return
            if told := self.framing.error(encode_error(known, scope)):
                await self._emit(send, told)
        self._ended = True
        async with self._lock:
            await self._begin(send)  # a stream may have no event
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self._head})

    async def _emit(self, send: Send, data: bytes) -> None:
        if self.open:
            return self.write(data)
        async with self._lock:
            await self._begin(send)
            self._last = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while not self._ended:
            silence = time.monotonic() - self._last
            if silence < self.ping:
                await asyncio.sleep(self.ping - silence)
            else:
                await self._emit(send, self.framing.ping)
