"""The API's side of the engine: one interface, whichever way the engine runs."""
from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from ..config import Config
from ..errors import EngineDead, EngineStopped, IsthmusError, Overloaded, RequestError
from ..messages import (
    Abort,
    Command,
    Failed,
    Progress,
    Ready,
    Reply,
    Submit,
    TextOutput,
    TextOutputs,
    Watch,
)
from .backlog import Backlog, Tap

log = logging.getLogger(__name__)

ProgressCall = Callable[[str, int, int], None]  # stage, done, total

COMPUTES = 0.05      # share of a processor from which an engine that finishes no step is at work on a busy machine
FRESH_S = 0.1        # how long who asks for figures waits for new ones
PING_S = 2.0         # between two questions how the engine is; it answers between two steps
UNREAD_S = 3.0       # how long a reader of an ended request may rest while all others have been served
IDLE_SILENCE_S = 10  # an engine without requests answers long before that
PULSE = "pulse"      # the token of those questions
STOPPING = "the server is shutting down and takes no new requests"
UNFINISHED = "the server is shutting down: this request was not finished, send it again"


class Figures(NamedTuple):
    """What the engine counts, as its command "stats" gives it, and when it came, by `time.monotonic`; {} = nothing."""

    stats: dict[str, Any]
    at: float


