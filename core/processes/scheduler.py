"""Feeds an engine and sends what it computes. `SchedulerState` knows no socket; `serve` is the process."""
from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ..env import debug_level
from ..errors import IsthmusError, RequestError
from ..messages import Abort, Command, Progress, Ready, Reply, Submit, TokenOutputs, refused
from .wire import Report, Start, decode_to_scheduler, describe, encode, read_socket, resolve, run_worker

log = logging.getLogger(__name__)

BATCH = 1024  # messages taken between two steps at most, so that a flood cannot hold up running requests


class SchedulerState:
    """An engine and where its outputs go. `send` takes one message for the detokenizer."""

    def __init__(self, engine: Any, send: Callable[[Any], None]):
        self.engine, self.send = engine, send
        self._events = debug_level() >= 3

    def handle(self, message: Any) -> None:
        """Carry out one message of `ToScheduler`."""
        if self._events:
            log.info("%s", _event(message))
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self.engine.abort(message.ids, message.reason)
        elif isinstance(message, Command):
            self.send(self._command(message))
        else:
            self.send(message)

    def step(self) -> None:
        """One step of the engine, if it has work."""
        if self.engine.has_work:
            outputs = self.engine.step()
            for output in outputs if self._events else ():
                if output.finish is not None:
                    log.info("request %s ends: %s %s", output.id, output.finish, output.error)
            if outputs:
                self.send(outputs.message())

    def _submit(self, request: Submit) -> None:
        try:
            self.engine.submit(request)
        except RequestError as error:
            self.send(TokenOutputs([refused(request.id, error)]))
        except Exception as error:  # what one request sets off must not end everybody's
            log.exception("request %s cannot be taken", request.id)
            failure = RequestError(f"the request cannot be taken: {describe(error)}", status=500, kind="server_error")
            self.send(TokenOutputs([refused(request.id, failure)]))

    def _command(self, command: Command) -> Reply:
        try:
            return Reply(command.token, True, msgspec.json.encode(self.engine.command(
                command.name, **command.arguments)))
        except Exception as error:  # an administrative call must not end the engine
            if not isinstance(error, IsthmusError):
                log.exception("command %s failed", command.name)
            known = {"status": error.status, "code": error.code, "param": error.param} if isinstance(
                error, RequestError) else {}
            return Reply(command.token, False, msgspec.json.encode({"error": describe(error), **known}))


def _event(message: Any) -> str:
    if isinstance(message, Submit):
        return f"request {message.id}: {len(message.prompt) // 4} prompt tokens, {message.params}"
    return f"requests {', '.join(message.ids)}: {message.reason}" if isinstance(message, Abort) else str(message)


def make_engine(factory: Callable[..., Any] | None, config: Any, send: Callable[[Any], None]) -> Any:
    """`EngineCore`, or what `factory` makes in its place, reporting its progress through `send`."""
    if factory is None:
        from ..engine import EngineCore as factory
    return factory(config, progress=lambda stage, done, total: send(Progress(stage, int(done), int(total or 0))))


def ready(engine: Any) -> Ready:
    """What the API process learns about the engine."""
    return Ready("scheduler", msgspec.json.encode(engine.info))


def serve(start: Start, context: zmq.Context, outbox: zmq.Socket, report: Report) -> None:
    """Run the engine until the process is told to leave. Blocks when there is nothing to do."""
    inbox = read_socket(context, start.directory, "scheduler")
    send = lambda message: outbox.send(encode(message))  # noqa: E731
    engine = make_engine(resolve(start.engine) if start.engine else None, start.config, send)
    report.tail, report.save = engine.report, engine.save
    gc.collect()
    gc.freeze()  # what was loaded stays: to look it through again takes as long as many steps
    send(ready(engine))
    state = SchedulerState(engine, send)
    while True:
        if not engine.has_work:
            engine.save()
            inbox.poll()
        for _ in range(BATCH):
            try:
                frames = inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            for watch in frames[1:]:
                outbox.send(watch)
            state.handle(decode_to_scheduler(frames[0]))
        state.step()


if __name__ == "__main__":
    run_worker("scheduler", "detokenizer", serve)
