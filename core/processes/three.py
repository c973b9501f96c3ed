"""The engine in processes of its own: this one has the API and the tokenizer."""
from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio

from ..config import Config
from ..errors import EngineDead, Overloaded
from ..messages import Ready, Submit, Watch
from .client import EngineClient, ProgressCall
from .wire import SPOKE, decode_to_api, encode, read_socket, write_socket
from .workers import ROLES, Workers, describe_exit

RETRY_S = 0.02     # between tries to hand an abort to a scheduler whose queue is full
LAST_WORDS_S = 10  # how long the explanation of a worker that sent one may take to arrive


class ProcessClient(EngineClient):
    """Scheduler and detokenizer as child processes.

    engine, tokenizer: "module:attribute" of replacements for `EngineCore` and the tokenizer, importable there.
    """

    def __init__(self, config: Config, engine: str | None = None, tokenizer: str | None = None):
        super().__init__(config)
        self._replacements = (engine, tokenizer)
        self._workers: Workers | None = None
        self._reader: asyncio.Task[None] | None = None
        self._missing = set(ROLES)

    async def start(self, progress: ProgressCall | None = None) -> None:
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._context = zmq.asyncio.Context()
        self._workers = Workers(self.config, *self._replacements)
        self._inbox = read_socket(self._context, self._workers.directory, "api")
        # A plain socket: sending must not wait, since a cancelled task can still have an abort to send.
        self._outbox = write_socket(zmq.Context(self._context), self._workers.directory, "scheduler")
        self._reader = asyncio.create_task(self._read())
        self._workers.spawn(lambda role, code: self._loop.call_soon_threadsafe(self._on_exit, role, code))
        await self._started
        self._serve()
        await self.command("ping")  # proves the last connection; then the sockets need no names any more
        self._workers.forget_directory()
        self._watch_pulse()

    async def close(self) -> None:
        await super().close()
        if self._workers is None:
            return
        workers, self._workers = self._workers, None
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await asyncio.to_thread(workers.stop)
        self._outbox.close(0)
        self._inbox.close(0)
        self._context.term()

    def pids(self) -> dict[str, int]:
        """Process ids of the workers by role."""
        return self._workers.pids() if self._workers else {}

    async def _read(self) -> None:
        while True:
            self._receive(decode_to_api(await self._inbox.recv()))
            await asyncio.sleep(0)  # `recv` does not wait when there is something: a fast engine would starve the loop

    def _send(self, message: Any) -> None:
        try:
            self._outbox.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._loop.call_later(RETRY_S, self._send_again, message)

    def _send_again(self, message: Any) -> None:
        if self._state == "ready":
            self._send(message)

    def _send_request(self, submit: Submit, watch: Watch) -> None:
        try:
            self._outbox.send_multipart([encode(submit), encode(watch)], zmq.NOBLOCK)
        except zmq.Again:
            raise Overloaded("the scheduler's inbox is full", status=503) from None

    def _on_ready(self, message: Ready) -> None:
        if message.process == "scheduler":
            super()._on_ready(message)
        self._missing.discard(message.process)
        if not self._missing and not self._started.done():
            self._started.set_result(None)

    def _on_exit(self, role: str, code: int) -> None:
        """A worker is gone: unhealthy now. Who waits hears it now too, unless its own explanation is on the way."""
        if self._state not in ("dead", "closed"):
            self._state, self._reason = "failing", describe_exit(role, code)
            self._loop.call_later(LAST_WORDS_S if code == SPOKE else 0, self._end, "dead", self._reason)

    def _end(self, state: str, reason: str) -> None:
        super()._end(state, reason)
        if self._workers is not None and not self._started.done():
            self._started.set_exception(EngineDead(self._reason))
