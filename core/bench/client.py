"""An asynchronous client of OpenAI's streaming API: made to be read late as little as possible, and to say so.

Times are taken when bytes arrive, before they are looked at. It reads one answer at a time on a connection and keeps
the connection for the next.
"""
from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec

from ..errors import cut, printable
from .recorder import Outcome
from .workload import Ask

MAX_EVENT = 2**24   # bytes
MAX_SAID = 300      # characters of an error that are kept
READ = 2**16


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


CHUNK = msgspec.json.Decoder(_Chunk)


class Broken(Exception):
    """An answer that went wrong: (kind, what was said)."""


@dataclass(frozen=True)
class Target:
    """A server. path: in front of /v1.  extras: fields that it takes beyond those that all take.  timeout: seconds for
    a whole answer.  chat: it has no /v1/completions, and a text is sent as a user's message."""

    host: str
    port: int
    secure: bool
    path: str
    headers: Mapping[str, str]
    model: str
    extras: Mapping[str, Any]
    timeout: float = 3600.0
    chat: bool = False


class _Reader:
    """Callbacks of httptools, for one answer after the other."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.body, self.complete, self.keep = bytearray(), False, False
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.keep = self.parser.should_keep_alive()  # afterwards the parser no longer knows

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class _Answer:
    """The events of one streamed answer, counted as they come."""

    def __init__(self, keep: bool) -> None:
        self.events: list[float] = []
        self.counts: list[int] = []
        self.parts: list[str] | None = [] if keep else None
        self.usage = _Usage()
        self.seen, self.counted_by_server, self.done = 0, False, False

    def take(self, body: bytearray, now: float) -> None:
        """Whole lines of what has come; the rest stays. Raises `Broken`."""
        end = body.rfind(b"\n") + 1
        if not end:
            if len(body) > MAX_EVENT:
                raise Broken("bad answer", f"an event has more than {MAX_EVENT} bytes")
            return
        for line in bytes(body[:end]).split(b"\n"):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                elif data:
                    self._event(data, now)
        del body[:end]

    def _event(self, data: bytes, now: float) -> None:
        try:
            chunk = CHUNK.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Broken("bad answer", f"{error}: {data[:100]!r}") from None
        if chunk.error is not None:
            raise Broken("error in stream", said(chunk.error))
        fresh = 0
        for choice in chunk.choices:
            delta = choice.delta or _Delta()
            piece = choice.text or delta.content or delta.reasoning_content or delta.reasoning or ""
            fresh += bool(piece or delta.tool_calls)
            if self.parts is not None and piece:
                self.parts.append(piece)
        if chunk.usage is not None:
            self.usage = chunk.usage
            if chunk.choices:
                self.counted_by_server = True
        if self.counted_by_server:
            fresh = self.usage.completion_tokens - self.seen if chunk.usage is not None else 0
        if fresh > 0:
            self.seen += fresh
            self.events.append(now)
            self.counts.append(fresh)


class Connection:
    """A connection to a server, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer, self.http = reader, writer, _Reader()

    @classmethod
    async def open(cls, target: Target) -> Connection:
        context = ssl.create_default_context() if target.secure else None
        return cls(*await asyncio.open_connection(target.host, target.port, ssl=context))

    async def more(self) -> float:
        """Read once; when it came."""
        data = await self.reader.read(READ)
        now = time.monotonic()
        if not data:
            raise ConnectionResetError("the server closed the connection in the middle of an answer")
        self.http.parser.feed_data(data)
        return now

    def close(self) -> None:
        self.writer.close()


class Client:
    """Asks a server; connections that are free are kept for the next request."""

    def __init__(self, target: Target):
        self.target, self._free = target, []
        self._head = "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())

    def close(self) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    async def ask(self, ask: Ask, due: float | None = None, keep: bool = False) -> Outcome:
        """One request to its end; what goes wrong is in the outcome. keep: with the text of the answer."""
        path, body = self.body_of(ask)
        sent = time.monotonic()
        answer, error = _Answer(keep), ("", "")
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._post(path, json.dumps(body).encode(), answer)
            if not answer.events:
                error = ("no token", "the answer brought no token")
            elif not answer.done:
                error = ("cut off", "the stream ended without [DONE]")
        except TimeoutError:
            error = ("timeout", f"no whole answer in {self.target.timeout:g} s")
        except Broken as broken:
            error = broken.args
        except (OSError, httptools.HttpParserError, EOFError) as failed:
            error = ("connection", str(failed) or type(failed).__name__)
        usage = answer.usage
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens")
        return Outcome(sent if due is None else due, sent, time.monotonic(), answer.events, answer.counts,
                       usage.prompt_tokens, cached if isinstance(cached, int) else None,
                       usage.completion_tokens or answer.seen, error[0], cut(printable(error[1]), MAX_SAID),
                       "".join(answer.parts or ()))

    def body_of(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """Where a request goes, and what it is."""
        prompt = ask.prompt
        if self.target.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        options = {"stream_options": {"include_usage": True}, **self.target.extras}
        return (self.target.path + ("/v1/chat/completions" if chat else "/v1/completions"),
                {"model": self.target.model, "messages" if chat else "prompt": prompt,
                 "max_tokens": ask.max_tokens, "stream": True, "temperature": 0, **options})

    async def _post(self, path: str, body: bytes, answer: _Answer) -> None:
        connection = self._free.pop() if self._free else None
        fresh = connection is None
        host = f"[{self.target.host}]" if ":" in self.target.host else self.target.host
        head = (f"POST {path} HTTP/1.1\r\nHost: {host}:{self.target.port}\r\n{self._head}"
                f"Content-Length: {len(body)}\r\n\r\n").encode()
        while True:
            connection = connection or await Connection.open(self.target)
            try:
                connection.http.reset()
                connection.writer.write(head + body)
                now = await connection.more()
                break
            except BaseException as error:  # also when its time is over: the server goes on for whom it still sees
                connection.close()
                if fresh or not isinstance(error, ConnectionError | httptools.HttpParserError):
                    raise
                connection, fresh = None, True  # one that was kept may have been closed meanwhile
        try:
            await self._read(connection, answer, now)
        except BaseException:
            connection.close()
            raise
        if connection.http.keep:
            self._free.append(connection)
        else:
            connection.close()

    async def _read(self, connection: Connection, answer: _Answer, now: float) -> None:
        http = connection.http
        status = http.parser.get_status_code()
        while status == 200:
            answer.take(http.body, now)
            if http.complete:
                return
            now = await connection.more()
        while not http.complete and len(http.body) < READ:
            await connection.more()
        raise Broken(f"http {status}", said(http.body.decode(errors="replace")))


def said(error: Any) -> str:
    """The message of OpenAI's error envelope, or the beginning of whatever it is."""
    if isinstance(error, str):
        try:
            error = json.loads(error)
        except (ValueError, RecursionError):
            return error.strip()
    if isinstance(error, dict):
        inside = error.get("error", error)
        error = inside.get("message", inside) if isinstance(inside, dict) else inside
    return str(error)
