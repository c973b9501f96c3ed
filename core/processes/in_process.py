"""The engine in a thread of this process: for small machines, for `Engine(...)` in Python and for tests."""
from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ..config import Config
from ..errors import EngineDead
from ..messages import Abort, Failed, Ready, Submit, TokenOutputs, Watch
from .client import EngineClient, ProgressCall
from .detokenizer import DetokenizerState, load_tokenizer_of
from .scheduler import BATCH, SchedulerState, make_engine, ready
from .wire import describe, stacks

log = logging.getLogger(__name__)


class InProcessClient(EngineClient):
    """Scheduler and detokenizer in one thread. Outputs reach the event loop once a step.

    engine: makes the engine from (config, progress=); tokenizer: makes the tokenizer from config.
    """

    def __init__(self, config: Config, engine: Callable[..., Any] | None = None,
                 tokenizer: Callable[[Config], Any] | None = None):
        super().__init__(config)
        self._make_engine, self._make_tokenizer = engine, tokenizer or load_tokenizer_of
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._engine: Any = None

    async def start(self, progress: ProgressCall | None = None) -> None:
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        await self._started
        self._serve()
        self._watch_pulse()

    async def close(self) -> None:
        leave = self._state == "loading" or self.hung
        await super().close()
        if self._thread is not None:
            self._inbox.put(None)
            if not leave:  # what loads or hangs cannot be interrupted; the thread ends when it can, or with the process
                await asyncio.to_thread(self._thread.join)
            self._thread = None

    def _send(self, message: Any) -> None:
        self._inbox.put(message)

    def _send_request(self, submit: Submit, watch: Watch) -> None:
        self._inbox.put(watch)
        self._inbox.put(submit)

    def _on_ready(self, message: Ready) -> None:
        super()._on_ready(message)
        if not self._started.done():
            self._started.set_result(None)

    def _end(self, state: str, reason: str) -> None:
        super()._end(state, reason)
        if self._thread is not None and not self._started.done():
            self._started.set_exception(EngineDead(reason))

    def _processor_time(self) -> float:
        return time.process_time()

    def _report(self) -> None:
        engine = self._engine
        log.error("%s", "\n".join(filter(None, [engine.report() if engine else "", stacks()])))

    # Below: in the engine's thread.

    def _post(self, message: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._receive, message)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._inbox.put(None)

    def _run(self) -> None:
        engine = None
        try:
            self._detokenizer = DetokenizerState(self._make_tokenizer(self.config))
            engine = self._engine = make_engine(self._make_engine, self.config, self._post)
            state = SchedulerState(engine, self._pass_on)
            self._post(ready(engine))
            self._feed(state)
        except BaseException as error:  # the thread's last words; the loop gives them to everybody who waits
            self._post(Failed("engine", describe(error)))
        finally:
            if engine is not None:
                engine.close()

    def _feed(self, state: SchedulerState) -> None:
        """Until `None` arrives: take messages, then make a step. Blocks when there is nothing to do."""
        while True:
            if wait := not state.engine.has_work:
                state.engine.save()
            for _ in range(BATCH):
                try:
                    message = self._inbox.get(block=wait)
                except queue.Empty:
                    break
                wait = False
                if message is None:
                    return
                if isinstance(message, Watch):
                    self._detokenizer.watch(message)
                else:
                    state.handle(message)
            state.step()

    def _pass_on(self, message: Any) -> None:
        """What the detokenizer process does with a message of the scheduler."""
        if not isinstance(message, TokenOutputs):
            return self._post(message)
        texts, stops = self._detokenizer.handle(message)
        if stops:
            self._inbox.put(Abort(stops, "stop"))
        if texts.outputs:
            self._post(texts)