class EngineClient(ABC):
    """Requests in, texts out. Used from one event loop only.

    info: what the engine says about itself, once `start` has returned.
    progress: how far the loading is: stage, done, total; None = it does not load, or has not told yet.
    draining: no new request is taken; running ones go on.
    died: set when the engine is gone although nobody stopped it; `health` has the reason. It never comes back.
    hung: whether it was ended for finishing no step.  restarts: how often it was started anew.
    on_start: what is to be done whenever the engine was started: to bring back what it was told at run time.
    """

    def __init__(self, config: Config):
        self.config = config
        self.info: dict[str, Any] = {}
        self.progress: tuple[str, int, int] | None = None
        self.draining = self.hung = False
        self.restarts = 0
        self.died = asyncio.Event()
        # loading, ready, idle (unloaded until a request comes), failing, dead or closed
        self._state, self._reason = "loading", "the model is loading"
        self._awake = asyncio.Event()  # not set while the model is unloaded, or loads again for a request
        self._awake.set()
        self.on_start: Callable[[], Awaitable[None]] | None = None
        self._starting: asyncio.Task[None] | None = None  # of `on_start`
        self._computing = 0  # commands that compute something for a client
        self._callers, self._used = 0, 0.0  # that wait for it; when the last request ended, by `time.monotonic`
        self._progress: ProgressCall | None = None
        self._streams: dict[str, Backlog] = {}  # by the engine's names
        self._names: dict[str, str] = {}  # request id -> the engine's name of it
        self._commands: dict[str, asyncio.Future[Any]] = {}
        self._serial = itertools.count()
        self._unanswered = self._still = 0  # pings since the engine was last heard, and since it last got on
        self._busy, self._steps = False, 0  # whether it may have work, and the steps that it spoke of
        self._reported, self._spent = False, 0.0  # whether this silence was reported, and processor time by then
        self._pulse: asyncio.Task[None] | None = None
        self._figures: Figures | None = None  # the last that this engine gave
        self._asking: asyncio.Task[None] | None = None

    @abstractmethod
    async def start(self, progress: ProgressCall | None = None) -> None:
        """Bring the engine up; returns when it can serve. `EngineDead` carries the reason when it cannot."""

    async def close(self) -> None:
        """Stop the engine at once; whoever still waits gets `EngineStopped`. May be called twice."""
        self._end("closed", UNFINISHED)
        if self._pulse is not None:
            self._pulse.cancel()

    async def generate(self, submit: Submit, watch: Watch, tap: Tap | None = None) -> AsyncIterator[TextOutput]:
        """The request's outputs, the last with a finish. A finish "error" is raised as the `RequestError` it means.

        Inside the engine the request has a name of its own, which its outputs bear: whoever leaves may come back with
        the same id before the engine has heard of the abort.
        Closing the iterator early, or cancelling its task, aborts the request. `EngineDead` when the engine is gone,
        `EngineStopped` when it was stopped, `Overloaded` (503) while it loads or drains; a model that was unloaded is
        waited for, and so is an adapter that a new engine has not got back yet. What waits unread is bounded by the
        request's own length, and comes joined together. tap: may take outputs at once, while the iterator waits for one
        (`Backlog`); what it raises is raised here.
        """
        while self.idle or (submit.adapter and self._lacks(submit.adapter)):  # it may rest again at once
            await self._wait_awake(bool(submit.adapter))
        self._admit(submit)
        name = f"{submit.id}.{next(self._serial)}"
        self._send_request(msgspec.structs.replace(submit, id=name), msgspec.structs.replace(watch, id=name))
        backlog = self._streams[name] = Backlog(tap)
        self._names[submit.id] = name
        self._busy = True
        finish = None
        try:
            while finish is None:
                output = await backlog.get()
                finish = output.finish
                yield output
        finally:
            self._used = time.monotonic()
            del self._streams[name], self._names[submit.id]
            if not backlog.ended and self._state == "ready":  # else the engine knows
                self._send(Abort((name,)))

    async def abort(self, id: str) -> None:
        """End a request; its iterator gets an output with finish "abort". An unknown id is ignored."""
        if id in self._names and self._state == "ready":
            self._send(Abort((self._names[id],)))

    async def command(self, name: str, timeout: float = 60.0, **arguments: str | float) -> dict[str, Any]:
        """The engine's answer to an administrative call. `IsthmusError` or `RequestError` if it refuses, `EngineDead`
        if it is gone."""
        if self.idle:
            raise IsthmusError(f"{name}: {self._reason}")
        if self._state != "ready":
            raise self.dead()
        token = f"{name}-{next(self._serial)}"
        future = self._commands[token] = asyncio.get_running_loop().create_future()
        try:
            self._send(Command(token, name, arguments))
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise EngineDead(f"the engine did not answer {name!r} within {timeout:g} s") from None
        finally:
            self._commands.pop(token, None)

    async def compute(self, name: str, timeout: float, **arguments: str | float) -> dict[str, Any]:
        """`command` for work that a client asks for: an unloaded model is loaded for it, and it counts as a use."""
        if not self._awake.is_set():
            await self._wait_awake()
        self._computing += 1
        try:
            return await self.command(name, timeout, **arguments)
        finally:
            self._computing -= 1
            self._used = time.monotonic()

    async def settle(self) -> None:
        """Have an unloaded model loaded, and wait until a new engine has got back what it was told at run time."""
        while self.idle or self._restores:
            await self._wait_awake(True)

    async def figures(self) -> Figures:
        """New ones if the engine gives them at once, else the last that it gave: it answers between two steps only.

        None of an engine that is gone, or that has given none yet.
        """
        if self._state == "ready":
            await asyncio.wait({self._ask_figures()}, timeout=FRESH_S)
        if self._state != "ready" or self._figures is None:
            return Figures({}, time.monotonic())
        return self._figures

    def _ask_figures(self) -> asyncio.Task[None]:
        """The one question for figures that is under way."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._take_figures())
        return self._asking

    async def _take_figures(self) -> None:
        with suppress(IsthmusError):  # it is gone, or in a step that takes longer than that
            self._figures = Figures(await self.command("stats"), time.monotonic())

    def health(self) -> tuple[bool, str]:
        """Whether the engine can compute, or will once a request comes, and if not why. A step may take --step-timeout;
        it may still end later."""
        if self.idle:
            return True, ""
        silence = self._unanswered * PING_S
        if self._state == "ready" and self.step_age > self.config.scheduler.step_timeout:
            return False, (f"the engine has requests and has finished no step for {self.step_age:g} s"
                           f"{'' if silence > IDLE_SILENCE_S else ', though it answers'}; see --step-timeout")
        if self._state == "ready" and silence > IDLE_SILENCE_S and not self._busy:
            return False, f"the engine has not answered for {silence:g} s"
        return self._state == "ready", self._reason

    @property
    def step_age(self) -> float:
        """Seconds since a step ended, in units of `PING_S`; 0 while the engine has nothing to do."""
        return self._still * PING_S if self._busy else 0.0

    @property
    def idle(self) -> bool:
        """Whether the model is unloaded until a request comes, or loads for one that has come."""
        return not self._awake.is_set()

    @property
    def status(self) -> str:
        """"ok", "idle" or "loading" for people and probes; "unavailable" when `health` has the reason."""
        if self._state in ("idle", "loading"):
            return self._state
        return "ok" if self.health()[0] else "unavailable"

    @property
    def _restores(self) -> bool:
        """Whether a new engine gets back what it was told at run time."""
        return self._starting is not None and not self._starting.done()

    def _lacks(self, adapter: int) -> bool:
        """Whether it may be among what is on its way to a new engine."""
        return self._restores and all(adapter != known["number"] for known in self.info.get("adapters", ()))

    async def _wait_awake(self, adapters: bool = False) -> None:
        """Have an unloaded model loaded; adapters: and those that came at run time brought back. Raises `Overloaded`
        when too many wait for it, or it takes too long."""
        limits = self.config.scheduler
        if self.draining:
            raise Overloaded(STOPPING, status=503, code="server_stopping")
        if self._callers >= limits.max_queued_requests:
            raise Overloaded(f"{self._callers} requests wait for the model to be loaded again")
        self._callers += 1
        try:
            if self._state == "idle":
                self._load_again()
            async with asyncio.timeout(limits.waiting_timeout or None):
                await self._awake.wait()
                if adapters and self._starting is not None:
                    await asyncio.wait({self._starting})
        except TimeoutError:
            spent = f"{limits.waiting_timeout:g} s (--waiting-timeout)"
            raise Overloaded(f"the model was not loaded again within {spent}", status=503) from None
        finally:
            self._callers -= 1

    def _load_again(self) -> None:
        """Begin to load a model that was unloaded."""
        raise NotImplementedError  # only who unloads is asked

    def _unload(self) -> None:
        """Let weights, K and V go until the next request. A client that cannot do that keeps them."""
        return

    @property
    def gone(self) -> bool:
        """Whether the engine has ended, so that waiting for it is of no use."""
        return self._state not in ("loading", "ready", "idle")

    async def drain(self, timeout: float) -> bool:
        """Take no new request and wait until the running ones have ended; those left after `timeout` s are aborted, and
        who waits for them gets `EngineStopped`. Readers that take nothing of what has ended are not waited for.

        True if all ended by themselves.
        """
        self.draining = True
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        unread, moved = -1, loop.time()
        while self._streams and self._state == "ready" and loop.time() < min(end, moved + UNREAD_S):
            now = sum(backlog.unread for backlog in self._streams.values())
            if now != unread or not all(backlog.ended for backlog in self._streams.values()):
                unread, moved = now, loop.time()
            await asyncio.sleep(0.02)
        left = tuple(self._streams)
        if left and self._state == "ready":
            self._send(Abort(left))
            for backlog in self._streams.values():
                backlog.put(EngineStopped(UNFINISHED))
        return not left

    @property
    def waiting(self) -> int:
        """Requests of this client that have not ended."""
        return len(self._streams)

    def _admit(self, submit: Submit) -> None:
        if self._state == "loading":
            raise Overloaded(self._reason, status=503)
        if self.draining and self._state in ("ready", "closed"):
            raise Overloaded(STOPPING, status=503, code="server_stopping")
        if self._state != "ready":
            raise self.dead()
        if submit.id in self._names:
            raise RequestError(f"request id {submit.id!r} is in use", status=409, param="request_id")

    @abstractmethod
    def _send(self, message: Any) -> None:
        """Hand one message to the scheduler without waiting; it must arrive while the engine lives."""

    @abstractmethod
    def _send_request(self, submit: Submit, watch: Watch) -> None:
        """Hand over a request; `Overloaded` when nothing more fits."""

    def _receive_all(self, messages: Sequence[Any]) -> None:
        """Pass on messages that came together, in order: what one request has in several steps as one piece."""
        if len(messages) == 1:
            return self._hand(self._receive, messages[0])
        for texts, group in itertools.groupby(messages, lambda message: isinstance(message, TextOutputs)):
            if not texts:
                for message in group:
                    self._hand(self._receive, message)
                continue
            self._unanswered = 0
            pieces: dict[str, list[TextOutput]] = {}
            for output in itertools.chain.from_iterable(message.outputs for message in group):
                pieces.setdefault(output.id, []).append(output)
            for name, outputs in pieces.items():
                if (backlog := self._streams.get(name)) is not None:
                    self._hand(backlog.put_all, outputs)

    @staticmethod
    def _hand(take: Callable[[Any], None], what: Any) -> None:
        """What goes wrong with one message must not keep the others from those who wait for them."""
        try:
            take(what)
        except Exception:
            log.exception("a message of the engine was lost")

    def _receive(self, message: Any) -> None:
        """Pass on one message of `ToApi`. Texts of requests that nobody waits for any more are dropped."""
        self._unanswered = 0
        if isinstance(message, TextOutputs):
            for output in message.outputs:
                backlog = self._streams.get(output.id)
                if backlog is not None:
                    backlog.put(output)
        elif isinstance(message, Reply):
            self._answer(message)
        elif isinstance(message, Progress):
            self._reason = f"the model is loading: {message.stage}"
            self.progress = message.stage, message.done, message.total
            if self._progress is not None:
                self._progress(message.stage, message.done, message.total)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Failed):
            self._end("dead", message.message)

    def _on_ready(self, message: Ready) -> None:
        self.info = json.loads(message.info) or self.info

    def _answer(self, reply: Reply) -> None:
        if reply.token == PULSE and reply.ok:
            return self._feel(json.loads(reply.data))
        future = self._commands.get(reply.token)
        if future is None or future.done():
            return
        data = json.loads(reply.data)
        if reply.ok:
            future.set_result(data)
        else:
            message, status = data["error"], data.get("status")
            future.set_exception(IsthmusError(message) if status is None else RequestError(
                message, status=status, code=data["code"], param=data["param"]))

    def _serve(self) -> None:
        if self._state == "loading":
            self._state, self._reason, self._figures, self.progress = "ready", "", None, None
            self._used = time.monotonic()
            self._awake.set()
            if self.on_start is not None:
                self._starting = asyncio.ensure_future(self.on_start())

    def _watch_pulse(self) -> None:
        """Ask again and again whether the engine still answers; `health` tells."""
        self._ask_figures()
        self._pulse = asyncio.ensure_future(self._ping())

    async def _ping(self) -> None:
        while self._state == "ready":
            await asyncio.sleep(PING_S)
            self._unanswered += 1
            self._still += 1
            if self._unanswered == 1:  # one that waits will do
                self._send(Command(PULSE, "ping"))
            if self._busy:  # a long step may begin any time
                self._ask_figures()
            self._judge()
            self._rest()

    def _rest(self) -> None:
        """Unload what nobody has used for --idle-unload."""
        limit, rested = self.config.scheduler.idle_unload, time.monotonic() - self._used
        used = self._streams or self._computing or self._restores or self.draining
        if limit and self._state == "ready" and not used and rested >= limit:
            self._unload()

    def _judge(self) -> None:
        """The watchdog, the only one: a report after half of --step-timeout without a step, the end after all of it."""
        limit = self.config.scheduler.step_timeout
        if self._state != "ready" or self.step_age <= limit / 2:
            return
        if not self._reported:
            self._reported = True
            log.error("the engine has requests and has finished no step for %g s; at %g s it is ended "
                      "(--step-timeout). Where it is:", self.step_age, limit)
            self._report()
            self._spent = self._processor_time()
        if self.step_age > limit:
            self.hung = True
            found = f"it had requests and finished no step for {self.step_age:g} s (--step-timeout)"
            inside = self._unanswered * PING_S > limit / 2  # one step; between steps it would have answered
            computes = self._processor_time() - self._spent >= COMPUTES * limit / 2
            self._hang(f"the engine hung: {found}" if not (inside and computes) else
                       f"the engine was ended while it computed: {found}. A --step-timeout longer than {limit:g} lets "
                       "it finish, --chunked-prefill-size makes steps shorter; `isthmus doctor` says which platform "
                       "is faster")

    @abstractmethod
    def _processor_time(self) -> float:
        """Seconds that the processes or threads of the engine have computed."""

    @abstractmethod
    def _report(self) -> None:
        """Have the engine log where its threads are and what happened last."""

    def _hang(self, reason: str) -> None:
        """Take the engine for dead."""
        self._end("dead", reason)

    def _feel(self, pulse: dict[str, Any]) -> None:
        if pulse["steps"] != self._steps or not pulse["busy"]:
            self._still, self._reported = 0, False
        self._steps, self._busy = pulse["steps"], pulse["busy"] or bool(self._streams)

    def _end(self, state: str, reason: str) -> None:
        """No more answers will come: tell everybody who waits. The first reason counts."""
        if self._state in ("dead", "closed"):
            return
        self._state, self._reason = state, reason
        self._awake.set()
        if state == "dead":
            self.died.set()
        self._tell_all(self.dead)

    def _tell_all(self, error: Callable[[], EngineDead]) -> None:
        """Everybody who waits gets an error of their own. What was on its way to the engine goes with it."""
        if self._starting is not None:
            self._starting.cancel()
        for backlog in self._streams.values():
            backlog.put(error())
        for future in self._commands.values():
            if not future.done():
                future.set_exception(error())

    def dead(self) -> EngineDead:
        """Why no answer can come: the engine died, or it was stopped."""
        return (EngineStopped if self._state == "closed" else EngineDead)(self._reason)
