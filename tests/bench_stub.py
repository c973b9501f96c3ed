"""A server of OpenAI's streaming API for tests of what measures one: as slow, sparing or broken as a test wants it."""
from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """What is answered. pieces: of the text, each an event.  stall: seconds before the first.  raw: sent instead."""

    pieces: tuple[str, ...] = ("a", "b", "c")
    stall: float = 0.0
    status: int = 200
    error: str = ""
    cached: int | None = None
    raw: bytes | None = None
    hang_up: bool = False


@dataclass
class Stub:
    """answer(number, body) -> Reply for the n-th POST. One is answered at a time. `asked`: all bodies."""

    answer: Callable[[int, dict[str, Any]], Reply] = lambda number, body: Reply()
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    connections: int = 0

    def __enter__(self) -> Stub:
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def serve() -> None:
            self.lock, self.end = asyncio.Lock(), asyncio.Event()
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self.end.wait()
            server.close()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(serve()), daemon=True)
        self.thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.split(b" ", 2)
                size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                             if line.startswith(b"content-length")), 0)
                body = await reader.readexactly(size)
                if method == b"GET":
                    found = {"data": [{"id": "stub"}]} if path.endswith(b"/models") else None
                    self._whole(writer, 200 if found else 404, found or {"error": {"message": "no such page"}})
                    continue
                self.asked.append((path.decode(), json.loads(body)))
                async with self.lock:
                    await self._post(writer, self.answer(len(self.asked) - 1, self.asked[-1][1]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                     % (status, len(data)) + data)

    async def _post(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        await asyncio.sleep(reply.stall)
        if reply.status != 200:
            return self._whole(writer, reply.status, {"error": {"message": reply.error}})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

        def send(data: bytes) -> None:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        for piece in reply.pieces:
            send(b"data: " + json.dumps({"choices": [{"text": piece, "delta": {"content": piece}}]}).encode() + b"\n\n")
        if reply.hang_up:
            await writer.drain()
            raise ConnectionError
        usage = {"prompt_tokens": 10, "completion_tokens": len(reply.pieces)}
        if reply.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": reply.cached}
        send(reply.raw if reply.raw is not None else
             b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
