"""The engine in processes of its own: this one has the API and the tokenizer."""
from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import zmq

from ..config import Config
from ..errors import EngineDead, EngineRestarting, Overloaded
from ..messages import Ready, Submit, Watch
from .client import EngineClient, ProgressCall
from .wire import SPOKE, decode_to_api, describe, encode, read_socket, write_socket
from .workers import ROLES, Workers, describe_exit

RETRY_S = 0.02     # between tries to hand an abort to a scheduler whose queue is full
LAST_WORDS_S = 10  # how long the explanation of a worker that sent one may take to arrive
WINDOW_S = 600     # in which restarts are counted
DUMP_S = 1.0       # how long processes may take to print where they hang
AT_ONCE = 32       # messages taken in one turn of the event loop; a request's texts in them are one piece

log = logging.getLogger(__name__)


class ProcessClient(EngineClient):
    """Scheduler and detokenizer as child processes, started anew when they die, as often as --restart allows, and when
    a request comes after they were ended for want of any (--idle-unload).

    engine, tokenizer: "module:attribute" of replacements for `EngineCore` and the tokenizer, importable there.
    """

    def __init__(self, config: Config, engine: str | None = None, tokenizer: str | None = None):
        super().__init__(config)
        self._replacements = (engine, tokenizer)
        self._workers: Workers | None = None
        self._again: asyncio.Handle | None = None  # the next turn, when more waits than is taken in one
        self._supervisor: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()  # not set as long as the engine may rest
        self._wanted.set()
        self._deaths: deque[float] = deque()
        self._context: zmq.Context | None = None

    async def start(self, progress: ProgressCall | None = None) -> None:
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        await self._open()
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        await super().close()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._workers is not None:
            await self._shut()
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _open(self) -> None:
        """Start the processes and wait until they can serve. Raises `EngineDead` when they cannot."""
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._missing = set(ROLES)
        self._lost = asyncio.Event()
        workers = self._workers = Workers(self.config, *self._replacements)
        self._inbox = read_socket(self._context, workers.directory, "api")
        self._outbox = write_socket(self._context, workers.directory, "scheduler")
        self._loop.add_reader(self._inbox.fileno(), self._read)
        workers.spawn(lambda role, code: self._loop.call_soon_threadsafe(self._on_exit, workers, role, code))
        await self._started
        self._unanswered = self._still = 0
        self._busy = self._reported = self.hung = False
        self._progress = None
        self._serve()
        await self.command("ping")  # proves the last connection; then the sockets need no names any more
        workers.forget_directory()
        self._watch_pulse()

    async def _shut(self) -> None:
        """End what `_open` started."""
        workers, self._workers = self._workers, None
        if self._pulse is not None:
            self._pulse.cancel()
        if not self._inbox.closed:  # else it was never opened
            self._loop.remove_reader(self._inbox.fileno())
        if self._again is not None:
            self._again.cancel()
        try:
            await asyncio.to_thread(workers.stop)
        finally:  # also when the supervisor is cancelled meanwhile: an open socket would keep its context for ever
            self._outbox.close(0)
            self._inbox.close(0)

    async def _supervise(self) -> None:
        """Start the engine anew whenever it is lost, until that has been done too often, or when it was unloaded and
        a request has come."""
        while not self.gone:
            await self._lost.wait()
            await self._shut()
            rested = self.idle
            await self._wanted.wait()
            try:
                await self._open()
                log.log(logging.INFO if rested else logging.WARNING, "the engine is there again")
            except EngineDead as error:
                self._end("dead", str(error))
            except Exception as error:  # such as no memory for a process: nobody would ever be told
                log.exception("the engine cannot be started anew")
                EngineClient._end(self, "dead", f"it cannot be started anew: {describe(error)}")

    def _unload(self) -> None:
        log.info("no request for %g s: the model is unloaded until one comes (--idle-unload)",
                 self.config.scheduler.idle_unload)
        self._state, self._reason = "idle", "the model is unloaded until a request comes (--idle-unload)"
        self._awake.clear()
        self._wanted.clear()
        self._lost.set()

    def _load_again(self) -> None:
        self._state, self._reason = "loading", "the model is loading again for a request"
        self._wanted.set()

    def _may_restart(self) -> bool:
        """Count a death. False when there were too many within `WINDOW_S`."""
        now = self._loop.time()
        while self._deaths and now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        if len(self._deaths) >= self.config.scheduler.restart:
            return False
        self._deaths.append(now)
        self.restarts += 1
        return True

    def pids(self) -> dict[str, int]:
        """Process ids of the workers by role."""
        return self._workers.pids() if self._workers else {}

    def _read(self) -> None:
        """Take what has come. The socket's descriptor tells of new messages only to those who have taken all."""
        messages: list[Any] = []
        fault = ""
        if self._again is not None:  # the descriptor was faster
            self._again.cancel()
            self._again = None
        try:
            while len(messages) < AT_ONCE:
                messages.append(decode_to_api(self._inbox.recv(zmq.NOBLOCK)))
            self._again = self._loop.call_soon(self._read)  # a fast engine must not starve the loop
        except zmq.Again:
            pass
        except msgspec.MsgspecError as error:
            fault = f"a message of the engine cannot be read: {error}"
        if messages:
            self._receive_all(messages)
        if fault:  # whose tokens they were nobody knows, and they would be waited for without end
            self._end("dead", fault)

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

    def _on_exit(self, workers: Workers, role: str, code: int) -> None:
        """A worker is gone: unhealthy now. Who waits hears it now too, unless its own explanation is on the way."""
        if workers is self._workers and not self._lost.is_set() and self._state not in ("dead", "closed", "failing"):
            self._state, self._reason = "failing", describe_exit(role, code)
            self._loop.call_later(LAST_WORDS_S if code == SPOKE else 0, self._lose, workers)

    def _lose(self, workers: Workers) -> None:
        if workers is self._workers:  # else its own words came first
            self._end("dead", self._reason)

    def _processor_time(self) -> float:
        with suppress(psutil.Error, KeyError):  # it has ended
            engine = psutil.Process(self.pids()["scheduler"])
            times = [each.cpu_times() for each in (engine, *engine.children(recursive=True))]  # with other ranks
            return sum(each.user + each.system for each in times)
        return 0.0

    def _report(self) -> None:
        self._workers.ask_for_report()

    def _hang(self, reason: str) -> None:
        self._state, self._reason = "failing", reason
        self._workers.dump()
        self._loop.call_later(DUMP_S, self._lose, self._workers)

    def _end(self, state: str, reason: str) -> None:
        """A dead engine is started anew where that is allowed; who waits for it hears of its death all the same."""
        if state == "dead" and self._supervisor is not None and self._state not in ("dead", "closed"):
            if self._lost.is_set():  # that is known
                return
            if self._may_restart():
                self._state, self._reason = "loading", f"{reason}. It is being started anew"
                log.error("the engine is gone: %s (%d of %d times in %g minutes)", self._reason, len(self._deaths),
                          self.config.scheduler.restart, WINDOW_S / 60)
                self._tell_all(lambda: EngineRestarting(f"the engine is gone: {self._reason}: send the request again"))
                self._lost.set()
                if not self._started.done():
                    self._started.set_exception(EngineRestarting(self._reason))
                return
        super()._end(state, reason)
        if self._workers is not None and not self._started.done():
            self._started.set_exception(EngineDead(self._reason))
